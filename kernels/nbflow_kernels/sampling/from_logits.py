"""Softmax, argmax, top-k, masks and sampling from logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_rows, empty, is_cuda, output, per_row, temperatures
from nbflow_kernels.errors import UsageError
from nbflow_kernels.sampling import cpu, cuda
from nbflow_kernels.sampling.argument_checks import (
    NOT_LOGITS,
    check_tie_break,
    check_valid,
    counts_per_row,
    limits_of,
    rows_of,
    streams,
)
from nbflow_kernels.sampling.from_probs import check_order


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
        Rows of sum 1.  A row with a NaN or +inf, or with only -inf, becomes NaN.

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
    check_rows("logits", logits)
    scale = temperatures(temperature, len(logits))
    out = output(logits, logits.shape, out)
    (cuda if is_cuda(logits) else cpu).softmax(logits, scale, out)
    return out


def argmax(logits: Any) -> Any:
    """Return the index of the largest element of each row, the lowest one among equals.

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
    check_rows("logits", logits)
    out = empty(logits, (len(logits),), np.int32)
    (cuda if is_cuda(logits) else cpu).argmax(logits, out)
    check_valid("logits", out, "must not have a NaN")
    return out


def sampling_from_logits(
    logits: Any, indices: Any = None, *, temperature: Any = None, seed: Any = None, offset: Any = 0
) -> Any:
    """Draw a token from the softmax of each row of logits.

    Parameters
    ----------
    logits : array of float32, shape (R, V)
        Scores; -inf excludes a token.
    temperature : float or array, shape (B,), optional
        Logits are divided by it first; positive.
    seed, offset, indices
        As in `sampling_from_probs`.

    Returns
    -------
    array of int32, shape (B,)
        Token ids.

    Raises
    ------
    UsageError
        If a row has a NaN or +inf or only -inf, or a number is out of range.
    TypeError
        If `logits` is not an array of float32, or a seed is not an integer.

    Notes
    -----
    Uses the random number and the cumulative sums of ``sampling_from_probs(softmax(logits))``,
    without the division by the row's sum and its rounding.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import sampling_from_logits
    >>> sampling_from_logits(np.array([[-np.inf, 2.0, -np.inf]], np.float32), seed=1)
    array([1], dtype=int32)
    """
    return _draw(logits, temperature, seed, offset, indices, True)


def top_k_top_p_sampling_from_logits(
    logits: Any,
    top_k: Any,
    top_p: Any,
    indices: Any = None,
    *,
    filter_apply_order: str = "top_k_first",
    temperature: Any = None,
    seed: Any = None,
    offset: Any = 0,
) -> Any:
    """Draw a token from the softmax of each row of logits after top-k and top-p.

    Parameters
    ----------
    logits, temperature, seed, offset, indices
        As in `sampling_from_logits`; so are the result and the errors.
    top_k, top_p, filter_apply_order
        As in `top_k_top_p_sampling_from_probs`.

    Notes
    -----
    With ``"top_k_first"`` only the kept logits go through exp: the row is read once.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_k_top_p_sampling_from_logits
    >>> logits = np.log(np.array([[0.3, 0.6, 0.1]], np.float32))
    >>> top_k_top_p_sampling_from_logits(logits, 2, 0.6, seed=7)
    array([1], dtype=int32)
    """
    first = check_order(filter_apply_order)
    return _draw(logits, temperature, seed, offset, indices, first, top_k=top_k, top_p=top_p)


def top_k(
    input: Any, k: int, sorted: bool = True, deterministic: bool = False, tie_break: int = 0
) -> tuple[Any, Any]:
    """Return the `k` largest elements of each row and their indices.

    Parameters
    ----------
    input : array of float32, shape (B, V)
        Rows without NaN.
    k : int
        Number of elements, 1..V.
    sorted : bool
        Sort by value, the largest first; otherwise by index.
    deterministic : bool
        Results are deterministic, with False as well.
    tie_break : {0, 1, 2}
        The lowest index (0, 1) or the highest (2, in host memory only) wins among equals.  Those
        that are selected come in the order of their indices.

    Returns
    -------
    values : array of float32, shape (B, k)
        The elements.
    indices : array of int32, shape (B, k)
        Their indices; int64 for tensors of PyTorch.

    Raises
    ------
    UsageError
        If `k` or `tie_break` is out of range, a row has a NaN, or `tie_break` is 2 on a device.
    TypeError
        If `input` is not an array of float32, `k` not an integer or `deterministic` not a bool.

    Notes
    -----
    One pass over the row, without sorting it, for k up to V / 128.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_k
    >>> top_k(np.array([[1, 3, 2, 3]], np.float32), 3)
    (array([[3., 3., 2.]], dtype=float32), array([[1, 3, 2]], dtype=int32))
    """
    check_rows("input", input)
    if not isinstance(k, int | np.integer) or isinstance(k, bool):
        raise TypeError(f"k must be an integer, got {k!r}")
    if not 1 <= k <= input.shape[1]:
        raise UsageError(f"k must be 1..{input.shape[1]}, the number of columns, got {k}")
    if not isinstance(deterministic, bool | np.bool_):
        raise TypeError(f"deterministic must be a bool, got {deterministic!r}")
    shape = (len(input), int(k))
    values, indices = empty(input, shape), empty(input, shape, np.int32)
    if check_tie_break(tie_break):
        return _top_k_from_the_end(input, bool(sorted), values, indices)
    variant = cuda if is_cuda(input) else cpu
    variant.top_k(input, int(k), bool(sorted), values, indices)
    check_valid("input", indices[:, 0], "must not have a NaN")
    return values, indices


def _top_k_from_the_end(x: Any, in_order: bool, values: Any, indices: Any) -> tuple[Any, Any]:
    """Select the highest indices among equals: the lowest of the reversed rows."""
    if is_cuda(x):
        raise UsageError(
            "tie_break=2 is for arrays in host memory; on a CUDA device take 0 or 1, or "
            "top_k_ragged_transform, which has all three"
        )
    cpu.top_k(np.ascontiguousarray(x[:, ::-1]), values.shape[1], False, values, indices)
    check_valid("input", indices[:, 0], "must not have a NaN")
    values, indices = values[:, ::-1].copy(), x.shape[1] - 1 - indices[:, ::-1]
    if not in_order:
        return values, indices
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(values, order, 1), np.take_along_axis(indices, order, 1)


def top_k_mask_logits(logits: Any, top_k: Any, *, out: Any = None) -> Any:
    """Keep the `top_k` largest logits of each row and set the others to -inf.

    Parameters
    ----------
    logits : array of float32, shape (B, V)
        Rows without NaN.
    top_k : int or array of integers, shape (B,)
        Number of logits to keep, at least 1; exact, the lowest indices among equals.  V or more
        keeps all.
    out : array of float32, shape (B, V), optional
        Where to write the result; it may be `logits` itself.

    Returns
    -------
    array of float32, shape (B, V)
        `out` if given, else a new array.

    Raises
    ------
    UsageError
        If a row has a NaN, a `top_k` is below 1, or `out` has another shape.
    TypeError
        If `logits` is not an array of float32.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_k_mask_logits
    >>> top_k_mask_logits(np.array([[1, 3, 2, 3]], np.float32), 2)
    array([[-inf,   3., -inf,   3.]], dtype=float32)
    """
    check_rows("logits", logits)
    B, V = logits.shape
    counts = np.minimum(counts_per_row("top_k", top_k, B), V).astype(np.int64)
    out, valid = output(logits, logits.shape, out), empty(logits, (B,), np.int32)
    (cuda if is_cuda(logits) else cpu).top_k_mask(logits, counts, out, valid)
    check_valid("logits", valid, "must not have a NaN", 1)
    return out


def top_n_sigma_mask_logits(logits: Any, n: Any, *, out: Any = None) -> Any:
    r"""Set the logits more than `n` standard deviations below the largest one to -inf.

    .. math:: l_j \ge \max_i l_i - n \, \sigma

    Parameters
    ----------
    logits : array of float32, shape (B, V)
        Rows without NaN or +inf; elements of -inf do not count in the deviation.
    n : float or array, shape (B,)
        Number of deviations, not negative; 0 disables the filter, as in llama.cpp.
    out
        As in `top_k_mask_logits`; so are the result and the errors.

    References
    ----------
    .. [1] C. Tang et al., "Top-n-sigma: Not All Logits Are You Need", arXiv:2411.07641.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_n_sigma_mask_logits
    >>> top_n_sigma_mask_logits(np.array([[0, 1, 4, 5]], np.float32), 1.0)
    array([[-inf, -inf,   4.,   5.]], dtype=float32)
    """
    check_rows("logits", logits)
    numbers = np.array(per_row("n", n, len(logits)))
    if not (numbers >= 0).all():
        raise UsageError(f"n must not be negative, got {numbers.min():g}")
    out, valid = output(logits, logits.shape, out), empty(logits, (len(logits),), np.int32)
    (cuda if is_cuda(logits) else cpu).n_sigma_mask(logits, numbers, out, valid)
    check_valid("logits", valid, "must not have a NaN or +inf", 1)
    return out


def _draw(logits, temperature, seed, offset, indices, top_k_first, **filters):
    """Draw a token from each row; raise if a row has a NaN, +inf or only -inf."""
    check_rows("logits", logits)
    rows = rows_of(indices, len(logits), "logits")
    B = len(rows)
    scale = temperatures(temperature, B)
    limits = limits_of(B, **filters)
    seeds, offsets = streams(seed, offset, B)
    out = empty(logits, (B,), np.int32)
    variant = cuda if is_cuda(logits) else cpu
    variant.sample_logits(logits, rows, scale, limits, top_k_first, seeds, offsets, out)
    check_valid("logits", out, NOT_LOGITS)
    return out
