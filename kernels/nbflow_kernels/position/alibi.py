"""Attention with linear biases (ALiBi): slopes of heads, and the bias matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, is_cuda, output
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import cpu, cuda


def alibi_slopes(n_heads: int) -> NDArray[np.float32]:
    r"""Return the ALiBi slope of each head.

    .. math:: m_h = 2^{-8 (h + 1) / n}, \quad h < n; \qquad
        m_h = 2^{-4 (2 (h - n) + 1) / n}, \quad n \le h < H

    with n the largest power of two up to H.

    Parameters
    ----------
    n_heads : int
        H, positive.

    Returns
    -------
    array of float32, shape (H,)
        Positive slopes.

    Raises
    ------
    UsageError
        If `n_heads` is not positive.

    References
    ----------
    .. [1] O. Press, N. Smith and M. Lewis, "Train Short, Test Long", arXiv:2108.12409, section 3;
       for H not a power of two, as in the authors' code, with every other slope of the next
       power of two appended.

    Examples
    --------
    >>> from nbflow_kernels import alibi_slopes
    >>> alibi_slopes(6)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625, 0.5       ,
           0.125     ], dtype=float32)
    """
    if n_heads < 1:
        raise UsageError(f"n_heads must be positive, got {n_heads}")
    n = 1 << (int(n_heads).bit_length() - 1)
    exponents = [8.0 * (h + 1) / n for h in range(n)]
    exponents += [4.0 * (2 * h + 1) / n for h in range(n_heads - n)]
    slopes: NDArray[np.float32] = np.exp2(-np.array(exponents)).astype(np.float32)
    return slopes


def alibi_bias(
    slopes: NDArray[np.float32],
    n_queries: int,
    n_keys: int,
    *,
    symmetric: bool = False,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Return the ALiBi bias of the scores.

    .. math:: b_{hij} = m_h \, (j - i'), \qquad i' = i + n_\mathrm{keys} - n_\mathrm{queries}

    Parameters
    ----------
    slopes : array of float32, shape (H,)
        Slope of each head; see `alibi_slopes`.
    n_queries, n_keys : int
        Tq and Tk.  The queries are the last of the sequence: query i is at key i'.
    symmetric : bool
        Use ``-|j - i'|``, for encoders; otherwise keys after the query get positive biases, which
        a causal mask removes.
    out : array of float32, shape (H, Tq, Tk), optional
        Output array.

    Returns
    -------
    array of float32, shape (H, Tq, Tk)
        `out` if given, else a new array on the device of `slopes`.  Models that add ``m_h * j``
        differ by a constant per row, to which softmax is invariant.

    Raises
    ------
    UsageError, TypeError
        If a shape does not fit or a length is negative, or if an array is not float32.

    Examples
    --------
    >>> from nbflow_kernels import alibi_bias, alibi_slopes
    >>> alibi_bias(alibi_slopes(1) * 256, 2, 3)
    array([[[-1.,  0.,  1.],
            [-2., -1.,  0.]]], dtype=float32)
    """
    check_array("slopes", slopes, (None,))
    out = bias_output(slopes, len(slopes), n_queries, n_keys, out)
    variant = cuda if is_cuda(slopes) else cpu
    variant.alibi_bias(slopes, bool(symmetric), out)
    return out


def bias_output(like: Any, H: int, n_queries: int, n_keys: int, out: Any) -> Any:
    """Return the checked `out`, or a new array (H, Tq, Tk)."""
    if n_queries < 0 or n_keys < 0:
        raise UsageError(f"n_queries and n_keys must not be negative, got {n_queries} and {n_keys}")
    return output(like, (H, n_queries, n_keys), out)
