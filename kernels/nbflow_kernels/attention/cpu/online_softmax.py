"""The inner loops of attention: dot products of tiles, mixing of values, online softmax.

Everything works on addresses.  `like` is a scalar whose type tells how keys and values are stored
(float32, int16 for the bits of float16, uint16 for those of bfloat16); a kernel is compiled for
each.  `keys` and `values` are addresses of tables that hold the address of each row of a chunk;
`ahead` is that of the next chunk, of whose rows `n_ahead` bytes are asked for meanwhile: row by
row, because more at once would keep the loads of this chunk waiting.

The order of additions, which is part of the results' bits: a dot product has 16 partial sums (lane
i adds the products of columns i, i + 16, ... one after the other), which are added as a tree
(`simd.sum`); an accumulator adds the values of a chunk one key after the other.  No tile shape
changes this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.attention.plan_layout import CHUNK
from nbflow_kernels.cpu import jit, register_tiles, simd
from nbflow_kernels.cpu.simd_memory import (
    load_first,
    load_first_bf16,
    load_first_f16,
    prefetch,
    read_i64,
    read_u8,
    store_first,
    store_quarters,
    write_f32,
)

# The score of a key that a row does not see.  Finite, so that NaN and infinity remain detectable.
HIDDEN = np.float32(-1e30)
F32, F16 = 0, 1  # kinds of floats, as in `nbflow_kernels.kv_cache.cpu_codec`; the third is bfloat16
ROW = 4 * CHUNK
"""Bytes of the scores of one query vector."""
RECORD = 64
"""Bytes of what is known about one query vector; see `items`."""


@jit.device_function
def fetch(ahead, j, n_bytes):
    """Ask for the first bytes of the row whose address is entry j of a table."""
    row = read_i64(ahead + 8 * j)
    for d in range(0, n_bytes, 64):
        prefetch(row + d)


# ---- scores --------------------------------------------------------------------------------------


@jit.device_function
def score_4x4(like, q, row_bytes, keys, s, ahead, n_ahead):
    """Write the dot products of four query vectors with four keys, two keys after the other two."""
    for j in range(4):
        fetch(ahead, j, n_ahead)
    size = simd.size_of(like)
    a = b = register_tiles.zero(2, 4)  # as wider tiles, they would not stay in 16 registers
    k, distance = read_i64(keys), read_i64(keys + 8) - read_i64(keys)
    for d in range(0, row_bytes, 64):
        a = register_tiles.step_lanes(a, like, k + (d >> 2) * size, distance, q + d, row_bytes)
    k, distance = read_i64(keys + 16), read_i64(keys + 24) - read_i64(keys + 16)
    for d in range(0, row_bytes, 64):
        b = register_tiles.step_lanes(b, like, k + (d >> 2) * size, distance, q + d, row_bytes)
    store_quarters(s, ROW, register_tiles.lane_sums(register_tiles.concat_groups(a, b)))


@jit.device_function
def score_1x16(like, q, row_bytes, keys, n, room, s, ahead, n_ahead):
    """Write 16 dot products of one query vector, of which the first `n` are with keys.

    One row after the other, from end to end: memory delivers that as fast as a plain read.
    `room` is for 16 vectors.
    """
    size = simd.size_of(like)
    for j in range(n):
        fetch(ahead, j, n_ahead)
        key = read_i64(keys + 8 * j)
        a, d = simd.splat(0.0), np.int64(0)
        while d + 256 <= row_bytes:
            a = simd.fma(simd.load_f32(q + d), simd.load_as(like, key), a)
            a = simd.fma(simd.load_f32(q + d + 64), simd.load_as(like, key + 16 * size), a)
            a = simd.fma(simd.load_f32(q + d + 128), simd.load_as(like, key + 32 * size), a)
            a = simd.fma(simd.load_f32(q + d + 192), simd.load_as(like, key + 48 * size), a)
            d, key = d + 256, key + 64 * size
        while d < row_bytes:
            a = simd.fma(simd.load_f32(q + d), simd.load_as(like, key), a)
            d, key = d + 64, key + 16 * size
        simd.store_f32(room + 64 * j, a)
    simd.store_f32(s, register_tiles.lane_sums(register_tiles.load(1, 16, room)))


# ---- values --------------------------------------------------------------------------------------


def _make_mix(vectors: int, rows: int) -> Any:
    """Make `mix` for 16 * `vectors` columns and a number of query vectors."""

    @jit.device_function
    def mix(like, acc, row_bytes, shrink, step, p, values, first, last, d, ahead, n_ahead):
        """Shrink columns of some accumulators and add the values [first, last) times weights.

        The accumulators lie `row_bytes` apart at `acc`, their factors `step` bytes apart at
        `shrink`, their weights `ROW` bytes apart at `p`; `d` is the first column's place.
        """
        size = simd.size_of(like)
        column = (d >> 2) * size
        tile = register_tiles.load_strided(vectors, rows, acc + d, row_bytes)
        tile = register_tiles.scale(tile, shrink, step)
        for j in range(first, last):
            fetch(ahead, j, n_ahead)
            value = read_i64(values + 8 * j) + column
            tile = register_tiles.step(tile, like, value, 16 * size, p + 4 * j, ROW)
        register_tiles.store_strided(acc + d, row_bytes, tile)

    return mix


mix_4x4, mix_1x4 = _make_mix(4, 4), _make_mix(1, 4)
mix_8x1, mix_4x1, mix_1x1 = _make_mix(8, 1), _make_mix(4, 1), _make_mix(1, 1)


# ---- softmax -------------------------------------------------------------------------------------


@jit.device_function
def soft_cap(s, cap):
    """Return cap * tanh(s / cap) lane by lane, relative error below 4e-7; a NaN stays one."""
    # tanh(x) = e / (e + 2) with e = exp(2 x) - 1 = 2**n * (exp(r) - 1) + (2**n - 1)
    x = simd.mul(s, simd.splat(2.0 / cap))
    x = simd.minimum(simd.maximum(x, simd.splat(-40.0)), simd.splat(40.0))
    n = simd.rint(simd.mul(x, simd.splat(1.4426950408889634)))
    r = simd.fma(n, simd.splat(-0.693145751953125), x)  # ln 2 in two parts, as in `simd.exp`
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
def sees(mask, bits, index):
    """Return whether element `index` of a mask of bytes or bits is set."""
    if bits:
        return (read_u8(mask + (index >> 3)) >> (index & 7)) & 1
    return read_u8(mask + index)


@jit.device_function
def hide(s, first, last, mask, bits, index):
    """Overwrite the scores of hidden keys in the blocks of 16 that [first, last) touches.

    Hidden are the keys outside the range, and those that the mask hides; `index` is the place in
    the mask of the chunk's first key.
    """
    for j in range(first // 16 * 16, first):
        write_f32(s + 4 * j, HIDDEN)
    for j in range(last, (last + 15) // 16 * 16):
        write_f32(s + 4 * j, HIDDEN)
    if mask != 0:
        for j in range(first, last):
            if not sees(mask, bits, index + j):
                write_f32(s + 4 * j, HIDDEN)


@jit.device_function
def weigh(s, first, last, old_top):
    """Turn scores into weights exp(score - top); return top and the sum of the weights.

    Works on the blocks of 16 that [first, last) touches.  The others would add exact zeros.
    """
    begin, end = first // 16 * 64, (last + 15) // 16 * 64
    highest = simd.load_f32(s + begin)
    for i in range(begin + 64, end, 64):
        highest = simd.maximum(highest, simd.load_f32(s + i))
    top = max(old_top, simd.max(highest))
    total, shift = simd.splat(0.0), simd.splat(top)
    zero, one, hidden = simd.splat(0.0), simd.splat(1.0), simd.splat(HIDDEN)
    for i in range(begin, end, 64):
        x = simd.load_f32(s + i)
        # 0 for a hidden key, else 1: visible scores are far above HIDDEN
        seen = simd.minimum(simd.sub(x, hidden), one)
        p = simd.mul(simd.exp(simd.sub(x, shift)), seen)
        simd.store_f32(s + i, p)
        # simd.max and simd.exp drop a NaN; x * 0 brings it back into the sum
        total = simd.add(total, simd.fma(x, zero, p))
    return top, simd.sum(total)


@jit.device_function
def exp1(x):
    """Return e**x of one float32, with the bits that `simd.exp` gives."""
    return simd.max(simd.exp(simd.splat(x)))


@jit.device_function
def fold(acc, top, total, new, new_top, new_total, n):
    """Add a partial result of `n` columns to another; return its top and sum of weights.

    A partial result is an accumulator, the greatest score and the sum of exp(score - greatest);
    one without keys (top HIDDEN, sum 0) leaves the other as it is.
    """
    if new_total == 0.0 and new_top == HIDDEN:
        return top, total
    if total == 0.0 and top == HIDDEN:
        for d in range(0, 4 * n, 64):
            simd.store_f32(acc + d, simd.load_f32(new + d))
        return new_top, new_total
    both = max(top, new_top)
    a, b = exp1(top - both), exp1(new_top - both)
    w, x = simd.splat(a), simd.splat(b)
    for d in range(0, 4 * n, 64):
        mixed = simd.fma(simd.load_f32(new + d), x, simd.mul(simd.load_f32(acc + d), w))
        simd.store_f32(acc + d, mixed)
    # products of float32 are exact in float64: the same bits whether or not they are fused
    joined = np.float64(total) * np.float64(a) + np.float64(new_total) * np.float64(b)
    return both, np.float32(joined)


# ---- rows ----------------------------------------------------------------------------------------


@jit.device_function
def copy_floats(kind, source, n, factor, target, padded):
    """Copy n floats of a kind of `kvcache.rows` times `factor` to float32; zeros up to `padded`."""
    times = simd.splat(factor)
    body = n - n % 16
    for d in range(0, body, 16):
        if kind == F32:
            x = simd.load_f32(source + 4 * d)
        elif kind == F16:
            x = simd.load_f16(source + 2 * d)
        else:
            x = simd.load_bf16(source + 2 * d)
        simd.store_f32(target + 4 * d, simd.mul(x, times))
    for d in range(body, padded, 16):
        if kind == F32:
            x = load_first(source + 4 * d, n - d, 0.0)
        elif kind == F16:
            x = load_first_f16(source + 2 * d, n - d)
        else:
            x = load_first_bf16(source + 2 * d, n - d)
        store_first(target + 4 * d, padded - d, simd.mul(x, times))
