"""Products of a chunk of keys: which register tiles compute Q K^T and P V of its query vectors.

Query vectors that see the same keys share a tile, and so the loads of keys and values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.core.extending import overload

from nbflow_kernels.attention.cpu.int8_scores import qk_blocks
from nbflow_kernels.attention.cpu.online_softmax import (
    FIRST,
    LAST,
    RESCALE,
    SCORE_BYTES,
    STATE_BYTES,
    pv_1x1,
    pv_1x4,
    pv_2x1,
    pv_2x4,
    pv_2x8,
    pv_4x1,
    pv_4x4,
    pv_8x1,
    qk_1x16,
    qk_4xn,
    qk_8xn,
)
from nbflow_kernels.attention.plan_layout import CHUNK
from nbflow_kernels.cpu import jit, register_tiles
from nbflow_kernels.cpu.register_tiles import has_wide_registers
from nbflow_kernels.cpu.register_tiles_sums import half_lanes
from nbflow_kernels.cpu.simd_memory import read_i64, write_f32

WIDE = has_wide_registers()
"""Tiles of 16 vectors fit into the registers."""


def qk_scores(like: Any, *args: Any) -> None:
    """Compute Q K^T of a chunk."""
    (_qk_int8 if isinstance(like, np.uint32) else _qk_floats)(like, *args)


@overload(qk_scores, strict=False)
def _qk_scores_overload(like, *args):
    if like == types.uint32:
        return lambda like, *args: _qk_int8(like, *args)
    return lambda like, *args: _qk_floats(like, *args)


@jit.device_function
def _qk_int8(like, M, q, row_bytes, table, state, s, scratch, ahead, n_prefetch):
    """Do `qk_scores` with products of int8."""
    first, last = visible_to_any(state, M)
    if first < last:
        qk_blocks(M, q, row_bytes, table, first, last, s, scratch, ahead, n_prefetch)


@jit.device_function
def _qk_floats(like, M, q, row_bytes, table, state, s, scratch, ahead, n_prefetch):
    """Do `qk_scores` with float32 products."""
    m, n, half = np.int64(0), n_prefetch, half_lanes()
    while m < M:
        q_m, scores, records = q + m * row_bytes, s + m * SCORE_BYTES, state + STATE_BYTES * m
        if m + 4 > M:
            first, last = read_i64(records + FIRST), read_i64(records + LAST)
            begin = first // 16 * 16 if first < last else last  # an empty range may lie behind
            for j in range(begin, last, 16):
                keys, next_keys, count = table + 8 * j, ahead + 8 * j, min(last - j, 16)
                qk_1x16(like, q_m, row_bytes, keys, count, scratch, scores + 4 * j, next_keys, n)
            m, n = m + 1, np.int64(0)
            continue
        rows = np.int64(8 if WIDE and m + 8 <= M else 4)
        first, last = visible_to_any(records, rows)
        i = first // 4 * 4
        scores, keys, next_keys = scores + 4 * i, table + 8 * i, ahead + 8 * i
        if WIDE and rows == 8:
            qk_8xn(like, q_m, row_bytes, keys, last - i, half, scores, next_keys, n)
        else:
            qk_4xn(like, q_m, row_bytes, keys, last - i, half, scores, next_keys, n)
        m, n = m + rows, np.int64(0)


@jit.device_function
def visible_to_any(records, rows):
    """Return the range of keys of a chunk that covers those visible to some query vectors."""
    first, last = read_i64(records + FIRST), read_i64(records + LAST)
    for i in range(1, rows):
        first = min(first, read_i64(records + STATE_BYTES * i + FIRST))
        last = max(last, read_i64(records + STATE_BYTES * i + LAST))
    return first, min(last, CHUNK)  # an empty range may lie behind the chunk


@jit.device_function
def visible_to_all(records, rows):
    """Return the range of keys of a chunk that are visible to all of some query vectors."""
    first, last = read_i64(records + FIRST), read_i64(records + LAST)
    for i in range(1, rows):
        first = max(first, read_i64(records + STATE_BYTES * i + FIRST))
        last = min(last, read_i64(records + STATE_BYTES * i + LAST))
    return first, max(first, last)


@jit.device_function
def accumulate_pv(like, M, acc, row_bytes, state, s, values, ahead, n_prefetch):
    """Accumulate P V of a chunk.

    Four query vectors, or eight where values are blocks, share the keys visible to all of them; the
    other keys are added per vector.
    """
    m, n, most = np.int64(0), n_prefetch, register_tiles.unit_columns(like) // 4
    while m < M:
        sums, records, weights = acc + m * row_bytes, state + STATE_BYTES * m, s + m * SCORE_BYTES
        if m + 4 > M:
            first, last = read_i64(records + FIRST), read_i64(records + LAST)
            pv_row(like, sums, row_bytes, records, weights, values, first, last, ahead, n)
            m, n = m + 1, np.int64(0)
            continue
        rows = most if m + most <= M else np.int64(4)
        low, high = visible_to_all(records, rows)
        if low > 0:
            begin = np.int64(0)
            pv_ends(like, rows, sums, row_bytes, records, weights, values, begin, low, ahead)
        if low < high:
            pv_rows(like, rows, sums, row_bytes, records, weights, values, low, high, ahead, n)
            for i in range(rows):
                write_f32(records + RESCALE + STATE_BYTES * i, 1.0)
        if high < CHUNK:
            end = np.int64(CHUNK)
            pv_ends(like, rows, sums, row_bytes, records, weights, values, high, end, ahead)
        m, n = m + rows, np.int64(0)


@jit.device_function
def pv_ends(like, rows, acc, row_bytes, records, p, values, first, last, ahead):
    """Accumulate P V of some query vectors, each over its visible keys in [first, last)."""
    for i in range(rows):
        record = records + STATE_BYTES * i
        begin, end = max(read_i64(record + FIRST), first), min(read_i64(record + LAST), last)
        scores, none = p + i * SCORE_BYTES, np.int64(0)  # a literal would compile `pv_row` twice
        pv_row(
            like, acc + i * row_bytes, row_bytes, record, scores, values, begin, end, ahead, none
        )


@jit.device_function
def pv_row(like, acc, row_bytes, record, p, values, first, last, ahead, n_prefetch):
    """Rescale one accumulator and add values [first, last) times the weights at `p`."""
    if first >= last:
        return
    rescale, d, n = record + RESCALE, np.int64(0), n_prefetch
    while d + 512 <= row_bytes:
        pv_8x1(like, acc, row_bytes, rescale, STATE_BYTES, p, values, first, last, d, ahead, n)
        d, n = d + 512, 0
    while d + 256 <= row_bytes:
        pv_4x1(like, acc, row_bytes, rescale, STATE_BYTES, p, values, first, last, d, ahead, n)
        d, n = d + 256, 0
    while d < row_bytes:
        pv_unit(like, acc, row_bytes, rescale, STATE_BYTES, p, values, first, last, d, ahead, n)
        d, n = d + 4 * register_tiles.unit_columns(like), 0
    write_f32(rescale, 1.0)


def pv_unit(like: Any, *args: Any) -> None:
    """Accumulate 16 columns, or those of a block, of one query vector."""
    (pv_2x1 if isinstance(like, np.int8) else pv_1x1)(like, *args)


@overload(pv_unit, strict=False)
def _pv_unit_overload(like, *args):
    if like == types.int8:
        return lambda like, *args: pv_2x1(like, *args)
    return lambda like, *args: pv_1x1(like, *args)


def pv_rows(like: Any, *args: Any) -> None:
    """Rescale accumulators and add values [first, last) times their weights."""
    (_pv_of_blocks if isinstance(like, np.int8) else _pv_of_floats)(like, *args)


@overload(pv_rows, strict=False)
def _pv_rows_overload(like, *args):
    if like == types.int8:
        return lambda like, *args: _pv_of_blocks(like, *args)
    return lambda like, *args: _pv_of_floats(like, *args)


@jit.device_function
def _pv_of_floats(like, rows, acc, row_bytes, records, p, values, first, last, ahead, n_prefetch):
    """Do `pv_rows` of four query vectors."""
    rescale, d, n = records + RESCALE, np.int64(0), n_prefetch
    while WIDE and d + 256 <= row_bytes:
        pv_4x4(like, acc, row_bytes, rescale, STATE_BYTES, p, values, first, last, d, ahead, n)
        d, n = d + 256, 0
    while d < row_bytes:
        pv_1x4(like, acc, row_bytes, rescale, STATE_BYTES, p, values, first, last, d, ahead, n)
        d, n = d + 64, 0


@jit.device_function
def _pv_of_blocks(like, rows, acc, row_bytes, records, p, values, first, last, ahead, n_prefetch):
    """Do `pv_rows` of eight query vectors, for which a block is widened once, or of four."""
    rescale, n = records + RESCALE, n_prefetch
    for d in range(0, row_bytes, 128):
        if rows == 8:
            pv_2x8(like, acc, row_bytes, rescale, STATE_BYTES, p, values, first, last, d, ahead, n)
        else:
            pv_2x4(like, acc, row_bytes, rescale, STATE_BYTES, p, values, first, last, d, ahead, n)
        n = np.int64(0)
