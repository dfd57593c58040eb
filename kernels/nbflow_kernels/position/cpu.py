"""Rotary position embedding on the CPU, in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import simd
from nbflow_kernels._jit import njit
from nbflow_kernels.lanes import address_of, read_f32, write_f32
from nbflow_kernels.threads import split_rows


def apply_rope_with_cos_sin_cache_inplace(
    positions: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    cos_sin_cache: np.ndarray,
    is_neox: bool,
) -> None:
    """See `nbflow_kernels.apply_rope_with_cos_sin_cache_inplace`."""
    T, H, D = query.shape
    G = key.shape[1]
    split_rows(
        _rope,
        T,
        2.0 * T * (H + G) * cos_sin_cache.shape[1],
        positions,
        address_of(query),
        query.strides[0],
        H,
        address_of(key),
        key.strides[0],
        G,
        D,
        address_of(cos_sin_cache),
        cos_sin_cache.shape[1] // 2,
        is_neox,
    )


@njit
def _rotate_pair(a: Any, b: Any, cos: Any, sin: Any) -> None:
    """Rotate one pair of elements; products of float32 are exact in float64."""
    x, y = np.float64(read_f32(a)), np.float64(read_f32(b))
    c, s = np.float64(read_f32(cos)), np.float64(read_f32(sin))
    write_f32(a, x * c - y * s)
    write_f32(b, y * c + x * s)


@njit
def _rotate_halves(x: Any, cos: Any, half: Any) -> None:
    """Rotate the pairs (j, j + half) of one head; `cos` has the sines behind it."""
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


@njit
def _rope(
    positions: Any,
    query: Any,
    query_row_bytes: Any,
    H: Any,
    key: Any,
    key_row_bytes: Any,
    G: Any,
    D: Any,
    cache: Any,
    half: Any,
    is_neox: Any,
    start: Any,
    stop: Any,
) -> None:
    for row in range(start, stop):
        cos = cache + 8 * half * np.int64(positions[row])
        for h in range(H + G):
            if h < H:
                x = query + row * query_row_bytes + 4 * D * h
            else:
                x = key + row * key_row_bytes + 4 * D * (h - H)
            if is_neox:
                _rotate_halves(x, cos, half)
            else:
                for j in range(half):
                    _rotate_pair(x + 8 * j, x + 8 * j + 4, cos + 4 * j, cos + 4 * (half + j))
