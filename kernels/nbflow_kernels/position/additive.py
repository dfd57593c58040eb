"""Positions that are added: to the embedding (sinusoidal, learned) or to the scores (ALiBi, T5)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, empty, is_cuda
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.position import cpu, cuda

FORMS = ("fairseq", "paper")


def alibi_slopes(n_heads: int) -> NDArray[np.float32]:
    r"""Return the slope of each head in attention with linear biases.

    .. math:: m_h = 2^{-8 (h + 1) / n}, \quad h < n; \qquad
        m_h = 2^{-4 (2 (h - n) + 1) / n}, \quad n \le h < H

    with n the greatest power of two that is not above H.

    Parameters
    ----------
    n_heads : int
        H, positive; any number.

    Returns
    -------
    array of float32, shape (H,)
        The slopes, positive.

    Raises
    ------
    UsageError
        If `n_heads` is not positive.

    References
    ----------
    .. [1] O. Press, N. Smith and M. Lewis, "Train Short, Test Long", arXiv:2108.12409, section 3;
       other numbers of heads than powers of two as in the authors' code: every other slope of
       the next power of two is appended.

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
    r"""Return what attention with linear biases adds to the scores.

    .. math:: b_{hij} = m_h \, (j - i'), \qquad i' = i + n_\mathrm{keys} - n_\mathrm{queries}

    Parameters
    ----------
    slopes : array of float32, shape (H,)
        Slope of each head: see `alibi_slopes`.
    n_queries, n_keys : int
        Tq and Tk.  The queries are the last of the sequence: query i stands at key i'.
    symmetric : bool
        Take ``-|j - i'|``, for an encoder; otherwise keys after the query get positive numbers,
        which a causal mask hides.
    out : array of float32, shape (H, Tq, Tk), optional
        Where to write the result.

    Returns
    -------
    array of float32, shape (H, Tq, Tk)
        `out` if given, else a new array on the device of `slopes`.  Models that add
        ``m_h * j`` instead differ by a constant in each row, which softmax does not see.

    Raises
    ------
    UsageError
        If a shape does not fit or a length is negative.
    TypeError
        If an array is not of float32.

    References
    ----------
    .. [1] O. Press, N. Smith and M. Lewis, "Train Short, Test Long", arXiv:2108.12409, section 3.

    Examples
    --------
    >>> from nbflow_kernels import alibi_bias, alibi_slopes
    >>> alibi_bias(alibi_slopes(1) * 256, 2, 3)
    array([[[-1.,  0.,  1.],
            [-2., -1.,  0.]]], dtype=float32)
    """
    check_array("slopes", slopes, (None,))
    out = _scores(slopes, len(slopes), n_queries, n_keys, out)
    variant = cuda if is_cuda(slopes) else cpu
    variant.alibi_bias(slopes, bool(symmetric), out)
    return out


def relative_position_bucket(
    relative_position: NDArray[np.int32],
    *,
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> NDArray[np.int32]:
    r"""Return the bucket of each relative position, as T5 groups them.

    A distance r below m (half of the n buckets of a direction) has a bucket of its own; longer
    ones share buckets whose limits grow geometrically up to `max_distance`:

    .. math:: b(r) = \min\left( n - 1, \; m + \left\lfloor
        \frac{\ln(r / m)}{\ln(\mathrm{max\_distance} / m)} (n - m) \right\rfloor \right)

    Parameters
    ----------
    relative_position : array of int32, any shape
        Position of the key minus position of the query.
    bidirectional : bool
        True (encoder): half of the buckets for keys before the query, half for keys after it.
        False (decoder): all buckets for keys before the query; later keys fall into bucket 0.
    num_buckets : int
        Number of buckets of both directions, at least 2 for each.
    max_distance : int
        Distance from which on all share the last bucket; above half of a direction's buckets.

    Returns
    -------
    array of int32, shape of `relative_position`
        0 <= bucket < num_buckets.

    Raises
    ------
    UsageError
        If the numbers do not leave a bucket for every distance.
    TypeError
        If `relative_position` is not an array of int32.

    References
    ----------
    .. [1] C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
       Transformer", arXiv:1910.10683, section 2.1; the formula is that of the T5 code, whose
       logarithms are float32.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import relative_position_bucket
    >>> relative_position_bucket(np.array([-1000, -20, -8, -3, 0, 3, 20], np.int32))
    array([15, 10,  8,  3,  0, 19, 26], dtype=int32)
    """
    ndim = getattr(relative_position, "ndim", 1)
    check_array("relative_position", relative_position, (None,) * ndim, np.int32)
    n = num_buckets // 2 if bidirectional else num_buckets
    if n < 2 or (bidirectional and num_buckets % 2):
        raise UsageError(
            f"num_buckets must be at least 2 for each direction and even for two, got {num_buckets}"
        )
    if not max_distance > n // 2:
        raise UsageError(f"max_distance must be above {n // 2}, got {max_distance}")
    variant = cuda if is_cuda(relative_position) else cpu
    out: NDArray[np.int32] = empty(relative_position, relative_position.shape, np.int32)
    variant.relative_position_bucket(relative_position, bidirectional, n, max_distance, out)
    return out


def relative_position_bias(
    table: NDArray[np.float32],
    n_queries: int,
    n_keys: int,
    *,
    bidirectional: bool,
    max_distance: int = 128,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Return what T5 adds to the scores: a learned number for each bucket and head.

    .. math:: b_{hij} = \mathrm{table}[\mathrm{bucket}(j - i'), h], \qquad
        i' = i + n_\mathrm{keys} - n_\mathrm{queries}

    Parameters
    ----------
    table : array of float32, shape (num_buckets, H)
        The tensor ``relative_attention_bias`` of the stack's first block.
    n_queries, n_keys : int
        Tq and Tk.  The queries are the last of the sequence: query i stands at key i'.
    bidirectional : bool
        True for an encoder, False for a decoder: see `relative_position_bucket`.
    max_distance : int
        As in `relative_position_bucket`.
    out : array of float32, shape (H, Tq, Tk), optional
        Where to write the result.

    Returns
    -------
    array of float32, shape (H, Tq, Tk)
        `out` if given, else a new array on the device of `table`.

    Raises
    ------
    UsageError
        If a shape does not fit or a length is negative.
    TypeError
        If an array is not of float32.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import relative_position_bias
    >>> table = np.arange(4, dtype=np.float32).reshape(4, 1)
    >>> relative_position_bias(table, 2, 3, bidirectional=False, max_distance=4)
    array([[[1., 0., 0.],
            [2., 1., 0.]]], dtype=float32)
    """
    check_array("table", table, (None, None))
    out = _scores(table, table.shape[1], n_queries, n_keys, out)
    # key minus query of the whole range, from the last query and first key on
    distances = np.arange(1 - n_keys, n_queries, dtype=np.int32)
    buckets = relative_position_bucket(
        distances,
        bidirectional=bidirectional,
        num_buckets=len(table),
        max_distance=max_distance,
    )
    variant = cuda if is_cuda(table) else cpu
    variant.relative_position_bias(table, buckets, out)
    return out


def sinusoidal_position_embedding(
    positions: NDArray[np.int32],
    dim: int,
    *,
    form: str = "fairseq",
    interleave: bool | None = None,
    base: float = 1e4,
    offset: int = 0,
    padding_idx: int | None = None,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Return the sinusoidal embedding of positions, in one of the two published forms.

    With :math:`p' = p + \mathrm{offset}` and h = dim // 2, the angles of column pair c < h are

    .. math:: \text{fairseq: } p' \, b^{-c / (h - 1)} \qquad \text{paper: } p' \, b^{-2c / dim}

    Parameters
    ----------
    positions : array of int32, shape (T,)
        Position of each row.  For a table of all positions pass ``np.arange(n, dtype=np.int32)``.
    dim : int
        Number of columns, at least 4 for fairseq.
    form : {"fairseq", "paper"}
        ``fairseq`` is tensor2tensor's form, which fairseq and M2M-100 use (Inferflow:
        "sinusoidal"); ``paper`` that of "Attention is all you need" (Inferflow: "sinusoidal2").
    interleave : bool, optional
        False: sines in columns [0, h), cosines in [h, 2 * h), and an odd last column is 0; the
        default for fairseq, and Inferflow's arrangement of both forms.  True: sines in the even
        columns, cosines in the odd ones, as the paper writes it; the default for it.
    base : float
        b.
    offset : int
        Added to the positions: padding_idx + 1 where a model counts from there (2 in M2M-100).
    padding_idx : int, optional
        Rows whose position, after the offset, is this one are zero.
    out : array of float32, shape (T, dim), optional
        Where to write the result.

    Returns
    -------
    array of float32, shape (T, dim)
        `out` if given, else a new array on the device of `positions`; the angles are float64.

    Raises
    ------
    UsageError
        If the form is unknown, or a size does not fit.
    TypeError
        If an array has another dtype.

    References
    ----------
    .. [1] A. Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, section 3.5.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import sinusoidal_position_embedding
    >>> positions = np.array([0, 1], np.int32)
    >>> sinusoidal_position_embedding(positions, 4, base=100.0).round(4)
    array([[0.    , 0.    , 1.    , 1.    ],
           [0.8415, 0.01  , 0.5403, 1.    ]], dtype=float32)
    >>> sinusoidal_position_embedding(positions, 4, form="paper").round(4)
    array([[0.    , 1.    , 0.    , 1.    ],
           [0.8415, 0.5403, 0.01  , 1.    ]], dtype=float32)
    """
    check_array("positions", positions, (None,), np.int32)
    if form not in FORMS:
        raise unknown_name("form", form, FORMS)
    alternate = form == "paper" if interleave is None else interleave
    half = dim // 2
    if dim < (4 if form == "fairseq" else 2) or (alternate and dim % 2):
        raise UsageError(
            f"dim must be at least 4 (fairseq) or 2 (paper), and even to interleave, got {dim}"
        )
    if not base > 0:
        raise UsageError(f"base must be positive, got {base}")
    if out is None:
        out = empty(positions, (len(positions), dim))
    else:
        check_array("out", out, (len(positions), dim))
    step = 1.0 / (half - 1) if form == "fairseq" else 2.0 / dim
    frequencies = np.exp(-math.log(base) * step * np.arange(half))
    variant = cuda if is_cuda(positions) else cpu
    variant.sinusoidal_position_embedding(
        positions, frequencies, bool(alternate), int(offset), padding_idx, out
    )
    return out


def add_learned_positions(
    x: NDArray[np.float32],
    positions: NDArray[np.int32],
    table: NDArray[Any],
    *,
    offset: int = 0,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Add a row of a learned table to each row.

    .. math:: y_{te} = x_{te} + \mathrm{table}[p_t + \mathrm{offset}, e]

    Parameters
    ----------
    x : array of float32, shape (T, E)
        Rows; the embeddings of tokens.
    positions : array of int32, shape (T,)
        Position of each row.
    table : array of float32, float16 or uint16, shape (P, E)
        The learned table; uint16 holds the bits of bfloat16.
    offset : int
        Added to the positions: 2 in OPT and BART, padding_idx + 1 in RoBERTa, 0 in GPT-2 and BERT.
    out : array of float32, shape (T, E), optional
        Where to write the result.  It may be `x` itself.

    Returns
    -------
    array of float32, shape (T, E)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If a shape does not fit or a position has no row.
    TypeError
        If an array has another dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import add_learned_positions
    >>> x, table = np.ones((2, 3), np.float32), np.arange(12, dtype=np.float16).reshape(4, 3)
    >>> add_learned_positions(x, np.array([0, 1], np.int32), table, offset=2)
    array([[ 7.,  8.,  9.],
           [10., 11., 12.]], dtype=float32)
    """
    check_array("x", x, (None, None))
    check_array("positions", positions, (len(x),), np.int32)
    check_array("table", table, (None, x.shape[1]), (np.float32, np.float16, np.uint16))
    on_host = len(x) and not is_cuda(positions)
    if on_host and (positions.min() + offset < 0 or positions.max() + offset >= len(table)):
        rows = positions + offset
        bad = rows[(rows < 0) | (rows >= len(table))][0] - offset
        raise UsageError(
            f"positions plus offset {offset} must be rows 0..{len(table) - 1} of the table, "
            f"got position {bad}"
        )
    if out is None:
        out = empty(x, x.shape)
    else:
        check_array("out", out, x.shape)
    variant = cuda if is_cuda(x) else cpu
    variant.add_learned_positions(x, positions, table, int(offset), out)
    return out


def _scores(like: Any, H: int, n_queries: int, n_keys: int, out: Any) -> Any:
    """Return `out` after its check, or a new array (H, Tq, Tk)."""
    if n_queries < 0 or n_keys < 0:
        raise UsageError(f"n_queries and n_keys must not be negative, got {n_queries} and {n_keys}")
    if out is None:
        return empty(like, (H, n_queries, n_keys))
    check_array("out", out, (H, n_queries, n_keys))
    return out
