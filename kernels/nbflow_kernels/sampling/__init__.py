"""From logits to tokens: softmax, argmax, exact sampling with top-k, top-p and min-p filters.

Random numbers come from a counter-based generator (Philox4x32-10): a draw is a function of its
row's probabilities, seed and offset and of nothing else, so results do not depend on what else is
in the batch.  Filters are exact and deterministic; among equal probabilities the lowest index wins.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._dispatch import check_array, is_cuda
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.sampling import cpu, cuda

__all__ = [
    "argmax",
    "min_p_sampling_from_probs",
    "sampling_from_probs",
    "softmax",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

ORDERS = ("top_k_first", "joint")


def softmax(logits: Any, temperature: Any = None, *, out: Any = None) -> Any:
    """Return the probabilities of logits.

    Parameters
    ----------
    logits : array of float32, shape (B, V)
        One row per request; -inf excludes a token.
    temperature : float or array, shape (B,), optional
        Logits are divided by it first; positive.  For the limit 0 use `argmax`.
    out : array of float32, shape (B, V), optional
        Where to write the result; it may be `logits` itself.

    Returns
    -------
    array of float32, shape (B, V)
        Rows of sum 1.  A row with a NaN or +inf, or with nothing above -inf, becomes NaN.

    Raises
    ------
    UsageError
        If a shape does not fit or a temperature is not positive.
    TypeError
        If `logits` is not an array of float32.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import softmax
    >>> softmax(np.array([[0.0, 0.0, -np.inf]], np.float32), 0.5)
    array([[0.5, 0.5, 0. ]], dtype=float32)
    """
    check_array("logits", logits, (None, None))
    if logits.shape[1] == 0:
        raise UsageError("logits must have at least one column, got shape (B, 0)")
    scale = _per_row("temperature", 1.0 if temperature is None else temperature, len(logits))
    # below the least normal float32 the reciprocal overflows
    if not ((scale >= np.finfo(np.float32).tiny) & np.isfinite(scale)).all():
        raise UsageError(f"temperature must be positive, got {scale.min()}; for 0 use argmax")
    if out is not None:
        check_array("out", out, logits.shape)
    elif not is_cuda(logits):
        out = np.empty(logits.shape, np.float32)
    (cuda if is_cuda(logits) else cpu).softmax(logits, scale.astype(np.float32), out)
    return out


def argmax(logits: Any) -> Any:
    """Return the index of each row's largest element, the lowest one among equals.

    Parameters
    ----------
    logits : array of float32, shape (B, V)
        One row per request; without NaN.

    Returns
    -------
    array of int32, shape (B,)
        Token ids.

    Raises
    ------
    UsageError
        If a row has a NaN.
    TypeError
        If `logits` is not an array of float32.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import argmax
    >>> argmax(np.array([[1, 3, 3], [0, -1, -2]], np.float32))
    array([1, 0], dtype=int32)
    """
    check_array("logits", logits, (None, None))
    if logits.shape[1] == 0:
        raise UsageError("logits must have at least one column, got shape (B, 0)")
    if is_cuda(logits):
        cuda.argmax(logits, None)
    out = np.empty(len(logits), np.int32)
    cpu.argmax(logits, out)
    _check_valid("logits", out, "must not have a NaN")
    return out


def sampling_from_probs(probs: Any, *, seed: Any, offset: Any = 0, indices: Any = None) -> Any:
    """Draw a token from each row of probabilities.

    Parameters
    ----------
    probs : array of float32, shape (R, V)
        Probabilities, not negative; a row need not sum to 1.
    seed : int or array of integers, shape (B,)
        Names the stream of random numbers, 64 bits.
    offset : int or array of integers, shape (B,)
        Place in the stream, 64 bits.  If both are single numbers, row i draws at ``offset + i``, so
        that rows differ; add B before the next call.
    indices : array of int32, shape (B,), optional
        The row of `probs` that each draw uses; row i for draw i unless given.

    Returns
    -------
    array of int32, shape (B,)
        Token ids; a token of probability 0 is never drawn.

    Raises
    ------
    UsageError
        If a row has a negative, infinite or NaN element or only zeros, or a number is out of range.
    TypeError
        If `probs` is not an array of float32, or a seed is not an integer.

    References
    ----------
    .. [1] J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10).

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import sampling_from_probs
    >>> probs = np.array([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]], np.float32)
    >>> sampling_from_probs(probs, seed=1, indices=np.array([0, 0], np.int32))
    array([1, 1], dtype=int32)
    """
    return _draw(probs, seed, offset, indices)


def top_k_sampling_from_probs(
    probs: Any, top_k: Any, *, seed: Any, offset: Any = 0, indices: Any = None
) -> Any:
    """Draw a token from the `top_k` most likely of each row.

    Parameters
    ----------
    probs : array of float32, shape (R, V)
        Probabilities, as in `sampling_from_probs`.
    top_k : int or array of integers, shape (B,)
        How many tokens to keep, at least 1; V or more keeps all.
    seed, offset, indices
        As in `sampling_from_probs`.

    Returns
    -------
    array of int32, shape (B,)
        Token ids.

    Raises
    ------
    UsageError, TypeError
        As `sampling_from_probs`; UsageError if a `top_k` is below 1.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_k_sampling_from_probs
    >>> top_k_sampling_from_probs(np.array([[0.3, 0.4, 0.3]], np.float32), 1, seed=7)
    array([1], dtype=int32)
    """
    return _draw(probs, seed, offset, indices, top_k=top_k)


def top_p_sampling_from_probs(
    probs: Any, top_p: Any, *, seed: Any, offset: Any = 0, indices: Any = None
) -> Any:
    """Draw a token from the fewest most likely ones whose sum reaches `top_p`.

    Parameters
    ----------
    probs : array of float32, shape (R, V)
        Probabilities, as in `sampling_from_probs`.
    top_p : float or array, shape (B,)
        Share of the row's sum to keep, 0..1; the token that crosses it is kept.
    seed, offset, indices
        As in `sampling_from_probs`.

    Returns
    -------
    array of int32, shape (B,)
        Token ids.

    Raises
    ------
    UsageError, TypeError
        As `sampling_from_probs`; UsageError if a `top_p` is outside 0..1.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_p_sampling_from_probs
    >>> top_p_sampling_from_probs(np.array([[0.3, 0.6, 0.1]], np.float32), 0.5, seed=7)
    array([1], dtype=int32)
    """
    return _draw(probs, seed, offset, indices, top_p=top_p)


def min_p_sampling_from_probs(
    probs: Any, min_p: Any, *, seed: Any, offset: Any = 0, indices: Any = None
) -> Any:
    """Draw a token from those at least `min_p` times as likely as the most likely one.

    Parameters
    ----------
    probs : array of float32, shape (R, V)
        Probabilities, as in `sampling_from_probs`.
    min_p : float or array, shape (B,)
        Least ratio to the row's largest probability, 0..1.
    seed, offset, indices
        As in `sampling_from_probs`.

    Returns
    -------
    array of int32, shape (B,)
        Token ids.

    Raises
    ------
    UsageError, TypeError
        As `sampling_from_probs`; UsageError if a `min_p` is outside 0..1.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import min_p_sampling_from_probs
    >>> min_p_sampling_from_probs(np.array([[0.3, 0.6, 0.1]], np.float32), 0.9, seed=7)
    array([1], dtype=int32)
    """
    return _draw(probs, seed, offset, indices, min_p=min_p)


def top_k_top_p_sampling_from_probs(
    probs: Any,
    top_k: Any,
    top_p: Any,
    *,
    filter_apply_order: str = "top_k_first",
    seed: Any,
    offset: Any = 0,
    indices: Any = None,
) -> Any:
    """Draw a token that passes both filters.

    Parameters
    ----------
    probs : array of float32, shape (R, V)
        Probabilities, as in `sampling_from_probs`.
    top_k : int or array of integers, shape (B,)
        How many tokens to keep.
    top_p : float or array, shape (B,)
        Share to keep, 0..1.
    filter_apply_order : str
        ``"top_k_first"``: `top_p` is a share of what `top_k` keeps; ``"joint"``: of the whole row.
    seed, offset, indices
        As in `sampling_from_probs`.

    Returns
    -------
    array of int32, shape (B,)
        Token ids.

    Raises
    ------
    UsageError, TypeError
        As the single filters; UsageError for another `filter_apply_order`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_k_top_p_sampling_from_probs
    >>> top_k_top_p_sampling_from_probs(np.array([[0.3, 0.6, 0.1]], np.float32), 2, 0.6, seed=7)
    array([1], dtype=int32)
    """
    if filter_apply_order not in ORDERS:
        raise unknown_name("filter_apply_order", filter_apply_order, ORDERS)
    first = filter_apply_order == "top_k_first"
    return _draw(probs, seed, offset, indices, top_k=top_k, top_p=top_p, top_k_first=first)


def top_k_renorm_probs(probs: Any, top_k: Any) -> Any:
    """Keep the `top_k` most likely tokens of each row and divide them by their sum.

    Parameters
    ----------
    probs : array of float32, shape (B, V)
        Probabilities, not negative.
    top_k : int or array of integers, shape (B,)
        How many tokens to keep, at least 1; exactly so many, the lowest indices among equals.

    Returns
    -------
    array of float32, shape (B, V)
        Zeros outside the kept tokens.

    Raises
    ------
    UsageError, TypeError
        As `top_k_sampling_from_probs`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_k_renorm_probs
    >>> top_k_renorm_probs(np.array([[0.25, 0.5, 0.25]], np.float32), 2)
    array([[0.33333334, 0.6666667 , 0.        ]], dtype=float32)
    """
    return _renorm(probs, top_k, 1.0)


def top_p_renorm_probs(probs: Any, top_p: Any) -> Any:
    """Keep the fewest most likely tokens whose sum reaches `top_p` and divide them by their sum.

    Parameters
    ----------
    probs : array of float32, shape (B, V)
        Probabilities, not negative.
    top_p : float or array, shape (B,)
        Share of the row's sum to keep, 0..1.

    Returns
    -------
    array of float32, shape (B, V)
        Zeros outside the kept tokens.

    Raises
    ------
    UsageError, TypeError
        As `top_p_sampling_from_probs`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_p_renorm_probs
    >>> top_p_renorm_probs(np.array([[0.25, 0.5, 0.25]], np.float32), 0.75)
    array([[0.33333334, 0.6666667 , 0.        ]], dtype=float32)
    """
    return _renorm(probs, np.inf, top_p)


def _draw(
    probs: Any,
    seed: Any,
    offset: Any,
    indices: Any,
    *,
    top_k: Any = np.inf,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    top_k_first: bool = True,
) -> Any:
    """Check, draw, and raise if a row was not a distribution."""
    check_array("probs", probs, (None, None))
    if indices is None:
        indices = np.arange(len(probs), dtype=np.int32)
    check_array("indices", indices, (None,), np.int32)
    if len(indices) and (indices.min() < 0 or indices.max() >= len(probs)):
        bad = indices[(indices < 0) | (indices >= len(probs))][0]
        raise UsageError(f"indices must name rows 0..{len(probs) - 1} of probs, got {bad}")
    B = len(indices)
    limits = _limits(B, top_k, top_p, min_p)
    seeds, offsets = _streams(seed, offset, B)
    out = np.empty(B, np.int32)
    variant = cuda if is_cuda(probs) else cpu
    variant.sample(probs, indices, limits, top_k_first, seeds, offsets, out)
    _check_valid("probs", out, "must be finite, not negative and not all zero")
    return out


def _renorm(probs: Any, top_k: Any, top_p: Any) -> Any:
    check_array("probs", probs, (None, None))
    limits = _limits(len(probs), top_k, top_p, 0.0)
    out = np.empty(probs.shape, np.float32)
    valid = (cuda if is_cuda(probs) else cpu).renorm(probs, limits, out)
    _check_valid("probs", valid - 1, "must be finite, not negative and not all zero")
    return out


def _check_valid(name: str, out: Any, wanted: str) -> None:
    """Raise if a kernel marked a row as invalid."""
    if (out < 0).any():
        raise UsageError(f"{name}: row {int(np.flatnonzero(out < 0)[0])} {wanted}")


def _per_row(name: str, value: Any, B: int) -> Any:
    """Return one float64 per row from a number or an array of shape (B,)."""
    array = np.asarray(value, np.float64)
    if array.shape not in ((), (B,)):
        raise UsageError(f"{name} must be a number or have shape ({B},), got {array.shape}")
    return np.broadcast_to(array, B)


def _limits(B: int, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """Return the filters' parameters, float64 (3, B)."""
    limits = np.empty((3, B))
    for i, (name, value) in enumerate((("top_k", top_k), ("top_p", top_p), ("min_p", min_p))):
        limits[i] = _per_row(name, value, B)
    if not (limits[0] >= 1).all() or (np.floor(limits[0]) != limits[0]).any():
        raise UsageError(f"top_k must be an integer of at least 1, got {limits[0].min():g}")
    for i, name in ((1, "top_p"), (2, "min_p")):
        if not ((limits[i] >= 0) & (limits[i] <= 1)).all():
            wrong = limits[i][~((limits[i] >= 0) & (limits[i] <= 1))][0]
            raise UsageError(f"{name} must be 0..1, got {wrong:g}")
    return limits


def _streams(seed: Any, offset: Any, B: int) -> tuple[Any, Any]:
    """Return seed and offset of each row, uint64 (B,)."""
    columns: list[Any] = []
    for name, value in (("seed", seed), ("offset", offset)):
        array = np.asarray(value)
        if array.dtype.kind not in "iu":
            raise TypeError(
                f"{name} must be an integer of 64 bits or an array of them, got {value!r}"
            )
        if array.shape not in ((), (B,)):
            raise UsageError(f"{name} must be an integer or have shape ({B},), got {array.shape}")
        if array.size and int(array.min()) < 0:
            raise UsageError(f"{name} must not be negative, got {array.min()}")
        columns.append(np.ascontiguousarray(np.broadcast_to(array.astype(np.uint64), B)))
    if np.ndim(seed) == 0 and np.ndim(offset) == 0:
        columns[1] = columns[1] + np.arange(B, dtype=np.uint64)
    return columns[0], columns[1]
