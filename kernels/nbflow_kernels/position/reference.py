"""Rotary position embedding in NumPy float64, pair by pair."""

from __future__ import annotations

import numpy as np


def rope_cos_sin_cache(
    max_pos: int, rotary_dim: int, *, theta: float, scale: float = 1.0
) -> np.ndarray:
    """See `nbflow_kernels.rope_cos_sin_cache`."""
    cache = np.empty((max_pos, rotary_dim), np.float64)
    for j in range(rotary_dim // 2):
        angles = np.arange(max_pos) / scale * theta ** (-2.0 * j / rotary_dim)
        cache[:, j] = np.cos(angles)
        cache[:, rotary_dim // 2 + j] = np.sin(angles)
    return cache


def _rotate(x: np.ndarray, cos_sin: np.ndarray, halves: bool) -> np.ndarray:
    """Rotate (T, H, D) rows by the angles of (T, rotary_dim)."""
    y = x.astype(np.float64)
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    a = slice(0, half) if halves else slice(0, 2 * half, 2)
    b = slice(half, 2 * half) if halves else slice(1, 2 * half, 2)
    first, second = y[..., a].copy(), y[..., b].copy()
    y[..., a] = first * cos - second * sin
    y[..., b] = second * cos + first * sin
    return y


def apply_rope_with_cos_sin_cache_inplace(
    positions: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    *,
    cos_sin_cache: np.ndarray,
    is_neox: bool = True,
) -> None:
    """See `nbflow_kernels.apply_rope_with_cos_sin_cache_inplace`."""
    cos_sin = cos_sin_cache.astype(np.float64)[positions]
    for x in (query, key):
        x[...] = _rotate(x, cos_sin, is_neox)


def apply_rope_pos_ids(
    q: np.ndarray,
    k: np.ndarray,
    pos_ids: np.ndarray,
    *,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.apply_rope_pos_ids`."""
    width = q.shape[-1] if rotary_dim is None else rotary_dim
    cache = rope_cos_sin_cache(
        int(pos_ids.max(initial=0)) + 1, width, theta=rope_theta, scale=rope_scale
    )
    return _rotate(q, cache[pos_ids], not interleave), _rotate(k, cache[pos_ids], not interleave)


def apply_rope(
    q: np.ndarray,
    k: np.ndarray,
    indptr: np.ndarray,
    offsets: np.ndarray,
    *,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.apply_rope`."""
    runs = [
        offset + np.arange(b - a)
        for a, b, offset in zip(indptr[:-1], indptr[1:], offsets, strict=True)
    ]
    return apply_rope_pos_ids(
        q,
        k,
        np.concatenate([*runs, np.zeros(0, np.int64)]).astype(np.int64),
        rotary_dim=rotary_dim,
        interleave=interleave,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
    )
