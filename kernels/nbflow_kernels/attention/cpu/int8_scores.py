"""Q K^T of int8 queries and keys in blocks of a float16 scale and 32 int8.

Queries are quantized to int8 in blocks of 32 as activations are (`cpu.int8_blocks`), after the
factor of their scores.  A score is the sum over blocks, in order, of ``(dot * query scale) * key
scale``: an exact integer, one product, one fused multiply-add, so that its bits do not depend on
tiles, batches and threads.

A quantized query vector has a record of `RECORD` bytes per block: 32 codes, the scale as float32,
and -128 times the sum of the codes as int32, because keys are multiplied as unsigned bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.core.extending import overload

from nbflow_kernels.attention.cpu.online_softmax import SCORE_BYTES, prefetch_row
from nbflow_kernels.cpu import jit, register_tiles_columns, simd, simd_int8
from nbflow_kernels.cpu.int8_blocks import quantize_block
from nbflow_kernels.cpu.register_tiles import BLOCK_BYTES
from nbflow_kernels.cpu.simd_memory import read_i64, read_u16, write_f32, write_i64
from nbflow_kernels.cpu.simd_narrow import write_u16

SCALE, START, RECORD = 32, 36, 40
MAX_DIM = 256
"""Largest head size: the scales of a chunk of keys fill 1 KB of scratch memory."""


def quantize_query(like: Any, vector: Any, n_bytes: Any) -> None:
    """Quantize a query vector of `n_bytes` of float32 in place, if keys are multiplied as int8."""
    if isinstance(like, np.uint32):
        _quantize_query(vector, n_bytes)


@overload(quantize_query, strict=False)
def _quantize_query_overload(like, vector, n_bytes):
    if like == types.uint32:
        return lambda like, vector, n_bytes: _quantize_query(vector, n_bytes)
    return lambda like, vector, n_bytes: None


@jit.device_function
def _quantize_query(vector, n_bytes):
    record = vector
    for at in range(vector, vector + n_bytes, 128):  # a record ends before the next block
        scale, first, second = quantize_block(at, record)
        write_i64(record + START, -128 * (np.int64(first) + np.int64(second)))
        write_f32(record + SCALE, scale)
        record += RECORD


@jit.device_function
def qk_blocks(M, q, row_bytes, table, first, last, s, scratch, ahead, n_prefetch):
    """Write the scores of keys [first, last), in blocks of 16, of all query vectors."""
    n_blocks, begin = row_bytes >> 7, first // 16 * 16
    for j in range(begin, last):
        prefetch_row(ahead, j, n_prefetch)
        row = read_i64(table + 8 * j)
        for b in range(n_blocks):
            write_u16(scratch + 128 * b + 2 * j, read_u16(row + BLOCK_BYTES * b))
    for j in range(begin, last, 16):
        for m in range(M):
            simd.store_f32(s + SCORE_BYTES * m + 4 * j, simd.splat(0.0))
        for b in range(n_blocks):
            keys = register_tiles_columns.load_columns(table + 8 * j, BLOCK_BYTES * b + 2)
            scales, x = simd.load_f16(scratch + 128 * b + 2 * j), q + RECORD * b
            for place in range(s + 4 * j, s + 4 * j + SCORE_BYTES * M, SCORE_BYTES):
                dots = simd.to_f32(register_tiles_columns.dot_columns(keys, x + START, x))
                dots = simd.mul(dots, simd_int8.broadcast_f32(x + SCALE))
                simd.store_f32(place, simd.fma(dots, scales, simd.load_f32(place)))
                x += row_bytes
