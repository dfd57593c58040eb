"""Sampling from probabilities, with exact filters."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, empty, is_cuda, on_device, on_host, per_row
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.sampling import cpu, cuda
from nbflow_kernels.sampling.argument_checks import (
    NOT_PROBS,
    check_valid,
    limits_of,
    rows_of,
    streams,
)
from nbflow_kernels.sampling.renorm import tail_free_counts, typical_ranks

ORDERS = ("top_k_first", "joint")


def check_order(order: str) -> bool:
    """Return whether `top_k` is applied before `top_p`."""
    if order not in ORDERS:
        raise unknown_name("filter_apply_order", order, ORDERS)
    return order == "top_k_first"


def sampling_from_probs(
    probs: Any, indices: Any = None, *, seed: Any = None, offset: Any = 0
) -> Any:
    """Draw a token from each row of probabilities.

    Parameters
    ----------
    probs : array of float32, shape (R, V)
        Probabilities, not negative; a row need not sum to 1.
    indices : array of int32, shape (B,), optional
        The row of `probs` for each draw; by default row i for draw i.
    seed : int or array of integers, shape (B,), optional
        Key of the random stream, 64 bits; by default the operating system's random number, so that
        every call draws others.
    offset : int or array of integers, shape (B,)
        Counter in the stream, 64 bits.  If both are single numbers, row i draws at ``offset + i``,
        so that rows differ; add B before the next call.

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
    probs: Any, top_k: Any, indices: Any = None, *, seed: Any = None, offset: Any = 0
) -> Any:
    """Draw a token from the `top_k` most likely ones of each row.

    Parameters
    ----------
    probs, seed, offset, indices
        As in `sampling_from_probs`; so are the result and the errors.
    top_k : int or array of integers, shape (B,)
        Number of tokens to keep, at least 1; V or more keeps all.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_k_sampling_from_probs
    >>> top_k_sampling_from_probs(np.array([[0.3, 0.4, 0.3]], np.float32), 1, seed=7)
    array([1], dtype=int32)
    """
    return _draw(probs, seed, offset, indices, top_k=top_k)


def top_p_sampling_from_probs(
    probs: Any, top_p: Any, indices: Any = None, *, seed: Any = None, offset: Any = 0
) -> Any:
    """Draw a token from the fewest most likely ones whose sum reaches `top_p`.

    Parameters
    ----------
    probs, seed, offset, indices
        As in `sampling_from_probs`; so are the result and the errors.
    top_p : float or array, shape (B,)
        Share of the row's sum to keep, 0..1; the token that crosses it is kept.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_p_sampling_from_probs
    >>> top_p_sampling_from_probs(np.array([[0.3, 0.6, 0.1]], np.float32), 0.5, seed=7)
    array([1], dtype=int32)
    """
    return _draw(probs, seed, offset, indices, top_p=top_p)


def min_p_sampling_from_probs(
    probs: Any, min_p: Any, indices: Any = None, *, seed: Any = None, offset: Any = 0
) -> Any:
    """Draw a token from those at least `min_p` times as likely as the most likely one.

    Parameters
    ----------
    probs, seed, offset, indices
        As in `sampling_from_probs`; so are the result and the errors.
    min_p : float or array, shape (B,)
        Least ratio to the row's largest probability, 0..1.

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
    indices: Any = None,
    *,
    filter_apply_order: str = "top_k_first",
    seed: Any = None,
    offset: Any = 0,
) -> Any:
    """Draw a token that passes both filters.

    Parameters
    ----------
    probs, seed, offset, indices
        As in `sampling_from_probs`; so are the result and the errors.
    top_k, top_p
        As in `top_k_sampling_from_probs` and `top_p_sampling_from_probs`.
    filter_apply_order : str
        ``"top_k_first"``: `top_p` is a share of what `top_k` keeps; ``"joint"``: of the whole row.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import top_k_top_p_sampling_from_probs
    >>> top_k_top_p_sampling_from_probs(np.array([[0.3, 0.6, 0.1]], np.float32), 2, 0.6, seed=7)
    array([1], dtype=int32)
    """
    first = check_order(filter_apply_order)
    return _draw(probs, seed, offset, indices, top_k_first=first, top_k=top_k, top_p=top_p)


def typical_sampling_from_probs(
    probs: Any, typical_p: Any, indices: Any = None, *, seed: Any = None, offset: Any = 0
) -> Any:
    r"""Draw a token from the locally typical ones of each row.

    Tokens are kept in ascending order of :math:`|H + \ln p|`, the distance of their surprise from
    the entropy H of the row, until their sum reaches `typical_p`.

    Parameters
    ----------
    probs, seed, offset, indices
        As in `sampling_from_probs`; so are the result and the errors.
    typical_p : float or array, shape (B,)
        Share of the row's sum to keep, 0..1; the token that crosses it is kept.  1 keeps all.

    Notes
    -----
    Among tokens of equal distance the lowest index comes first.  Tokens of probability 0 are never
    kept unless `typical_p` is 1.

    References
    ----------
    .. [1] C. Meister et al., "Locally Typical Sampling", TACL 2023, arXiv:2202.00666, equation 10.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import typical_sampling_from_probs
    >>> typical_sampling_from_probs(np.array([[0.4, 0.2, 0.2, 0.2]], np.float32), 0.1, seed=7)
    array([1], dtype=int32)
    """
    return _draw(probs, seed, offset, indices, ranks=typical_ranks(probs), typical_p=typical_p)


def tail_free_sampling_from_probs(
    probs: Any,
    z: Any,
    indices: Any = None,
    *,
    first_counts: bool = True,
    seed: Any = None,
    offset: Any = 0,
) -> Any:
    r"""Draw a token from those before the flat tail of each row.

    With the row in descending order, the weight of index i is
    :math:`d_i = |p_i - 2 p_{i+1} + p_{i+2}|`, divided by the sum of all of them.  The tokens before
    the first i >= 1 with :math:`\sum_{j \le i} d_j > z` are kept.

    Parameters
    ----------
    probs, seed, offset, indices
        As in `sampling_from_probs`; so are the result and the errors.
    z : float or array, shape (B,)
        Share of the second differences to keep, 0..1; 1 keeps all.
    first_counts : bool
        False leaves :math:`d_0` out of the sum that is compared with z, as Inferflow does;
        llama.cpp counts it.

    Notes
    -----
    This filter sorts the whole row.  A row of fewer than three tokens is kept; if the second
    differences of the normalised row sum to 1e-6 or less, each has the weight 1 / V.

    References
    ----------
    .. [1] L. Phénix and T. Lucas, "Tail Free Sampling", 2019.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import tail_free_sampling_from_probs
    >>> probs = np.array([[0.02, 0.9, 0.02, 0.06]], np.float32)
    >>> tail_free_sampling_from_probs(probs, 0.5, seed=7)
    array([1], dtype=int32)
    """
    check_array("probs", probs, (None, None))
    rows = rows_of(indices, len(probs), "probs")
    counts = tail_free_counts(probs, rows, z, first_counts)
    return _draw(probs, seed, offset, indices, top_k=counts)


def mirostat_sampling_from_probs(
    probs: Any,
    mu: Any,
    indices: Any = None,
    *,
    tau: Any = 5.0,
    eta: Any = 0.1,
    seed: Any = None,
    offset: Any = 0,
) -> tuple[Any, Any]:
    r"""Draw a token by Mirostat 2.0, which controls the surprise of the text.

    Tokens of surprise :math:`-\log_2 p \le \mu` are kept (at least the most likely one), one is
    drawn, and the cut becomes :math:`\mu' = \mu - \eta (-\log_2 q - \tau)` with q the token's share
    of the kept mass.

    Parameters
    ----------
    probs, seed, offset, indices
        As in `sampling_from_probs`; so are the errors.
    mu : float or array, shape (B,)
        The cut in bits; ``2 * tau`` before the first token, then the second result of the last
        call.
    tau : float or array, shape (B,)
        Target surprise in bits.
    eta : float or array, shape (B,)
        Learning rate of the cut; `mu`, `tau` and `eta` must be finite.

    Returns
    -------
    tokens : array of int32, shape (B,)
        Token ids.
    mu : array of float64, shape (B,)
        The cut for the next token.

    References
    ----------
    .. [1] S. Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls
       Perplexity", ICLR 2021, arXiv:2007.14966, algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sampling import mirostat_sampling_from_probs
    >>> mirostat_sampling_from_probs(np.array([[0.3, 0.6, 0.1]], np.float32), 1.0, tau=2.0, seed=7)
    (array([1], dtype=int32), array([1.2]))
    """
    B = len(probs) if indices is None else len(indices)
    cut, target, rate = (per_row(*pair, B) for pair in (("mu", mu), ("tau", tau), ("eta", eta)))
    if not np.isfinite(np.stack([cut, target, rate])).all():
        raise UsageError("mu, tau and eta must be finite")
    floor = np.exp2(-np.clip(cut, -1.0, 1000.0))  # a floor above 1 keeps the most likely one
    tokens, shares = _draw_with_shares(probs, seed, offset, indices, floor=floor)
    new = cut - rate * (-np.log2(on_host(shares)) - target)
    return tokens, on_device(new, probs) if is_cuda(probs) else new


def _draw(probs, seed, offset, indices, **filters):
    """Return the tokens of `_draw_with_shares`."""
    return _draw_with_shares(probs, seed, offset, indices, **filters)[0]


def _draw_with_shares(probs, seed, offset, indices, top_k_first=True, ranks=None, **filters):
    """Return the tokens and their shares of the kept mass; for `filters` see `limits_of`."""
    check_array("probs", probs, (None, None))
    rows = rows_of(indices, len(probs), "probs")
    B = len(rows)
    limits = limits_of(B, **filters)
    seeds, offsets = streams(seed, offset, B)
    out, shares = empty(probs, (B,), np.int32), empty(probs, (B,), np.float64)
    variant = cuda if is_cuda(probs) else cpu
    ranks = probs if ranks is None else ranks
    variant.sample(ranks, probs, rows, limits, top_k_first, seeds, offsets, out, shares)
    check_valid("probs", out, NOT_PROBS)
    return out, shares
