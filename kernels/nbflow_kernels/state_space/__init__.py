"""State-space layers: the scans of Mamba-1 and Mamba-2 over ragged batches, with a pool of states.

A batch is the tokens of B sequences one after the other, `indptr` (B + 1) their first rows.
Sequence s continues the state ``state[state_indices[s]]``, which is updated in place; a sequence
without tokens leaves it as it is.  A new sequence starts from zeros: clear its state before.

The result of a sequence does not depend on the others in the batch, nor on the number of threads.
Mamba-1 is computed step by step: a prompt has the same bits in one call and cut into pieces.
Mamba-2 on the CPU computes prompts in chunks of 32 tokens, counted from the first token that the
call has of a sequence, and the tokens that remain step by step.  So a prompt cut at multiples of 32
has the bits of the whole prompt; cut elsewhere, its results are rounded differently, within the
tolerance of the op's cases.  Pieces of fewer than 32 tokens (decoding, verified drafts) have the
bits of single steps.  On CUDA devices both go step by step.

States in another format than float32 are rounded after each chunk and each step, on every device:
at the same positions however a prompt is cut, as long as chunks stay chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_sequences, check_together, is_cuda, output
from nbflow_kernels.errors import UsageError
from nbflow_kernels.state_format import check_state
from nbflow_kernels.state_space import cpu, cuda
from nbflow_kernels.state_space.decays import check_log_decays

__all__ = ["mamba1_scan", "mamba2_scan"]


def mamba2_scan(
    x: NDArray[np.float32],
    dt: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    state: NDArray[Any],
    indptr: NDArray[np.int32],
    state_indices: NDArray[np.int32],
    *,
    d: NDArray[np.float32] | None = None,
    dt_bias: NDArray[np.float32] | None = None,
    dt_softplus: bool = True,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Run the state-space recurrence of Mamba-2 (SSD) over the tokens of sequences.

    .. math::
        h_t = e^{a \Delta_t} h_{t-1} + \Delta_t \, x_t b_t^\top, \qquad
        y_t = h_t c_t + d \, x_t, \qquad
        \Delta_t = \operatorname{clip}(\operatorname{softplus}(\mathrm{dt}_t + \mathrm{dt\_bias}))

    for each head, whose state h has P values by N numbers.

    Parameters
    ----------
    x : array of float32, shape (T, H, P)
        Values of all tokens.  Rows may be strided (a slice of columns of a wider matrix), here and
        in `dt`, `b`, `c` and `out`.  A NumPy array runs on the CPU; an array on a CUDA device runs
        there.
    dt : array of float32, shape (T, H)
        Time steps before bias, softplus and limits.
    a : array of float32, shape (H,)
        Decay rates, negative: ``-exp(A_log)`` of a checkpoint.
    b, c : array of float32, shape (T, G, N)
        Input and output vectors; each of the G groups is shared by H / G heads in a row.
    state : array of float32, float16, uint16 or uint8, shape (S, H, P, N)
        Pool of states, updated in place: float32, float16, bfloat16 or rows of q8_0, see
        `nbflow_kernels.state_format`.
    indptr : array of int32, shape (B + 1,)
        First row of each sequence, and T.
    state_indices : array of int32, shape (B,)
        Row of `state` of each sequence; those of sequences with tokens differ.
    d : array of float32, shape (H,), optional
        Weight of the skip connection; none is 0.
    dt_bias : array of float32, shape (H,), optional
        Added to `dt`.
    dt_softplus : bool
        Apply softplus to the time steps.
    dt_limits : (float, float)
        Least and greatest time step, ``time_step_limit`` of a configuration.  The models' own code
        applies it to prompts, and not when it decodes.
    out : array of float32, shape (T, H, P), optional
        Output array.  It may be `x` itself; it must not overlap `b` or `c`.

    Returns
    -------
    array of float32, shape (T, H, P)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If a shape does not fit, G does not divide H, `indptr` does not divide the T rows, indices
        are outside the pool or repeated, `a` is positive, or the limits are not in order.
    TypeError
        If an array has another dtype.

    See Also
    --------
    nbflow_kernels.state_space.reference.mamba2_scan : The NumPy form the variants are tested with.
    nbflow_kernels.gated_rmsnorm : What follows it in most models.

    Notes
    -----
    Mamba-2, Nemotron-H, Granite 4, Falcon-H1, Bamba and Zamba2 use it.  See the family's page for
    what the bits depend on.

    References
    ----------
    .. [1] T. Dao and A. Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms
       Through Structured State Space Duality", arXiv:2405.21060, sections 6 and 7.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import mamba2_scan
    >>> x, ones = np.ones((2, 1, 1), np.float32), np.ones((2, 1, 1), np.float32)
    >>> dt, a = np.ones((2, 1), np.float32), -np.log(np.full(1, 2, np.float32))
    >>> state = np.zeros((1, 1, 1, 1), np.float32)
    >>> indptr, indices = np.array([0, 2], np.int32), np.zeros(1, np.int32)
    >>> mamba2_scan(x, dt, a, ones, ones, state, indptr, indices, dt_softplus=False).ravel()
    array([1. , 1.5], dtype=float32)
    >>> state.ravel()
    array([1.5], dtype=float32)
    """
    check_array("x", x, (None, None, None), rows=True)
    T, H, P = x.shape
    check_array("b", b, (T, None, None), rows=True)
    G, N = b.shape[1:]
    if G < 1 or H % G:
        raise UsageError(f"b must have a number of groups that divides the {H} heads, got {G}")
    check_array("c", c, (T, G, N), rows=True)
    check_array("dt", dt, (T, H), rows=True)
    check_state(state, (None, H, P, N))
    for name, vector in (("a", a), ("d", d), ("dt_bias", dt_bias)):
        if vector is not None:
            check_array(name, vector, (H,))
    check_together(
        x=x, dt=dt, a=a, b=b, c=c, state=state, d=d, dt_bias=dt_bias, indptr=indptr,
        state_indices=state_indices,
    )  # fmt: skip
    check_sequences(indptr, state_indices, T, state.shape[0])
    check_log_decays("a", a, 1)
    limits = _limits(dt_limits)
    out = output(x, x.shape, out, rows=True)
    if x.size:
        (cuda if is_cuda(x) else cpu).mamba2_scan(
            x, dt, a, b, c, state, indptr, state_indices, d, dt_bias, bool(dt_softplus), limits, out
        )
    return out


def mamba1_scan(
    x: NDArray[np.float32],
    dt: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    state: NDArray[Any],
    indptr: NDArray[np.int32],
    state_indices: NDArray[np.int32],
    *,
    d: NDArray[np.float32] | None = None,
    dt_bias: NDArray[np.float32] | None = None,
    dt_softplus: bool = True,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Run the selective scan of Mamba-1 over the tokens of sequences.

    .. math::
        h_{tn} = e^{a_n \Delta_t} h_{t-1,n} + \Delta_t \, x_t b_{tn}, \qquad
        y_t = \sum_n h_{tn} c_{tn} + d \, x_t, \qquad
        \Delta_t = \operatorname{softplus}(\mathrm{dt}_t + \mathrm{dt\_bias})

    for each channel, whose state h has N numbers.

    Parameters
    ----------
    x, dt : array of float32, shape (T, C)
        Values and time steps (before bias and softplus) of all tokens and channels.  Rows may be
        strided, as in `mamba2_scan`.
    a : array of float32, shape (C, N)
        Decay rates, negative: ``-exp(A_log)`` of a checkpoint.
    b, c : array of float32, shape (T, N)
        Input and output vectors, shared by all channels.
    state : array of float32, float16, uint16 or uint8, shape (S, C, N)
        Pool of states, updated in place, as in `mamba2_scan`.
    indptr, state_indices
        As in `mamba2_scan`.
    d, dt_bias : array of float32, shape (C,), optional
        Weight of the skip connection, and what is added to `dt`; none is 0.
    dt_softplus : bool
        Apply softplus to the time steps.
    out : array of float32, shape (T, C), optional
        Output array.  It may be `x` itself; it must not overlap `b`, `c` or `dt`.

    Returns
    -------
    array of float32, shape (T, C)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If a shape does not fit, `indptr` does not divide the T rows, or indices are outside the
        pool or repeated.
    TypeError
        If an array has another dtype.

    See Also
    --------
    nbflow_kernels.mamba2_scan : One decay per head, for larger states.

    Notes
    -----
    Mamba, FalconMamba and Jamba use it.

    References
    ----------
    .. [1] A. Gu and T. Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
       arXiv:2312.00752, algorithm 2; b is discretized by Euler's rule, as in the authors' code.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import mamba1_scan
    >>> ones, a = np.ones((2, 1), np.float32), -np.log(np.full((1, 1), 2, np.float32))
    >>> state = np.zeros((1, 1, 1), np.float32)
    >>> indptr, indices = np.array([0, 2], np.int32), np.zeros(1, np.int32)
    >>> mamba1_scan(ones, ones, a, ones, ones, state, indptr, indices, dt_softplus=False).ravel()
    array([1. , 1.5], dtype=float32)
    """
    check_array("x", x, (None, None), rows=True)
    T, C = x.shape
    check_array("dt", dt, (T, C), rows=True)
    check_array("b", b, (T, None), rows=True)
    N = b.shape[1]
    check_array("c", c, (T, N), rows=True)
    check_array("a", a, (C, N))
    check_state(state, (None, C, N))
    for name, vector in (("d", d), ("dt_bias", dt_bias)):
        if vector is not None:
            check_array(name, vector, (C,))
    check_together(
        x=x, dt=dt, a=a, b=b, c=c, state=state, d=d, dt_bias=dt_bias, indptr=indptr,
        state_indices=state_indices,
    )  # fmt: skip
    check_sequences(indptr, state_indices, T, state.shape[0])
    out = output(x, x.shape, out, rows=True)
    if x.size:
        (cuda if is_cuda(x) else cpu).mamba1_scan(
            x, dt, a, b, c, state, indptr, state_indices, d, dt_bias, bool(dt_softplus), out
        )
    return out


def _limits(dt_limits: tuple[float, float]) -> tuple[float, float]:
    low, high = (float(v) for v in dt_limits)
    if not low <= high:
        raise UsageError(f"dt_limits must be (least, greatest), got {dt_limits}")
    return low, high
