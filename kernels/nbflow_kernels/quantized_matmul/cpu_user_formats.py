"""Products of weights in a user's format that has no integer form: decoded from storage.

A panel of 16 rows is decoded by the user's function and multiplied in register tiles
(`nbflow_kernels.matmul.cpu_packed_tiles`, which states the order of additions), one row of
activations or many.  Activations in int8 are rounded to their grid first and multiplied as the
float32 numbers they stand for.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd
from nbflow_kernels.cpu.parallel_for import in_order, parallel_for
from nbflow_kernels.formats.user import UserFormat
from nbflow_kernels.formats.user_jit import DECODED_ROWS, UserCode, decode_panel
from nbflow_kernels.matmul import cpu_packed_tiles
from nbflow_kernels.quantized_matmul.int8_activations import COLUMNS, Int8Rows

_NO_BIAS = np.zeros(0, np.float32)
DECODE_COST = 8.0  # multiply-adds that decoding a weight costs, for the choice of thread count


def matmul(x: Any, w: Any, bias: Any, accumulate: bool, out: Any, *, bf16: bool = False) -> None:
    """Multiply float32 rows by the transpose of `w`; `bf16` rounds both to bfloat16."""
    format, data = w.format, w.data
    assert isinstance(format, UserFormat)
    if len(x) == 0:
        return
    n_groups = -(-len(data) // DECODED_ROWS)
    work = (len(x) + DECODE_COST) * n_groups * DECODED_ROWS * w.shape[1]
    parallel_for(
        _rows_bf16(format.code) if bf16 else _rows(format.code), n_groups, work,
        x, data, _NO_BIAS if bias is None else bias, accumulate, out,
    )  # fmt: skip


def matmul_int8(rows: Int8Rows, w: Any, bias: Any, accumulate: bool, out: Any) -> None:
    """Multiply quantized rows by the transpose of `w`."""
    x = np.empty((rows.n_rows, w.shape[1]), np.float32)
    with in_order():
        widen(rows, x)
        matmul(x, w, bias, accumulate, out)


def widen(rows: Int8Rows, out: Any) -> None:
    """Write the float32 numbers that quantized activations stand for; a launcher."""
    parallel_for(_widen, len(out), 2.0 * out.size, rows.codes, rows.scales, out)


@jit.kernel
def _widen(codes, scales, out, start, stop):
    """Write scale * code of rows [start, stop)."""
    for row in range(start, stop):
        for k in range(out.shape[1]):
            out[row, k] = scales[row, k // COLUMNS] * np.float32(codes[row, k])


@functools.cache
def _rows(code: UserCode) -> Any:
    """Return the kernel for rows of float32 activations and row groups [start, stop)."""
    size, n_bytes = code.block_size, code.block_bytes
    panel = max(1, cpu_packed_tiles.PANEL // size) * size

    @code.njit
    def user_rows(x, data, bias, accumulate, out, start, stop):
        source = (code, data, np.empty(size, np.float32), n_bytes)
        like = np.empty(0, np.float32)
        cpu_packed_tiles.multiply_decoded(
            decode_panel, False, source, simd.address(data), DECODED_ROWS * data.shape[1],
            data.shape[1] // n_bytes * size, panel, like, x, bias, accumulate, out, start, stop,
        )  # fmt: skip

    return user_rows


@functools.cache
def _rows_bf16(code: UserCode) -> Any:
    """Return the kernel for rows of activations that are rounded to bfloat16."""
    size, n_bytes = code.block_size, code.block_bytes
    panel = (
        max(1, cpu_packed_tiles.PANEL // size) * size
    )  # pairs of columns: 2 * panel columns at a time
    wide = 2 * panel

    @code.njit
    def user_rows_bf16(x, data, bias, accumulate, out, start, stop):
        columns = np.empty((wide, DECODED_ROWS), np.float32)
        source = (code, data, np.empty(size, np.float32), n_bytes, columns)
        like = np.empty(0, np.int32)
        n_pairs = (data.shape[1] // n_bytes * size + 1) // 2
        cpu_packed_tiles.multiply_decoded(
            _decode_pairs, True, source, simd.address(data), DECODED_ROWS * data.shape[1],
            n_pairs, panel, like, x, bias, accumulate, out, start, stop,
        )  # fmt: skip

    return user_rows_bf16


@jit.device_function(inline="llvm")
def _decode_pairs(source, at, k, n, to):
    """Write pairs of columns k to k + n of the 16 rows at address `at` as bfloat16."""
    code, data, room, n_bytes, columns = source
    n_columns = min(2 * n, data.shape[1] // n_bytes * len(room) - 2 * k)
    wide = simd.address(columns)
    decode_panel((code, data, room, n_bytes), at, 2 * k, n_columns, wide)
    if n_columns < 2 * n:
        simd.store_f32(wide + 64 * n_columns, simd.splat(0.0))
    for i in range(n):
        even = simd.load_f32(wide + 128 * i)
        odd = simd.load_f32(wide + 128 * i + 64)
        simd.store_i32(to + 64 * i, register_tiles.to_pairs(even, odd))
