"""Rotary position embedding (RoPE): cos/sin tables, and the functions of FlashInfer to apply them.

Functions with `rope_theta` compute the angles in float64 on every call; models make a table once
(`rope_cos_sin_cache`) and apply that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_indptr, check_range, is_cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import cpu, cuda
from nbflow_kernels.position.rope_scaling import Frequencies, LinearRopeScaling, RopeScaling


def rope_frequencies(
    rotary_dim: int,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
    seq_len: int | None = None,
) -> Frequencies:
    r"""Return the RoPE frequencies, and the factor of cosines and sines.

    .. math:: \omega_j = \theta^{-2j/d}, \qquad j < d/2

    Parameters
    ----------
    rotary_dim : int
        d, the even number of rotated elements.
    theta : float
        Base of the frequencies, 1e4 in the paper.
    scaling : RopeScaling, optional
        Context extension.
    seq_len : int, optional
        Sequence length, used by `DynamicNtkRopeScaling` and `LongRopeScaling`; by default within
        the trained length.

    Returns
    -------
    frequencies : array of float64, shape (rotary_dim / 2,)
        Angle per position of each pair.
    attention_factor : float
        Factor of cosines and sines; 1 for most scalings.

    Raises
    ------
    UsageError
        If `rotary_dim` is odd or a number is out of range.

    References
    ----------
    .. [1] J. Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2.

    Examples
    --------
    >>> from nbflow_kernels import LinearRopeScaling, rope_frequencies
    >>> rope_frequencies(4, theta=1e4, scaling=LinearRopeScaling(factor=2.0))
    (array([0.5  , 0.005]), 1.0)
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise UsageError(f"rotary_dim must be even and positive, got {rotary_dim}")
    if not theta > 0:
        raise UsageError(f"theta must be positive, got {theta}")
    chosen = LinearRopeScaling(factor=1.0) if scaling is None else scaling
    return chosen.frequencies(rotary_dim, float(theta), seq_len or 0)


def rope_cos_sin_cache(
    max_pos: int,
    rotary_dim: int,
    *,
    theta: float,
    scale: float = 1.0,
    scaling: RopeScaling | None = None,
    seq_len: int | None = None,
) -> Any:
    r"""Return the table of cosines and sines for all positions.

    .. math:: c_{pj} = a \cos(\omega_j \, p / \mathrm{scale}), \quad
        s_{pj} = a \sin(\omega_j \, p / \mathrm{scale})

    Parameters
    ----------
    max_pos : int
        Number of positions.
    rotary_dim, theta
        As in `rope_frequencies`.
    scale : float
        Divisor of positions (linear interpolation).
    scaling : RopeScaling, optional
        Context extension, which sets :math:`\omega_j` and the attention factor a.
    seq_len : int, optional
        Sequence length, used by `DynamicNtkRopeScaling` and `LongRopeScaling`; `max_pos` by
        default.

    Returns
    -------
    array of float32, shape (max_pos, rotary_dim)
        Cosines in the first half of each row, sines in the second; angles are float64.

    Raises
    ------
    UsageError
        If `rotary_dim` is odd or a number is out of range.

    Examples
    --------
    >>> from nbflow_kernels import YarnRopeScaling, rope_cos_sin_cache
    >>> rope_cos_sin_cache(2, 2, theta=1e4).round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]], dtype=float32)
    >>> yarn = YarnRopeScaling(factor=4.0, original_max_position=32)
    >>> rope_cos_sin_cache(2, 4, theta=1e4, scaling=yarn).round(3)
    array([[1.139, 1.139, 0.   , 0.   ],
           [0.615, 1.139, 0.958, 0.003]], dtype=float32)
    """
    if max_pos < 0:
        raise UsageError(f"max_pos must not be negative, got {max_pos}")
    if not (theta > 0 and scale > 0):
        raise UsageError(f"theta and scale must be positive, got {theta} and {scale}")
    length = max_pos if seq_len is None else seq_len
    frequencies = rope_frequencies(rotary_dim, theta=theta, scaling=scaling, seq_len=length)
    return _cos_sin(np.arange(max_pos), frequencies, scale)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Any,
    query: Any,
    key: Any,
    head_size: int | None = None,
    cos_sin_cache: Any = None,
    is_neox: bool = True,
) -> None:
    """Apply RoPE to query and key rows, in place.

    Parameters
    ----------
    positions : array of int32, shape (T,)
        Row of `cos_sin_cache` for each token.
    query, key : arrays of float32, shapes (T, H, D) and (T, G, D), or (T, H * D) and (T, G * D)
        Changed in place; any row stride (columns of a wider matrix).
    head_size : int, optional
        D; needed for arrays of two axes.
    cos_sin_cache : array of float32, shape (max_pos, d)
        Cosines, then sines; see `rope_cos_sin_cache`.  The first d <= D elements of each head are
        rotated.  Required; it has a default only because FlashInfer puts it after `head_size`.
    is_neox : bool
        True rotates the pairs (j, j + d/2), False the pairs (2j, 2j + 1).

    Raises
    ------
    UsageError, TypeError
        If shapes do not fit or a position is not in the cache, or if an argument is not an array or
        has another dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_rope_with_cos_sin_cache_inplace, rope_cos_sin_cache
    >>> q, k = np.ones((1, 1, 2), np.float32), np.zeros((1, 1, 2), np.float32)
    >>> cache = rope_cos_sin_cache(4, 2, theta=1e4)
    >>> apply_rope_with_cos_sin_cache_inplace(np.array([3], np.int32), q, k, cos_sin_cache=cache)
    >>> q.ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    query = _heads("query", query, head_size)
    T, _, D = query.shape
    key = _heads("key", key, None if getattr(key, "ndim", 3) == 3 else D)
    check_array("key", key, (T, None, D), rows=True)
    check_array("positions", positions, (T,), np.int32)
    check_array("cos_sin_cache", cos_sin_cache, (None, None))
    max_pos, d = cos_sin_cache.shape
    if d % 2 or d > D:
        raise UsageError(
            f"cos_sin_cache must have an even number of columns up to the head size {D}, got {d}"
        )
    if not is_cuda(positions):
        check_range("positions must be {}, the rows of cos_sin_cache", positions, max_pos)
    variant = cuda if is_cuda(query) else cpu
    variant.apply_rope_with_cos_sin_cache_inplace(positions, query, key, cos_sin_cache, is_neox)


def apply_rope_with_cos_sin_cache(
    positions: Any,
    query: Any,
    key: Any,
    head_size: int | None = None,
    cos_sin_cache: Any = None,
    is_neox: bool = True,
) -> tuple[Any, Any]:
    """Return rotated copies of query and key rows, as for `apply_rope_with_cos_sin_cache_inplace`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_rope_with_cos_sin_cache, rope_cos_sin_cache
    >>> q, cache = np.ones((1, 4), np.float32), rope_cos_sin_cache(4, 2, theta=1e4)
    >>> apply_rope_with_cos_sin_cache(np.array([3], np.int32), q, q, 2, cache)[0].round(3)
    array([[-1.131, -0.849, -1.131, -0.849]], dtype=float32)
    """
    for name, rows in (("query", query), ("key", key)):
        _heads(name, rows, head_size)
    query, key = query.copy(order="C"), key.copy(order="C")
    apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key


def apply_rope_pos_ids(
    q: Any,
    k: Any,
    pos_ids: Any,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
) -> tuple[Any, Any]:
    """Return query and key rows with RoPE applied.

    Parameters
    ----------
    q, k : array of float32, shapes (T, H, D) and (T, G, D)
        Query and key rows, with any row stride.
    pos_ids : array of int32, shape (T,)
        Position of each row.  A negative one rotates back: rows at position p, rotated again by
        d, are those of position p + d.
    rotary_dim : int, optional
        Number of leading elements of each head to rotate, even; D by default.
    interleave : bool
        False rotates the pairs (j, j + d/2), True the pairs (2j, 2j + 1).
    rope_scale : float
        Divisor of positions.
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
    >>> from nbflow_kernels import apply_rope_pos_ids
    >>> q = np.ones((1, 1, 2), np.float32)
    >>> apply_rope_pos_ids(q, q, np.array([3], np.int32))[0].ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    return rotated(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_pos_ids_inplace(
    q: Any,
    k: Any,
    pos_ids: Any,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
) -> None:
    """Apply RoPE to query and key rows in place; arguments as for `apply_rope_pos_ids`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_rope_pos_ids_inplace
    >>> q, k = np.ones((2, 1, 1, 2), np.float32)
    >>> apply_rope_pos_ids_inplace(q, k, np.array([3], np.int32))
    >>> q.ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    rotate(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope(
    q: Any,
    k: Any,
    indptr: Any,
    offsets: Any,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
) -> tuple[Any, Any]:
    """Return ragged query and key rows with RoPE applied, each request starting at its offset.

    Parameters
    ----------
    q, k, rotary_dim, interleave, rope_scale, rope_theta
        As for `apply_rope_pos_ids`, with the rows of all requests.
    indptr : array of int32, shape (B + 1,)
        Rows of request b are ``indptr[b]:indptr[b + 1]``.
    offsets : array of int32, shape (B,)
        Position of each request's first row.

    Returns
    -------
    q, k : arrays of float32
        New arrays of the same shapes.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_rope
    >>> q = np.ones((1, 1, 2), np.float32)
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> apply_rope(q, q, ints(0, 1), ints(3))[0].ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    pos_ids = positions_of(q, indptr, offsets)
    return apply_rope_pos_ids(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_inplace(
    q: Any,
    k: Any,
    indptr: Any,
    offsets: Any,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
) -> None:
    """Apply RoPE to ragged query and key rows in place; arguments as for `apply_rope`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_rope_inplace
    >>> q, k = np.ones((2, 1, 1, 2), np.float32)
    >>> apply_rope_inplace(q, k, np.array([0, 1], np.int32), np.array([3], np.int32))
    >>> q.ravel().round(3)
    array([-1.131, -0.849], dtype=float32)
    """
    pos_ids = positions_of(q, indptr, offsets)
    apply_rope_pos_ids_inplace(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)


def positions_of(q: Any, indptr: Any, offsets: Any) -> Any:
    """Return the position of each row of requests that start at `offsets`; check the arguments."""
    check_array("q", q, (None, None, None), rows=True)
    check_array("indptr", indptr, (None,), np.int32)
    check_array("offsets", offsets, (max(len(indptr) - 1, 0),), np.int32)
    if is_cuda(indptr) and len(indptr):
        return cuda.ragged_positions(indptr, offsets, len(q))
    check_indptr("indptr", indptr, end=("the number of rows", len(q)))
    shift = (offsets - indptr[:-1]).astype(np.int32)  # position minus row number
    return np.asarray(np.repeat(shift, np.diff(indptr)) + np.arange(len(q), dtype=np.int32))


def rotated(q: Any, k: Any, *arguments: Any) -> tuple[Any, Any]:
    """Return copies of `q` and `k` after `rotate`."""
    check_array("q", q, (None, None, None), rows=True)
    check_array("k", k, (None, None, None), rows=True)
    q, k = q.copy(order="C"), k.copy(order="C")
    rotate(q, k, *arguments)
    return q, k


def rotate(
    q: Any,
    k: Any,
    pos_ids: Any,
    rotary_dim: int | None,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    scaling: RopeScaling | None = None,
) -> None:
    """Check the arguments and rotate rows in place, with a row of cosines and sines per token."""
    check_array("q", q, (None, None, None), rows=True)
    check_array("k", k, (len(q), None, q.shape[2]), rows=True)
    check_array("pos_ids", pos_ids, (len(q),), np.int32)
    width = q.shape[2] if rotary_dim is None else rotary_dim
    if width < 2 or width % 2 or width > q.shape[2]:
        raise UsageError(f"rotary_dim must be even and 2..{q.shape[2]}, got {width}")
    if not (rope_theta > 0 and rope_scale > 0):
        raise UsageError(
            f"rope_theta and rope_scale must be positive, got {rope_theta} and {rope_scale}"
        )
    frequencies = rope_frequencies(width, theta=rope_theta, scaling=scaling)
    if is_cuda(q):
        cuda.apply_rope_with_frequencies(pos_ids, q, k, frequencies, rope_scale, not interleave)
        return
    # angles of the given positions only: positions may far exceed the number of rows
    cache = _cos_sin(pos_ids, frequencies, rope_scale)
    rows = np.arange(len(q), dtype=np.int32)
    cpu.apply_rope_with_cos_sin_cache_inplace(rows, q, k, cache, not interleave)


def _cos_sin(positions: Any, frequencies: Frequencies, scale: float) -> NDArray[np.float32]:
    """Return cosines and sines, float32 (positions, 2 * frequencies)."""
    per_position, factor = frequencies
    angles = np.outer(positions / scale, per_position)
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return (cos_sin * factor).astype(np.float32)


def _heads(name: str, x: Any, head_size: int | None) -> Any:
    """Return rows as (T, H, D); (T, H * D) rows are split into heads without a copy."""
    if getattr(x, "ndim", 3) != 2:
        check_array(name, x, (None, None, head_size), rows=True)
        return x
    check_array(name, x, (None, None), rows=True)
    if head_size is None or head_size < 1 or x.shape[1] % head_size:
        raise UsageError(
            f"{name} of shape {x.shape} needs head_size, a divisor of its columns, got {head_size}"
        )
    return x.reshape(x.shape[0], x.shape[1] // head_size, head_size)
