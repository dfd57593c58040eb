"""CPU GEMM with weights in a user's format without integer codes, dequantized from storage.

The user's function decodes a panel of 16 rows, which is multiplied in register tiles
(`nbflow_kernels.matmul.cpu_packed_tiles`, which states the order of additions; as plain loops:
`nbflow_kernels.matmul.loops.interleaved`).  Activations in int8 are dequantized first.
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
DECODE_COST = 8.0  # multiply-adds per decoded weight, for the choice of thread count


def matmul(x: Any, w: Any, bias: Any, accumulate: bool, out: Any, *, bf16: bool = False) -> None:
    """Multiply float32 rows by the transpose of `w`; `bf16` rounds both to bfloat16."""
    format, data = w.format, w.data
    assert isinstance(format, UserFormat)
    if len(x) == 0:
        return
    n_groups = -(-len(data) // DECODED_ROWS)
    work = (len(x) + DECODE_COST) * n_groups * DECODED_ROWS * w.shape[1]
    parallel_for(
        _gemm_bf16(format.code) if bf16 else _gemm(format.code), n_groups, work,
        x, data, _NO_BIAS if bias is None else bias, accumulate, out,
    )  # fmt: skip


def matmul_int8(rows: Int8Rows, w: Any, bias: Any, accumulate: bool, out: Any) -> None:
    """Multiply quantized rows by the transpose of `w`."""
    x = np.empty((rows.n_rows, w.shape[1]), np.float32)
    with in_order():
        dequantize_activations(rows, x)
        matmul(x, w, bias, accumulate, out)


def dequantize_activations(rows: Int8Rows, out: Any) -> None:
    """Dequantize int8 activations to float32."""
    parallel_for(_dequantize, len(out), 2.0 * out.size, rows.codes, rows.scales, out)


@jit.kernel
def _dequantize(codes, scales, out, start, stop):
    """Write scale * code of rows [start, stop)."""
    for row in range(start, stop):
        for k in range(out.shape[1]):
            out[row, k] = scales[row, k // COLUMNS] * np.float32(codes[row, k])


@functools.cache
def _gemm(code: UserCode) -> Any:
    """Return the kernel for row groups [start, stop) and rows of float32 activations."""
    size, n_bytes = code.block_size, code.block_bytes

    @code.njit
    def user_gemm(x, data, bias, accumulate, out, start, stop):
        source = (code, data, np.empty(size, np.float32), n_bytes)
        like = np.empty(0, np.float32)
        cpu_packed_tiles.gemm_decoded(
            decode_panel, False, source, simd.address(data), DECODED_ROWS * data.shape[1],
            data.shape[1] // n_bytes * size, size, like, x, bias, accumulate, out, start, stop,
        )  # fmt: skip

    return user_gemm


@functools.cache
def _gemm_bf16(code: UserCode) -> Any:
    """Return the kernel for row groups [start, stop) and rows of bfloat16 activations."""
    size, n_bytes = code.block_size, code.block_bytes
    panel = max(1, cpu_packed_tiles.PANEL // size) * size  # pairs of columns, at most

    @code.njit
    def user_gemm_bf16(x, data, bias, accumulate, out, start, stop):
        columns = np.empty((2 * panel, DECODED_ROWS), np.float32)
        source = (code, data, np.empty(size, np.float32), n_bytes, columns)
        like = np.empty(0, np.int32)
        n_pairs = (data.shape[1] // n_bytes * size + 1) // 2
        cpu_packed_tiles.gemm_decoded(
            _decode_pairs, True, source, simd.address(data), DECODED_ROWS * data.shape[1],
            n_pairs, size, like, x, bias, accumulate, out, start, stop,
        )  # fmt: skip

    return user_gemm_bf16


@jit.device_function(inline="llvm")
def _decode_pairs(source, at, k, n, to):
    """Decode pairs of columns k to k + n of the 16 rows at address `at`, rounded to bfloat16."""
    code, data, scratch, n_bytes, columns = source
    n_columns = min(2 * n, data.shape[1] // n_bytes * len(scratch) - 2 * k)
    wide = simd.address(columns)
    decode_panel((code, data, scratch, n_bytes), at, 2 * k, n_columns, wide)
    if n_columns < 2 * n:
        simd.store_f32(wide + 64 * n_columns, simd.splat(0.0))
    for i in range(n):
        even = simd.load_f32(wide + 128 * i)
        odd = simd.load_f32(wide + 128 * i + 64)
        simd.store_i32(to + 64 * i, register_tiles.to_pairs(even, odd))
