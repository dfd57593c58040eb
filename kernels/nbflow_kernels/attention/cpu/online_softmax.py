"""Register-tile kernels of CPU attention: Q K^T, online softmax, P V.

All functions work on raw addresses.  `like` is a scalar whose type tells how keys and values are
stored (float32, int16 for float16 bits, uint16 for bfloat16 bits, int8 for blocks of a scale and 32
int8); a kernel is compiled for each.
`keys` and `values` are tables of row addresses of a chunk, `ahead` is that of the next chunk, of
whose rows `n_prefetch` bytes are prefetched row by row: more at once would delay loads of this
chunk.

The order of additions determines the bits and is the same for every tile shape: a dot product has
16 partial sums (lane i adds columns i, i + 16, ... in order), added as a tree (`simd.sum`); an
accumulator adds the values of a chunk key by key.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.attention.plan_layout import CHUNK
from nbflow_kernels.cpu import jit, register_tiles, simd
from nbflow_kernels.cpu.register_tiles_sums import fold_lanes, store_sums
from nbflow_kernels.cpu.simd_memory import prefetch, read_i64, read_u8, write_f32

# Score of a masked key: finite, so that NaN and infinity remain detectable.
MASKED = np.float32(-1e30)
SCORE_BYTES = 4 * CHUNK
"""Bytes of the scores of a query vector."""
STATE_BYTES = 64
"""Bytes of the state of a query vector."""
# Its fields: running maximum and sum of the softmax, factor of the accumulator in this chunk,
# maximum and sum of earlier splits; visible keys in this chunk and in all.
ROW_MAX, ROW_SUM, RESCALE, RUN_MAX, RUN_SUM = 0, 4, 8, 12, 16
FIRST, LAST, LOW, HIGH = 24, 32, 40, 48  # a range hook writes LAST next to FIRST


@jit.device_function
def prefetch_row(ahead, j, n_bytes):
    """Prefetch the first bytes of the row at entry j of an address table."""
    row = read_i64(ahead + 8 * j)
    for d in range(0, n_bytes, 64):
        prefetch(row + d)


# ---- scores --------------------------------------------------------------------------------------


def _make_qk(rows: int) -> Any:
    """Return a Q K^T kernel for `rows` query vectors, a multiple of four."""

    @jit.device_function
    def qk(like, q, row_bytes, keys, n, half, s, ahead, n_prefetch):
        """Write the dot products of the query vectors and `n` keys, four keys at a time."""
        unit, columns = register_tiles.unit_bytes(like), 4 * register_tiles.unit_columns(like)
        for j in range(0, n, 4):
            for i in range(j, j + 4):
                prefetch_row(ahead, i, n_prefetch)
            tile = register_tiles.zero(2, rows)
            k, x, distance = read_i64(keys), q, read_i64(keys + 8) - read_i64(keys)
            while x < q + row_bytes:
                tile = register_tiles.step_lanes(tile, like, k, distance, x, row_bytes)
                k, x = k + unit, x + columns
            first = fold_lanes(tile, half)
            tile = register_tiles.zero(2, rows)
            k, x, distance = read_i64(keys + 16), q, read_i64(keys + 24) - read_i64(keys + 16)
            while x < q + row_bytes:
                tile = register_tiles.step_lanes(tile, like, k, distance, x, row_bytes)
                k, x = k + unit, x + columns
            store_sums(s + 4 * j, SCORE_BYTES, first, fold_lanes(tile, half))
            keys += 32

    return qk


qk_8xn, qk_4xn = _make_qk(8), _make_qk(4)


@jit.device_function
def qk_1x16(like, q, row_bytes, keys, n, scratch, s, ahead, n_prefetch):
    """Write 16 dot products of one query vector, the first `n` of them with keys.

    Keys are read row by row, at the bandwidth of a sequential read; `scratch` holds 16 vectors.
    """
    unit, columns = register_tiles.unit_bytes(like), 4 * register_tiles.unit_columns(like)
    for j in range(n):
        prefetch_row(ahead, j, n_prefetch)
        key, x, end = read_i64(keys + 8 * j), q, q + row_bytes
        a = register_tiles.zero(1, 1)
        while x + 4 * columns <= end:
            a = register_tiles.step_lanes(a, like, key, 0, x, 0)
            a = register_tiles.step_lanes(a, like, key + unit, 0, x + columns, 0)
            a = register_tiles.step_lanes(a, like, key + 2 * unit, 0, x + 2 * columns, 0)
            a = register_tiles.step_lanes(a, like, key + 3 * unit, 0, x + 3 * columns, 0)
            key, x = key + 4 * unit, x + 4 * columns
        while x < end:
            a = register_tiles.step_lanes(a, like, key, 0, x, 0)
            key, x = key + unit, x + columns
        register_tiles.store(scratch + 64 * j, a)
    simd.store_f32(s, register_tiles.lane_sums(register_tiles.load(1, 16, scratch)))


# ---- values --------------------------------------------------------------------------------------


def _make_pv(vectors: int, rows: int) -> Any:
    """Return a P V kernel for 16 * `vectors` columns and `rows` query vectors."""

    @jit.device_function
    def pv(like, acc, row_bytes, rescale, step, p, values, first, last, d, ahead, n_prefetch):
        """Rescale columns of accumulators and add values [first, last) times weights.

        Strides: `row_bytes` of accumulators at `acc`, `step` of their factors at `rescale`,
        `SCORE_BYTES` of their weights at `p`; `d` is the byte offset of the first column.
        """
        unit = register_tiles.unit_bytes(like)
        column = (d >> 2) // register_tiles.unit_columns(like) * unit
        tile = register_tiles.load_strided(vectors, rows, acc + d, row_bytes)
        tile = register_tiles.scale(tile, rescale, step)
        for j in range(first, last):
            prefetch_row(ahead, j, n_prefetch)
            value = read_i64(values + 8 * j) + column
            tile = register_tiles.step(tile, like, value, unit, p + 4 * j, SCORE_BYTES)
        register_tiles.store_strided(acc + d, row_bytes, tile)

    return pv


pv_4x4, pv_1x4 = _make_pv(4, 4), _make_pv(1, 4)
pv_8x1, pv_4x1, pv_1x1 = _make_pv(8, 1), _make_pv(4, 1), _make_pv(1, 1)
pv_2x8, pv_2x4, pv_2x1 = _make_pv(2, 8), _make_pv(2, 4), _make_pv(2, 1)


# ---- softmax -------------------------------------------------------------------------------------


@jit.device_function
def soft_cap(s, cap):
    """Return cap * tanh(s / cap) per lane, relative error below 4e-7; NaN stays NaN."""
    # tanh(x) = e / (e + 2) with e = exp(2 x) - 1 = 2**n * (exp(r) - 1) + (2**n - 1)
    x = simd.mul(s, simd.splat(2.0 / cap))
    x = simd.minimum(simd.maximum(x, simd.splat(-40.0)), simd.splat(40.0))
    n = simd.rint(simd.mul(x, simd.splat(1.4426950408889634)))
    r = simd.fma(n, simd.splat(-0.693145751953125), x)  # ln 2 split, as in `simd.exp`
    r = simd.fma(n, simd.splat(-1.4286068203094172e-06), r)
    p = simd.splat(1.0 / 720.0)
    p = simd.fma(p, r, simd.splat(1.0 / 120.0))
    p = simd.fma(p, r, simd.splat(1.0 / 24.0))
    p = simd.fma(p, r, simd.splat(1.0 / 6.0))
    p = simd.fma(p, r, simd.splat(0.5))
    p = simd.fma(p, r, simd.splat(1.0))
    bits = simd.shl(simd.add(simd.to_i32(n), simd.splat_i32(127)), simd.splat_i32(23))
    power = simd.as_f32(bits)
    e = simd.fma(power, simd.mul(p, r), simd.sub(power, simd.splat(1.0)))
    tanh = simd.div(e, simd.add(e, simd.splat(2.0)))
    return simd.fma(s, simd.splat(0.0), simd.mul(simd.splat(cap), tanh))


@jit.device_function
def mask_bit(mask, bits, index):
    """Return element `index` of a mask of bytes or bits."""
    if bits:
        return (read_u8(mask + (index >> 3)) >> (index & 7)) & 1
    return read_u8(mask + index)


@jit.device_function
def mask_ends(s, first, last):
    """Mask the scores outside [first, last) in the blocks of 16 that the range touches."""
    for j in range(first // 16 * 16, first):
        write_f32(s + 4 * j, MASKED)
    for j in range(last, (last + 15) // 16 * 16):
        write_f32(s + 4 * j, MASKED)


@jit.device_function
def apply_mask(s, first, last, mask, bits, index):
    """Mask the scores in [first, last) that a custom mask excludes.

    `index` is the index of the chunk's first key in that mask.
    """
    for j in range(first, last):
        if not mask_bit(mask, bits, index + j):
            write_f32(s + 4 * j, MASKED)


@jit.device_function
def chunk_max(s, first, last, old_max):
    """Return the maximum of the scores of a chunk and of `old_max`.

    Only blocks of 16 that [first, last) touches: the others are not visible.
    """
    begin, end = first // 16 * 64, (last + 15) // 16 * 64
    highest = simd.load_f32(s + begin)
    for i in range(begin + 64, end, 64):
        highest = simd.maximum(highest, simd.load_f32(s + i))
    return max(old_max, simd.max(highest))


@jit.device_function
def exp_weights(s, first, last, row_max):
    """Replace the scores of a chunk by exp(score - row_max); return the sum of the weights.

    Only blocks of 16 that [first, last) touches: the others would add exact zeros.
    """
    row_sum, shift = simd.splat(0.0), simd.splat(row_max)
    zero, one, masked = simd.splat(0.0), simd.splat(1.0), simd.splat(MASKED)
    for i in range(first // 16 * 64, (last + 15) // 16 * 64, 64):
        x = simd.load_f32(s + i)
        # 0 for a masked key, else 1
        seen = simd.minimum(simd.sub(x, masked), one)
        p = simd.mul(simd.exp(simd.sub(x, shift)), seen)
        simd.store_f32(s + i, p)
        # simd.max and simd.exp drop NaN; x * 0 restores it in the sum
        row_sum = simd.add(row_sum, simd.fma(x, zero, p))
    return simd.sum(row_sum)


@jit.device_function
def unmasked_scores(s, first, last):
    """Replace the scores of masked keys by 0, in the blocks of 16 that [first, last) touches."""
    one, masked = simd.splat(1.0), simd.splat(MASKED)
    for i in range(first // 16 * 64, (last + 15) // 16 * 64, 64):
        x = simd.load_f32(s + i)
        simd.store_f32(s + i, simd.mul(x, simd.minimum(simd.sub(x, masked), one)))


@jit.device_function
def exp1(x):
    """Return e**x of a float32 scalar with the bits of `simd.exp`."""
    return simd.max(simd.exp(simd.splat(x)))


@jit.device_function
def merge_partial(acc, row_max, row_sum, new, new_max, new_sum, n):
    """Merge a partial result of `n` columns into another; return the merged row_max and sum.

    A partial result is an accumulator, the row maximum and the sum of exp(score - maximum); one
    without keys (row_max MASKED, sum 0) changes nothing.
    """
    if new_sum == 0.0 and new_max == MASKED:
        return row_max, row_sum
    if row_sum == 0.0 and row_max == MASKED:
        for d in range(0, 4 * n, 64):
            simd.store_f32(acc + d, simd.load_f32(new + d))
        return new_max, new_sum
    both = max(row_max, new_max)
    a, b = exp1(row_max - both), exp1(new_max - both)
    w, x = simd.splat(a), simd.splat(b)
    for d in range(0, 4 * n, 64):
        mixed = simd.fma(simd.load_f32(new + d), x, simd.mul(simd.load_f32(acc + d), w))
        simd.store_f32(acc + d, mixed)
    # float32 products are exact in float64, with or without fma
    joined = np.float64(row_sum) * np.float64(a) + np.float64(new_sum) * np.float64(b)
    return both, np.float32(joined)
