"""Quantized matrix product in NumPy float64, with the NumPy decoder of the format."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats import QuantTensor

ROWS = 1024  # rows decoded at once


def weights(w: QuantTensor) -> NDArray[np.float64]:
    """Return weights (N, stored columns), dequantized in NumPy."""
    blocks = w.format.dequantize_blocks(w.data.reshape(-1, w.format.block_bytes))
    columns = w.format.row_blocks(w.n_stored_columns) * w.format.block_size
    dense = blocks.reshape(w.n_rows, columns)[:, : w.n_stored_columns].astype(np.float64)
    return dense if w.outliers is None else dense + w.outliers.to_dense()


def int8_codes(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return codes (T, K) and scales (T, K / 32) of activations, computed in float32."""
    n_blocks = -(-x.shape[1] // 32)
    padded = np.zeros((x.shape[0], n_blocks * 32), np.float32)
    padded[:, : x.shape[1]] = x
    padded = padded.reshape(x.shape[0], n_blocks, 32)
    largest = np.abs(padded).max(axis=2, initial=0)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest >= np.float32(2**-100), np.float32(127) / largest, np.float32(0))
    codes = np.rint(padded * inverse[:, :, None]).astype(np.int8)
    scales = np.where(inverse > 0, largest / np.float32(127), np.float32(0))
    return codes.reshape(x.shape[0], n_blocks * 32)[:, : x.shape[1]], scales


def int8_values(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return activations (T, K) rounded to int8 and dequantized."""
    codes, scales = int8_codes(x)
    return codes * np.repeat(scales.astype(np.float64), 32, axis=1)[:, : x.shape[1]]


def to_bf16(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return numbers rounded to bfloat16, halves to even."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def qmatmul(
    x: NDArray[Any],
    w: QuantTensor,
    *,
    bias: NDArray[Any] | None = None,
    accumulate: bool = False,
    activations: str = "f32",
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """See `nbflow_kernels.qmatmul`."""
    if w.column_scales is not None:
        x = x.astype(np.float32) * w.column_scales  # rounded to float32 before anything else
    if w.column_order is not None:
        x = np.append(x, np.zeros((len(x), 1), x.dtype), axis=1)[:, w.column_order]  # -1: the zeros
    holds = {"f32": lambda x: x.astype(np.float64), "bf16": to_bf16, "int8": int8_values}
    values = holds[activations](x)
    y = np.zeros((x.shape[0], w.n_rows))
    for row in range(0, w.n_rows, ROWS):
        part = weights(w.rows(row, min(row + ROWS, w.n_rows)))
        y[:, row : row + ROWS] = values @ (to_bf16(part) if activations == "bf16" else part).T
    if bias is not None:
        y += bias
    if out is None:
        return y
    out[...] = y + out if accumulate else y
    return out
