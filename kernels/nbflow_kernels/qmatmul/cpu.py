"""Quantized matrix product on the CPU: a lane of a vector is a weight row.

Weights are read in the packed layout (`nbflow_kernels.quants.packed`), by kernels made for its form
when they are first needed: `floats` for float32 activations, `int8` for quantized ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.matmul import cpu as float_cpu
from nbflow_kernels.qmatmul import floats, int8
from nbflow_kernels.qmatmul.activations import Int8Rows, quantize_activations
from nbflow_kernels.quants.packed import ROWS, Packed
from nbflow_kernels.quants.tensor import QuantTensor
from nbflow_kernels.threads import not_capturable, split_rows

__all__ = ["Int8Rows", "matmul", "matmul_int8", "qmatmul", "quantize_activations"]

_NO_BIAS = np.zeros(0, np.float32)


def qmatmul(
    x: NDArray[np.float32],
    w: QuantTensor,
    bias: NDArray[np.float32] | None,
    accumulate: bool,
    activations: str,
    out: NDArray[np.float32],
) -> None:
    """See `nbflow_kernels.qmatmul`."""
    if activations == "f32":
        matmul(x, w, bias, accumulate, out)
        return
    rows = Int8Rows.empty(*x.shape)
    quantize_activations(x, rows)
    matmul_int8(rows, w, bias, accumulate, out)


def matmul(
    x: NDArray[np.float32],
    w: QuantTensor,
    bias: NDArray[np.float32] | None,
    accumulate: bool,
    out: NDArray[np.float32],
) -> None:
    """Do `nbflow_kernels.qmatmul` with float32 activations."""
    if w.is_float:
        float_cpu.matmul(x, w.array, bias, accumulate, out)
        return
    packed = w.packed()
    one = x.shape[0] == 1
    if not one and x.shape[1] != packed.n_columns:  # the padding of the last block meets zeros
        not_capturable()
        padded = np.zeros((x.shape[0], packed.n_columns), np.float32)
        padded[:, : x.shape[1]] = x
        x = padded
    kernel = floats.one_row(packed.form) if one else floats.many_rows(packed.form)
    split_rows(
        kernel, packed.n_groups, _work(packed, x.shape[0]),
        x, packed.data, packed.n_blocks, _NO_BIAS if bias is None else bias, accumulate, out,
    )  # fmt: skip


def matmul_int8(
    rows: Int8Rows,
    w: QuantTensor,
    bias: NDArray[np.float32] | None,
    accumulate: bool,
    out: NDArray[np.float32],
) -> None:
    """Do `nbflow_kernels.qmatmul` with activations that are quantized already."""
    packed = w.packed()
    bias = _NO_BIAS if bias is None else bias
    sums = rows.sums if int8.piece_vectors(packed.form) == 8 else rows.half_sums
    split_rows(
        int8.kernel_for(packed.form, rows.n_rows), packed.n_groups, _work(packed, rows.n_rows),
        rows.codes, rows.n_rows, rows.scales, sums, packed.data, packed.n_blocks, bias, accumulate,
        out,
    )  # fmt: skip


def _work(packed: Packed, n_rows: int) -> float:
    """Return the multiply-adds of a product."""
    return float(n_rows) * packed.n_columns * packed.n_groups * ROWS
