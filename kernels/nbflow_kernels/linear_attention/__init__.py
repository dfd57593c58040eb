"""Linear attention with a decay per head, over ragged batches with a pool of states.

Batches, states and what the bits depend on are as in `nbflow_kernels.state_space`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import (
    check_array,
    check_sequences,
    check_together,
    is_cuda,
    output,
    overlap,
)
from nbflow_kernels.errors import UsageError
from nbflow_kernels.linear_attention import cpu, cuda
from nbflow_kernels.state_format import check_state
from nbflow_kernels.state_space.decays import check_log_decays

__all__ = ["lightning_attention"]


def lightning_attention(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    slopes: NDArray[np.float32],
    state: NDArray[Any],
    indptr: NDArray[np.int32],
    state_indices: NDArray[np.int32],
    *,
    scale: float | None = None,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Run linear attention whose states decay by a constant factor per token.

    .. math::
        h_t = e^{-s} h_{t-1} + k_t v_t^\top, \qquad y_t = \mathrm{scale} \; h_t^\top q_t

    for each head, with its slope s.  The new token is not decayed.

    Parameters
    ----------
    q, k, v : array of float32, shape (T, H, D)
        Queries, keys and values of all tokens, after their activation.  Rows may be strided (a
        slice of columns of a wider matrix).  A NumPy array runs on the CPU; an array on a CUDA
        device runs there.
    slopes : array of float32, shape (H,)
        Decay of each head, positive or 0.
    state : array of float32, float16, uint16 or uint8, shape (S, H, D, D)
        Pool of states, keys by values, updated in place: float32, float16, bfloat16 or rows of
        q8_0, see `nbflow_kernels.state_format`.
    indptr : array of int32, shape (B + 1,)
        First row of each sequence, and T.
    state_indices : array of int32, shape (B,)
        Row of `state` of each sequence; those of sequences with tokens differ.
    scale : float, optional
        Factor of the result; 1 unless given: queries are not scaled.
    out : array of float32, shape (T, H, D), optional
        Output array; it must not overlap q, k or v.

    Returns
    -------
    array of float32, shape (T, H, D)
        `out` if given, else a new array on the device of `q`.

    Raises
    ------
    UsageError
        If a shape does not fit, `indptr` does not divide the T rows, indices are outside the pool
        or repeated, a slope is negative, or `out` overlaps an input.
    TypeError
        If an array has another dtype.

    Notes
    -----
    MiniMax-Text-01 uses it, with slopes ``2**(-8 (h + 1) / H) * (1 - l / (L - 1) + 1e-5)`` for head
    h and layer l of L.

    References
    ----------
    .. [1] Z. Qin et al., "Lightning Attention-2: A Free Lunch for Handling Unlimited Sequence
       Lengths in Large Language Models", arXiv:2401.04658.
    .. [2] MiniMax, "MiniMax-01: Scaling Foundation Models with Lightning Attention",
       arXiv:2501.08313, section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import lightning_attention
    >>> ones, slopes = np.ones((2, 1, 1), np.float32), np.log(np.full(1, 2, np.float32))
    >>> state = np.zeros((1, 1, 1, 1), np.float32)
    >>> indptr, indices = np.array([0, 2], np.int32), np.zeros(1, np.int32)
    >>> lightning_attention(ones, ones, ones, slopes, state, indptr, indices).ravel()
    array([1. , 1.5], dtype=float32)
    """
    check_array("q", q, (None, None, None), rows=True)
    T, H, D = q.shape
    for name, array in (("k", k), ("v", v)):
        check_array(name, array, (T, H, D), rows=True)
    check_array("slopes", slopes, (H,))
    check_state(state, (None, H, D, D))
    check_together(
        q=q, k=k, v=v, slopes=slopes, state=state, indptr=indptr, state_indices=state_indices
    )
    check_sequences(indptr, state_indices, T, state.shape[0])
    check_log_decays("slopes", slopes, -1)
    given, out = out, output(q, (T, H, D), out, rows=True)
    if given is not None and any(overlap(array, out) for array in (q, k, v)):
        raise UsageError("out must not overlap q, k or v; pass another array")
    if q.size:
        factor = 1.0 if scale is None else float(scale)
        (cuda if is_cuda(q) else cpu).lightning_attention(
            q, k, v, slopes, state, indptr, state_indices, factor, out
        )
    return out
