"""Matrix products of an op on the CPU, in the executor's arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats import QuantTensor
from nbflow_kernels.formats.column_order import gather_columns, same_columns
from nbflow_kernels.matmul import cpu as floats
from nbflow_kernels.quantized_matmul import cpu as quantized
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows


def is_block_quantized(weight: Any) -> bool:
    """Return True for a block-quantized weight, which can be multiplied by int8 activations."""
    return isinstance(weight, QuantTensor) and weight.format.takes_int8


class MatmulOp:
    """Matrix products of one activation matrix with weights, one after the other.

    Activations are put into a weight's order of columns, multiplied by its factors of columns, and
    quantized to int8, where it needs that; consecutive weights that need the same share it.  The
    executor owns the buffers.
    """

    def __init__(self, x: np.ndarray, executor: Any) -> None:
        self._x = x
        self._activations = executor.activations
        self.executor = executor
        self._order: NDArray[np.int32] | None = None
        self._scales: NDArray[np.float32] | None = None
        self._ordered = x
        """Activations in `_order`, times `_scales`."""
        self._rows: Int8Rows | None = None
        """Activations in int8, in the order of `_ordered`."""

    def launch(self, weight: Any, bias: Any, accumulate: bool, out: np.ndarray) -> None:
        """Launch the product with one weight, and before it what the activations need."""
        if not isinstance(weight, QuantTensor):
            floats.matmul(self._x, weight, bias, accumulate, out)
            return
        self._put_in_order(weight)
        if self._activations == "int8" and is_block_quantized(weight):
            if self._rows is None:
                self._rows = self.executor.int8_rows(*self._ordered.shape)
                quantized.quantize_activations(self._ordered, self._rows)
            quantized.matmul_int8(self._rows, weight, bias, accumulate, out)
        else:
            bf16 = self._activations == "bf16"
            quantized.matmul(self._ordered, weight, bias, accumulate, out, bf16=bf16)

    def _put_in_order(self, weight: QuantTensor) -> None:
        """Launch the gather of columns if the last weight had another order or other factors."""
        order, scales = weight.column_order, weight.column_scales
        if not (same_columns(order, self._order) and same_columns(scales, self._scales)):
            self._rows, self._ordered = None, self._x
            if order is not None:
                self._ordered = self.executor.gathered_rows(len(self._x), len(order))
                gather_columns(self._x, order, self._ordered, scales)
        self._order, self._scales = order, scales
