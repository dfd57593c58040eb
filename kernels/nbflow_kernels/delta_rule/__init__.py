"""Gated delta rule: linear attention whose state is corrected by each key and value.

Gated DeltaNet (Qwen3-Next) has one decay per head and token, Kimi Delta Attention (Kimi Linear)
one for each channel of the key.
"""

from __future__ import annotations

import math
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
from nbflow_kernels.delta_rule import cpu, cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.state_format import check_state

__all__ = ["gated_delta_rule"]


def gated_delta_rule(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    g: NDArray[np.float32],
    beta: NDArray[np.float32],
    state: NDArray[Any],
    indptr: NDArray[np.int32],
    state_indices: NDArray[np.int32],
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    start_positions: NDArray[np.int32] | None = None,
    chunked: bool = True,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Decay each head's state, correct it towards the token's value, and multiply it by the query.

    .. math::
        S &\leftarrow \operatorname{diag}(e^{g_t}) \, S \\
        S &\leftarrow S + k_t \, \bigl( \beta_t \, (v_t - S^\top k_t) \bigr)^\top \\
        o_t &= S^\top q_t \cdot \mathrm{scale}

    Parameters
    ----------
    q, k : array of float32, shape (T, Hk, Dk)
        Queries and keys of all sequences, one sequence after the other.  Tokens may be strided (a
        slice of columns of a wider matrix), here and below.  NumPy arrays run on the CPU; arrays
        on a CUDA device run there.
    v : array of float32, shape (T, Hv, Dv)
        Values; Hv is a multiple of Hk.  Head h uses the query and key of head ``h // (Hv // Hk)``.
    g : array of float32, shape (T, Hv) or (T, Hv, Dk)
        Logarithm of the decay, at most 0: one for the state of a head, or one for each of its Dk
        rows.
    beta : array of float32, shape (T, Hv)
        Share of the correction, 0 to 1 (2 with negative eigenvalues).
    state : array of float32, float16, uint16 or uint8, shape (N, Hv, Dk, Dv)
        State of each sequence, updated in place; zeros for a sequence that begins.  uint16 holds
        the bits of bfloat16, uint8 the rows of q8_0, ``Dv + 2 * ceil(Dv / 32)`` bytes each (see
        `nbflow_kernels.state_format`).  The arithmetic is float32.
    indptr : array of int32, shape (B + 1,)
        Sequence b has tokens ``indptr[b]`` to ``indptr[b + 1]``, maybe none: then its state stays.
    state_indices : array of int32, shape (B,)
        Row of `state` of each sequence.  Two sequences with tokens must not share one.
    scale : float, optional
        Factor of the queries; ``1 / sqrt(Dk)`` by default.
    normalize_qk : bool
        Divide each query and key by its length first, ``sqrt(sum of squares + 1e-6)``.
    start_positions : array of int32, shape (B,), optional
        Position of each sequence's first token of this call in the sequence; 0 by default.
        See the notes.
    chunked : bool
        Use the chunked form on the CPU where it applies; see the notes.
    out : array of float32, shape (T, Hv, Dv), optional
        Output array; it must not overlap an input.

    Returns
    -------
    array of float32, shape (T, Hv, Dv)
        `out` if given, else a new array on the device of `q`.

    Raises
    ------
    UsageError
        If shapes do not fit, Hv is not a multiple of Hk, `out` overlaps an input, or in host
        memory `indptr` is not rising from 0 to T, or `state_indices` are not different rows of
        `state`, or a start position is negative.
    TypeError
        If an array has another dtype.

    See Also
    --------
    nbflow_kernels.delta_rule.reference.gated_delta_rule : The NumPy form the variants are tested
        against.

    Notes
    -----
    On the CPU, 8 tokens whose first position is a multiple of 8 and that are all in this call go
    through the chunked form (WY representation), which adds in another order than the steps that
    other tokens take: its bits differ within the tolerance.  So a sequence's bits depend

    - never on other sequences of the batch, heads or threads;
    - on its division into calls only where a call begins or ends within such 8 tokens.  A prompt
      in pieces that end at multiples of 8 has the bits of one call;
    - not at all with ``chunked=False``.

    A state in another format than float32 is rounded after each 8 tokens of the chunked form and
    after each other token: at the same positions for every division that leaves the bits alone.

    On a device all tokens are steps, with the roundings of the chunked form; `indptr`,
    `state_indices` and `start_positions` are not checked there, and a sequence with an index
    outside `state` gives NaN.

    References
    ----------
    .. [1] S. Yang, J. Kautz and A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta
       Rule", arXiv:2412.06464, equation 10; the chunked form is in section 3.3.
    .. [2] Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture",
       arXiv:2510.26692, equation 1 (a decay for each channel).

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gated_delta_rule
    >>> k, v = np.ones((2, 1, 1), np.float32), np.array([[[8.0]], [[4.0]]], np.float32)
    >>> no_decay, half = np.zeros((2, 1), np.float32), np.full((2, 1), 0.5, np.float32)
    >>> state, one = np.zeros((1, 1, 1, 1), np.float32), np.array([0], np.int32)
    >>> gated_delta_rule(k, k, v, no_decay, half, state, np.array([0, 2], np.int32), one).ravel()
    array([4., 4.], dtype=float32)
    >>> state.ravel()
    array([4.], dtype=float32)
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    check_together(
        **arrays, state=state, indptr=indptr, state_indices=state_indices,
        start_positions=start_positions, out=out,
    )  # fmt: skip
    _check_shapes(q, k, v, g, beta, state)
    check_sequences(indptr, state_indices, len(q), len(state))
    _check_positions(start_positions, len(state_indices))
    out = output(v, v.shape, out, rows=True)
    for name, array in arrays.items():
        if overlap(array, out):
            raise UsageError(f"out must not overlap {name}; pass another array")
    variant: Any = cuda if is_cuda(q) else cpu
    factor = 1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    variant.gated_delta_rule(
        q, k, v, g, beta, state, indptr, state_indices, start_positions, factor,
        bool(normalize_qk), bool(chunked), out,
    )  # fmt: skip
    return out


def _check_shapes(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> None:
    """Raise unless the shapes and dtypes of the inputs and the state are those of one layer."""
    check_array("q", q, (None, None, None), rows=True)
    T, Hk, Dk = q.shape
    check_array("k", k, (T, Hk, Dk), rows=True)
    check_array("v", v, (T, None, None), rows=True)
    Hv, Dv = v.shape[1:]
    if min(Hk, Dk, Hv, Dv) == 0 or Hv % Hk:
        raise UsageError(
            "q must have shape (T, Hk, Dk) and v (T, Hv, Dv) with Hv a multiple of Hk and all "
            f"above 0, got {q.shape} and {v.shape}"
        )
    check_array("g", g, (T, Hv, Dk) if getattr(g, "ndim", 2) == 3 else (T, Hv), rows=True)
    check_array("beta", beta, (T, Hv), rows=True)
    check_state(state, (None, Hv, Dk, Dv))


def _check_positions(start_positions: Any, B: int) -> None:
    """Raise unless the start positions are None or one for each sequence, not negative."""
    if start_positions is None:
        return
    check_array("start_positions", start_positions, (B,), np.int32)
    if not is_cuda(start_positions) and B and start_positions.min() < 0:
        raise UsageError(f"start_positions must not be negative, got {start_positions.min()}")
