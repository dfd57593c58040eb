"""Filters that renormalize: they zero the other probabilities and divide by the sum."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, empty, is_cuda, on_host, output
from nbflow_kernels.sampling import cpu, cpu_typical_tail_free, cuda
from nbflow_kernels.sampling.argument_checks import (
    NOT_PROBS,
    check_valid,
    fractions_per_row,
    limits_of,
    rows_of,
    streams,
)


def top_k_renorm_probs(probs: Any, top_k: Any, *, out: Any = None) -> Any:
    """Keep the `top_k` most likely tokens of each row and divide them by their sum.

    Parameters
    ----------
    probs : array of float32, shape (B, V)
        Probabilities, not negative; a row need not sum to 1.
    top_k : int or array of integers, shape (B,)
        Number of tokens to keep, at least 1; exact, the lowest indices among equals.
    out : array of float32, shape (B, V), optional
        Where to write the result; it may be `probs` itself.

    Returns
    -------
    array of float32, shape (B, V)
        Zeros outside the kept tokens; `out` if given.

    Raises
    ------
    UsageError, TypeError
        As `sampling_from_probs`; UsageError if a number is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_k_renorm_probs
    >>> top_k_renorm_probs(np.array([[0.25, 0.5, 0.25]], np.float32), 2)
    array([[0.33333334, 0.6666667 , 0.        ]], dtype=float32)
    """
    return _renorm(probs, out, top_k=top_k)


def top_p_renorm_probs(probs: Any, top_p: Any, *, out: Any = None) -> Any:
    """Keep the fewest most likely tokens whose sum reaches `top_p` and divide them by their sum.

    Parameters
    ----------
    probs, out
        As in `top_k_renorm_probs`; so are the result and the errors.
    top_p : float or array, shape (B,)
        Share of the row's sum to keep, 0..1.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_p_renorm_probs
    >>> top_p_renorm_probs(np.array([[0.25, 0.5, 0.25]], np.float32), 0.75)
    array([[0.33333334, 0.6666667 , 0.        ]], dtype=float32)
    """
    return _renorm(probs, out, top_p=top_p)


def min_p_renorm_probs(probs: Any, min_p: Any, *, out: Any = None) -> Any:
    """Keep the tokens at least `min_p` times as likely as the best and divide them by their sum.

    Parameters
    ----------
    probs, out
        As in `top_k_renorm_probs`; so are the result and the errors.
    min_p : float or array, shape (B,)
        Least ratio to the row's largest probability, 0..1.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import min_p_renorm_probs
    >>> min_p_renorm_probs(np.array([[0.25, 0.5, 0.25]], np.float32), 0.6)
    array([[0., 1., 0.]], dtype=float32)
    """
    return _renorm(probs, out, min_p=min_p)


def typical_renorm_probs(probs: Any, typical_p: Any, *, out: Any = None) -> Any:
    """Keep the locally typical tokens of each row and divide them by their sum.

    Parameters
    ----------
    probs, out
        As in `top_k_renorm_probs`; so are the result and the errors.
    typical_p : float or array, shape (B,)
        Share of the row's sum to keep, 0..1; see `typical_sampling_from_probs`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import typical_renorm_probs
    >>> typical_renorm_probs(np.array([[0.4, 0.2, 0.2, 0.2]], np.float32), 0.5)
    array([[0.        , 0.33333334, 0.33333334, 0.33333334]], dtype=float32)
    """
    return _renorm(probs, out, typical_ranks(probs), typical_p=typical_p)


def tail_free_renorm_probs(
    probs: Any, z: Any, *, first_counts: bool = True, out: Any = None
) -> Any:
    """Keep the tokens before the flat tail of each row and divide them by their sum.

    Parameters
    ----------
    probs, out
        As in `top_k_renorm_probs`; so are the result and the errors.
    z : float or array, shape (B,)
        Share of the second differences to keep, 0..1; see `tail_free_sampling_from_probs`.
    first_counts : bool
        Count the first second difference; see `tail_free_sampling_from_probs`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import tail_free_renorm_probs
    >>> probs = np.array([[0.02, 0.5, 0.02, 0.4, 0.06]], np.float32)
    >>> tail_free_renorm_probs(probs, 0.95).round(3)
    array([[0.   , 0.556, 0.   , 0.444, 0.   ]], dtype=float32)
    """
    check_array("probs", probs, (None, None))
    counts = tail_free_counts(probs, rows_of(None, len(probs), "probs"), z, first_counts)
    return _renorm(probs, out, top_k=counts)


def xtc_renorm_probs(
    probs: Any,
    probability: Any,
    threshold: Any,
    *,
    seed: Any = None,
    offset: Any = 0,
    out: Any = None,
) -> Any:
    """Exclude top choices (XTC): with some probability, drop all likely tokens but the last one.

    Parameters
    ----------
    probs, out
        As in `top_k_renorm_probs`; so are the result and the errors.
    probability : float or array, shape (B,)
        Probability of dropping tokens, 0..1; otherwise the row is only divided by its sum.
    threshold : float or array, shape (B,)
        Smallest probability of a likely token, 0..1; the least likely of these stays, the highest
        index among equals.  Above 0.5 at most one token is likely, and none is dropped.
    seed, offset
        As in `sampling_from_probs`; draw the token at another offset.

    References
    ----------
    .. [1] P. E. Weidmann, "Exclude Top Choices (XTC)", text-generation-webui pull request
       6335, 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import xtc_renorm_probs
    >>> probs = np.array([[0.4, 0.3, 0.2, 0.1]], np.float32)
    >>> xtc_renorm_probs(probs, 1.0, 0.29, seed=0).round(2)
    array([[0.  , 0.5 , 0.33, 0.17]], dtype=float32)
    """
    check_array("probs", probs, (None, None))
    B = len(probs)
    columns = (("probability", probability), ("threshold", threshold))
    parameters = np.stack([fractions_per_row(*column, B) for column in columns], axis=1)
    seeds, offsets = streams(seed, offset, B)
    out, valid = output(probs, probs.shape, out), empty(probs, (B,), np.int32)
    (cuda if is_cuda(probs) else cpu).xtc(probs, parameters, seeds, offsets, out, valid)
    check_valid("probs", valid, NOT_PROBS, 1)
    return out


def typical_ranks(probs: Any) -> Any:
    """Return ranks float32 (R, V), the largest for the most typical tokens."""
    check_array("probs", probs, (None, None))
    ranks = empty(probs, probs.shape)
    variant: Any = cuda if is_cuda(probs) else cpu_typical_tail_free
    variant.typical_ranks(probs, ranks)
    return ranks


def tail_free_counts(probs: Any, rows: Any, z: Any, first_counts: bool) -> Any:
    """Return the number of tokens that the tail-free filter keeps in each of `rows`, float64."""
    shares = np.array(fractions_per_row("z", z, len(rows)))
    counts = empty(probs, (len(rows),), np.float64)
    variant: Any = cuda if is_cuda(probs) else cpu_typical_tail_free
    variant.tail_free_counts(probs, rows, shares, 0 if first_counts else 1, counts)
    return on_host(counts)  # filters are checked on the host


def _renorm(probs, out, ranks=None, **filters):
    """Filter and renormalize rows; for `filters` see `limits_of`."""
    check_array("probs", probs, (None, None))
    limits = limits_of(len(probs), **filters)
    out, valid = output(probs, probs.shape, out), empty(probs, (len(probs),), np.int32)
    variant = cuda if is_cuda(probs) else cpu
    variant.renorm(probs if ranks is None else ranks, probs, limits, out, valid)
    check_valid("probs", valid, NOT_PROBS, 1)
    return out
