"""Position embeddings on the CPU: an in-place RoPE kernel; the others in NumPy.

Biases and absolute embeddings are gathers and outer products, which NumPy runs at memory bandwidth
without compiling.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd, simd_shuffle
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of, read_f32, write_f32


def apply_rope_with_cos_sin_cache_inplace(
    positions: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    cos_sin_cache: np.ndarray,
    is_neox: bool,
) -> None:
    """See `nbflow_kernels.apply_rope_with_cos_sin_cache_inplace`.

    Queries and keys must have the same head stride if both have several heads.
    """
    T, H, _ = query.shape
    G = key.shape[1]
    D = (query if H > 1 else key).strides[1] // 4
    hold(query, key, cos_sin_cache)
    parallel_for(
        _rope, T, 2.0 * T * (H + G) * cos_sin_cache.shape[1], positions, address_of(query),
        query.strides[0], H, address_of(key), key.strides[0], G, D, address_of(cos_sin_cache),
        cos_sin_cache.shape[1] // 2, is_neox,
    )  # fmt: skip


def apply_attention_temperature_inplace(
    positions: np.ndarray, query: np.ndarray, scale: float, floor: int, offset: int
) -> None:
    """See `nbflow_kernels.apply_attention_temperature_inplace`; heads are contiguous."""
    T, H, D = query.shape
    hold(query)
    parallel_for(
        _temperature, T, 2.0 * query.size, positions, address_of(query), query.strides[0], H * D,
        scale, floor, offset,
    )  # fmt: skip


def alibi_bias(slopes: np.ndarray, symmetric: bool, out: np.ndarray) -> None:
    """See `nbflow_kernels.alibi_bias`."""
    _, Tq, Tk = out.shape
    distance = np.arange(Tk) - np.arange(Tk - Tq, Tk)[:, None]
    distance = (-np.abs(distance) if symmetric else distance).astype(np.float32)
    np.multiply(slopes[:, None, None], distance, out=out)


def relative_position_bucket(
    relative_position: np.ndarray,
    bidirectional: bool,
    n: int,
    max_distance: int,
    out: np.ndarray,
) -> None:
    """See `nbflow_kernels.relative_position_bucket`; `n` buckets per direction."""
    distance = np.abs(relative_position) if bidirectional else np.maximum(-relative_position, 0)
    near = n // 2
    # float32 logarithms, as in the T5 code, for the same bucket limits
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(near))
    ratio = ratio / np.float32(np.log(max_distance / near)) * np.float32(n - near)
    far = np.minimum(near + ratio.astype(np.int32), n - 1)
    np.copyto(out, np.where(distance < near, distance, far))
    if bidirectional:
        out[relative_position > 0] += n


def relative_position_bias(table: np.ndarray, buckets: np.ndarray, out: np.ndarray) -> None:
    """See `nbflow_kernels.relative_position_bias`; `buckets` of the distances 1 - Tk ... Tq - 1."""
    _, Tq, Tk = out.shape
    if out.size:
        values = np.ascontiguousarray(table[buckets].T)  # (H, Tk + Tq - 1)
        windows = np.lib.stride_tricks.sliding_window_view(values, Tk, axis=1)
        out[...] = windows[:, Tq - 1 :: -1]


def sinusoidal_position_embedding(
    positions: np.ndarray,
    frequencies: np.ndarray,
    interleave: bool,
    offset: int,
    padding_idx: int | None,
    out: np.ndarray,
) -> None:
    """See `nbflow_kernels.sinusoidal_position_embedding`."""
    half = len(frequencies)
    rows = positions.astype(np.int64) + offset
    angles = np.outer(rows, frequencies)
    out[:, 2 * half :] = 0.0
    sines, cosines = slice(0, half), slice(half, 2 * half)
    if interleave:
        sines, cosines = slice(0, None, 2), slice(1, None, 2)
    out[:, sines], out[:, cosines] = np.sin(angles), np.cos(angles)
    if padding_idx is not None:
        out[rows == padding_idx] = 0.0


def add_learned_positions(
    x: np.ndarray, positions: np.ndarray, table: np.ndarray, offset: int, out: np.ndarray
) -> None:
    """See `nbflow_kernels.add_learned_positions`."""
    rows = table[positions + np.int32(offset)]
    if rows.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    np.add(x, rows, out=out)


@jit.device_function
def _rotate_pair(a, b, cos, sin):
    """Rotate one pair of elements; float32 products are exact in float64."""
    x, y = np.float64(read_f32(a)), np.float64(read_f32(b))
    c, s = np.float64(read_f32(cos)), np.float64(read_f32(sin))
    write_f32(a, x * c - y * s)
    write_f32(b, y * c + x * s)


@jit.device_function
def rotate_halves(x, cos, half):
    """Rotate the pairs (j, j + half) of a head; sines follow the cosines at `cos`."""
    sin, y = cos + 4 * half, x + 4 * half
    d = 0
    while d + 16 <= half:
        i = 4 * d
        a, b = simd.load_f32(x + i), simd.load_f32(y + i)
        c, s = simd.load_f32(cos + i), simd.load_f32(sin + i)
        minus_s = simd.sub(simd.splat(0.0), s)
        simd.store_f32(x + i, simd.fma(a, c, simd.mul(b, minus_s)))
        simd.store_f32(y + i, simd.fma(b, c, simd.mul(a, s)))
        d += 16
    while d < half:
        _rotate_pair(x + 4 * d, y + 4 * d, cos + 4 * d, sin + 4 * d)
        d += 1


@jit.device_function
def _rotate_pairs(x, cos, half):
    """Rotate the pairs (2j, 2j + 1) of a head; sines follow the cosines at `cos`."""
    sin = cos + 4 * half
    d = 0
    while d + 16 <= half:
        at = x + 8 * d
        c, s = simd.load_f32(cos + 4 * d), simd.load_f32(sin + 4 * d)
        low, high = simd.load_f32(at), simd.load_f32(at + 64)
        # lanes 2j: x cos - y sin; lanes 2j + 1: y cos + x sin
        s_low = simd_shuffle.negate_evens(simd_shuffle.twice_low(s))
        s_high = simd_shuffle.negate_evens(simd_shuffle.twice_high(s))
        turned = simd.mul(simd_shuffle.swap_pairs(low), s_low)
        simd.store_f32(at, simd.fma(low, simd_shuffle.twice_low(c), turned))
        turned = simd.mul(simd_shuffle.swap_pairs(high), s_high)
        simd.store_f32(at + 64, simd.fma(high, simd_shuffle.twice_high(c), turned))
        d += 16
    while d < half:
        _rotate_pair(x + 8 * d, x + 8 * d + 4, cos + 4 * d, sin + 4 * d)
        d += 1


@jit.device_function
def rotate_head(x, cos, half, is_neox):
    """Rotate the pairs of a head: (j, j + half) if `is_neox`, else (2j, 2j + 1)."""
    if is_neox:
        rotate_halves(x, cos, half)
    else:
        _rotate_pairs(x, cos, half)


@jit.kernel(unroll=False)
def _rope(
    positions, query, query_row_bytes, H, key, key_row_bytes, G, D, cache, half, is_neox, start,
    stop
):  # fmt: skip
    for row in range(start, stop):
        cos = cache + 8 * half * np.int64(positions[row])
        for h in range(H + G):
            if h < H:
                x = query + row * query_row_bytes + 4 * D * h
            else:
                x = key + row * key_row_bytes + 4 * D * (h - H)
            rotate_head(x, cos, half, is_neox)


@jit.kernel
def _temperature(positions, query, row_bytes, E, scale, floor, offset, start, stop):
    for row in range(start, stop):
        steps = max(0, np.int64(positions[row]) + offset) // floor
        factor = 1.0 + scale * np.log(1.0 + steps)
        x, wide = query + row * row_bytes, simd.splat(np.float32(factor))
        e = 0
        while e + 16 <= E:
            simd.store_f32(x + 4 * e, simd.mul(simd.load_f32(x + 4 * e), wide))
            e += 16
        while e < E:
            write_f32(x + 4 * e, read_f32(x + 4 * e) * np.float32(factor))
            e += 1
