"""Absolute position embeddings: sinusoidal and learned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_range, is_cuda, output
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.position import cpu, cuda

FORMS = ("fairseq", "paper")


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
    r"""Return the sinusoidal embedding of positions, in one of two published forms.

    With :math:`p' = p + \mathrm{offset}` and h = dim // 2, the angles of column pair c < h are

    .. math:: \text{fairseq: } p' \, b^{-c / (h - 1)} \qquad \text{paper: } p' \, b^{-2c / dim}

    Parameters
    ----------
    positions : array of int32, shape (T,)
        Position of each row; ``np.arange(n, dtype=np.int32)`` gives a table.
    dim : int
        Number of columns, at least 4 for fairseq.
    form : {"fairseq", "paper"}
        ``fairseq``: the form of tensor2tensor, fairseq and M2M-100 (Inferflow: "sinusoidal");
        ``paper``: the form of "Attention is all you need" (Inferflow: "sinusoidal2").
    interleave : bool, optional
        False: sines in columns [0, h), cosines in [h, 2 * h), an odd last column is 0; default of
        fairseq, and Inferflow's layout of both forms.  True: sines in even columns, cosines in odd
        ones; default of paper.
    base : float
        b.
    offset : int
        Added to the positions: padding_idx + 1 in models that count from there (2 in M2M-100).
    padding_idx : int, optional
        Position, including the offset, with an all-zero embedding.
    out : array of float32, shape (T, dim), optional
        Output array.

    Returns
    -------
    array of float32, shape (T, dim)
        `out` if given, else a new array on the device of `positions`; angles are float64.

    Raises
    ------
    UsageError, TypeError
        If the form is unknown, or a size does not fit, or if an array has another dtype.

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
    out = output(positions, (len(positions), dim), out)
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
    r"""Add learned position embeddings to rows.

    .. math:: y_{te} = x_{te} + \mathrm{table}[p_t + \mathrm{offset}, e]

    Parameters
    ----------
    x : array of float32, shape (T, E)
        Token embeddings.
    positions : array of int32, shape (T,)
        Position of each row.
    table : array of float32, float16 or uint16, shape (P, E)
        Learned table; uint16 holds bits of bfloat16.
    offset : int
        Added to the positions: 2 in OPT and BART, padding_idx + 1 in RoBERTa, 0 in GPT-2 and BERT.
    out : array of float32, shape (T, E), optional
        Output array; may be `x`.

    Returns
    -------
    array of float32, shape (T, E)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError, TypeError
        If a shape does not fit or a position is outside the table, or if an array has another
        dtype.

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
    if not is_cuda(positions):
        wanted = f"positions plus offset {offset} must be rows {{}} of the table"
        check_range(wanted, positions + offset, len(table))
    out = output(x, x.shape, out)
    variant = cuda if is_cuda(x) else cpu
    variant.add_learned_positions(x, positions, table, int(offset), out)
    return out
