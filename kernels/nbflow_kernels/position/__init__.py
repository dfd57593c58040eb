"""Rotary position embedding (RoPE), FlashInfer's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._dispatch import check_array, is_cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import cpu, cuda

__all__ = [
    "apply_rope",
    "apply_rope_pos_ids",
    "apply_rope_with_cos_sin_cache_inplace",
    "rope_cos_sin_cache",
]


def rope_cos_sin_cache(max_pos: int, rotary_dim: int, *, theta: float, scale: float = 1.0) -> Any:
    r"""Return the cosines and sines of all positions.

    .. math:: \alpha_{pj} = \frac{p}{\mathrm{scale}} \, \theta^{-2j/d}, \qquad j < d/2

    Parameters
    ----------
    max_pos : int
        Number of positions.
    rotary_dim : int
        d, the even number of elements that turn.
    theta : float
        Base of the frequencies, 1e4 in the paper.
    scale : float
        Positions are divided by this (linear interpolation).

    Returns
    -------
    array of float32, shape (max_pos, rotary_dim)
        Cosines in the first half of each row, sines in the second; the angles are float64.

    Raises
    ------
    UsageError
        If `rotary_dim` is odd or a number is out of range.

    References
    ----------
    .. [1] J. Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2.

    Examples
    --------
    >>> from nbflow_kernels.position import rope_cos_sin_cache
    >>> rope_cos_sin_cache(2, 2, theta=1e4).round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]], dtype=float32)
    """
    if max_pos < 0:
        raise UsageError(f"max_pos must not be negative, got {max_pos}")
    if rotary_dim < 2 or rotary_dim % 2:
        raise UsageError(f"rotary_dim must be even and positive, got {rotary_dim}")
    if not (theta > 0 and scale > 0):
        raise UsageError(f"theta and scale must be positive, got {theta} and {scale}")
    frequencies = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return _cache_of(np.arange(max_pos), frequencies, scale)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Any, query: Any, key: Any, *, cos_sin_cache: Any, is_neox: bool = True
) -> None:
    """Rotate query and key rows by the angles of their positions, in place.

    Parameters
    ----------
    positions : array of int32, shape (T,)
        Row of `cos_sin_cache` for each token.
    query : array of float32, shape (T, H, D)
        Changed in place; rows may be far apart (columns of a wider matrix).
    key : array of float32, shape (T, G, D)
        Changed in place; rows may be far apart.
    cos_sin_cache : array of float32, shape (max_pos, d)
        Cosines, then sines: see `rope_cos_sin_cache`.  Only the first d <= D elements of each head
        turn.
    is_neox : bool
        True rotates the pairs (j, j + d/2), False the pairs (2j, 2j + 1).

    Raises
    ------
    UsageError
        If shapes do not fit or a position is not in the cache.
    TypeError
        If an argument is not an array or has another dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.position import (
    ...     apply_rope_with_cos_sin_cache_inplace, rope_cos_sin_cache)
    >>> q, k = np.ones((1, 1, 2), np.float32), np.zeros((1, 1, 2), np.float32)
    >>> cache = rope_cos_sin_cache(4, 2, theta=1e4)
    >>> apply_rope_with_cos_sin_cache_inplace(np.array([3], np.int32), q, k, cos_sin_cache=cache)
    >>> q.ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    check_array("query", query, (None, None, None), rows=True)
    T, _, D = query.shape
    check_array("key", key, (T, None, D), rows=True)
    check_array("positions", positions, (T,), np.int32)
    check_array("cos_sin_cache", cos_sin_cache, (None, None))
    max_pos, d = cos_sin_cache.shape
    if d % 2 or d > D:
        raise UsageError(
            f"cos_sin_cache must have an even number of columns up to the head size {D}, got {d}"
        )
    if T and (positions.min() < 0 or positions.max() >= max_pos):
        bad = positions[(positions < 0) | (positions >= max_pos)][0]
        raise UsageError(
            f"positions must be 0..{max_pos - 1}, the rows of cos_sin_cache, got {bad}"
        )
    variant = cuda if is_cuda(query) else cpu
    variant.apply_rope_with_cos_sin_cache_inplace(positions, query, key, cos_sin_cache, is_neox)


def apply_rope_pos_ids(
    q: Any,
    k: Any,
    pos_ids: Any,
    *,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
) -> tuple[Any, Any]:
    """Return query and key rows rotated by the angles of their positions.

    Parameters
    ----------
    q : array of float32, shape (T, H, D)
        Query rows.
    k : array of float32, shape (T, G, D)
        Key rows.
    pos_ids : array of int32, shape (T,)
        Position of each row, not negative.
    rotary_dim : int, optional
        Even number of elements of each head that turn, the first ones; D unless given.
    interleave : bool
        False rotates the pairs (j, j + d/2), True the pairs (2j, 2j + 1).
    rope_scale : float
        Positions are divided by this.
    rope_theta : float
        Base of the frequencies.

    Returns
    -------
    q, k : arrays of float32
        New arrays of the same shapes.

    Raises
    ------
    UsageError, TypeError
        If shapes, dtypes or numbers do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.position import apply_rope_pos_ids
    >>> q = np.ones((1, 1, 2), np.float32)
    >>> apply_rope_pos_ids(q, q, np.array([3], np.int32))[0].ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    check_array("q", q, (None, None, None), rows=True)
    check_array("k", k, (len(q), None, q.shape[2]), rows=True)
    check_array("pos_ids", pos_ids, (len(q),), np.int32)
    if len(q) and pos_ids.min() < 0:
        raise UsageError(f"pos_ids must not be negative, got {pos_ids.min()}")
    width = q.shape[2] if rotary_dim is None else rotary_dim
    if width < 2 or width % 2 or width > q.shape[2]:
        raise UsageError(f"rotary_dim must be even and 2..{q.shape[2]}, got {width}")
    if not (rope_theta > 0 and rope_scale > 0):
        raise UsageError(
            f"rope_theta and rope_scale must be positive, got {rope_theta} and {rope_scale}"
        )
    # one cache row per token: positions may be far beyond the number of rows
    frequencies = rope_theta ** (-np.arange(0, width, 2) / width)
    if is_cuda(q):
        cuda.apply_rope_with_cos_sin_cache_inplace(pos_ids, q, k, frequencies, not interleave)
    cache = _cache_of(pos_ids, frequencies, rope_scale)
    rows = np.arange(len(q), dtype=np.int32)
    q_out, k_out = np.array(q, order="C"), np.array(k, order="C")
    cpu.apply_rope_with_cos_sin_cache_inplace(rows, q_out, k_out, cache, not interleave)
    return q_out, k_out


def apply_rope(
    q: Any,
    k: Any,
    indptr: Any,
    offsets: Any,
    *,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
) -> tuple[Any, Any]:
    """Return the rows of several requests rotated, each request starting at its offset.

    Parameters
    ----------
    q : array of float32, shape (T, H, D)
        Query rows of all requests.
    k : array of float32, shape (T, G, D)
        Key rows of all requests.
    indptr : array of int32, shape (B + 1,)
        Rows of request b are ``indptr[b]:indptr[b + 1]``.
    offsets : array of int32, shape (B,)
        Position of each request's first row.
    rotary_dim, interleave, rope_scale, rope_theta
        As in `apply_rope_pos_ids`.

    Returns
    -------
    q, k : arrays of float32
        New arrays of the same shapes.

    Raises
    ------
    UsageError, TypeError
        If shapes, dtypes or numbers do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.position import apply_rope
    >>> q = np.ones((1, 1, 2), np.float32)
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> apply_rope(q, q, ints(0, 1), ints(3))[0].ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    check_array("q", q, (None, None, None), rows=True)
    check_array("indptr", indptr, (None,), np.int32)
    check_array("offsets", offsets, (max(len(indptr) - 1, 0),), np.int32)
    counts = np.diff(indptr)
    if not len(indptr) or indptr[0] != 0 or (counts < 0).any() or indptr[-1] != len(q):
        raise UsageError(
            f"indptr must start at 0, never fall and end at the number of rows {len(q)}, "
            f"got {indptr.tolist()}"
        )
    shift = (offsets - indptr[:-1]).astype(np.int32)  # position minus row number
    pos_ids = np.repeat(shift, counts) + np.arange(len(q), dtype=np.int32)
    return apply_rope_pos_ids(
        q,
        k,
        pos_ids,
        rotary_dim=rotary_dim,
        interleave=interleave,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
    )


def _cache_of(positions: np.ndarray, frequencies: np.ndarray, scale: float) -> np.ndarray:
    """Return cosines and sines, float32 (positions, 2 * frequencies)."""
    angles = np.outer(positions / scale, frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
