"""Quantized matrix product in NumPy float64, through the NumPy decoder of the format."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.quants import QuantTensor

ROWS = 1024  # rows decoded at once


def weights(w: QuantTensor) -> NDArray[np.float64]:
    """Return a matrix (N, K) decoded without a kernel."""
    blocks = w.format.dequantize_blocks(w.data.reshape(-1, w.format.block_bytes))
    columns = w.format.row_blocks(w.shape[-1]) * w.format.block_size
    dense = blocks.reshape(w.n_rows, columns)[:, : w.shape[-1]].astype(np.float64)
    return dense if w.outliers is None else dense + w.outliers.to_dense()


def qmatmul(
    x: NDArray[Any],
    w: QuantTensor,
    *,
    bias: NDArray[Any] | None = None,
    accumulate: bool = False,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """See `nbflow_kernels.qmatmul`."""
    y = np.zeros((x.shape[0], w.n_rows))
    for row in range(0, w.n_rows, ROWS):
        part = w.rows(row, min(row + ROWS, w.n_rows))
        y[:, row : row + ROWS] = x.astype(np.float64) @ weights(part).T
    if bias is not None:
        y += bias
    if out is None:
        return y
    out[...] = y + out if accumulate else y
    return out
