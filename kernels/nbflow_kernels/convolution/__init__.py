"""Depthwise causal convolution of a ragged batch, with a state for each sequence.

Linear-attention and convolution layers (Mamba, Gated DeltaNet, Kimi Delta Attention, LFM2) mix each
channel with its last K - 1 inputs.  `state` keeps these inputs between calls.
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
    output_array,
)
from nbflow_kernels.convolution import cpu, cuda
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.state_format import DTYPES, Q8_0

__all__ = ["causal_conv1d"]

MAX_WIDTH = 8
"""Greatest kernel size."""
ACTIVATIONS = ("silu",)


def causal_conv1d(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    state: NDArray[Any],
    indptr: NDArray[np.int32],
    state_indices: NDArray[np.int32],
    activation: str | None = None,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Convolve each channel of each sequence with its K - 1 inputs before.

    .. math:: y_{tc} = f\left( b_c + \sum_{j=0}^{K-1} w_{cj} \, x_{t-K+1+j,\,c} \right)

    Parameters
    ----------
    x : array of float32, shape (T, C)
        Inputs of all sequences, one sequence after the other.  Rows may be strided (a slice of
        columns of a wider matrix).  A NumPy array runs on the CPU; an array on a CUDA device runs
        there.
    weight : array of float32, shape (C, K)
        Taps of each channel, that of the present input last; K is 2 to 8.  PyTorch's ``Conv1d``
        with ``groups=C`` has shape (C, 1, K): reshape it.
    bias : array of float32, shape (C,), or None
        Added to each channel.
    state : array of float32, shape (N, C, K - 1)
        The last K - 1 inputs of each sequence, the latest one last; updated in place.  Zeros for a
        sequence that begins.
    indptr : array of int32, shape (B + 1,)
        Sequence b has rows ``indptr[b]`` to ``indptr[b + 1]``; it may have fewer than K - 1 of
        them, or none: then its state stays.
    state_indices : array of int32, shape (B,)
        Row of `state` of each sequence.  Two sequences with rows must not share one.
    activation : {"silu"}, optional
        Function f; none is the identity.
    out : array of float32, shape (T, C), optional
        Output array; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (T, C)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If shapes do not fit, `activation` is unknown, `out` overlaps `x`, or in host memory
        `indptr` is not rising from 0 to T, or `state_indices` are not different rows of `state`.
    TypeError
        If an array has another dtype.

    See Also
    --------
    nbflow_kernels.convolution.reference.causal_conv1d : The NumPy form the variants are tested
        against.

    Notes
    -----
    A row is the bias plus the products from the earliest to the latest input, each a fused
    multiply-add: its bits do not depend on how a sequence is divided among calls.  On a device
    `indptr` and `state_indices` are not checked; a sequence with an index outside `state` gives
    NaN.

    References
    ----------
    .. [1] A. Gu and T. Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
       arXiv:2312.00752, section 3.4.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import causal_conv1d
    >>> x, taps = np.array([[1.0], [2.0], [3.0]], np.float32), np.array([[10.0, 1.0]], np.float32)
    >>> state, rows = np.zeros((1, 1, 1), np.float32), np.array([0, 3], np.int32)
    >>> causal_conv1d(x, taps, None, state, rows, np.array([0], np.int32)).ravel()
    array([ 1., 12., 23.], dtype=float32)
    >>> state.ravel()
    array([3.], dtype=float32)
    """
    check_together(
        x=x, weight=weight, bias=bias, state=state, indptr=indptr, state_indices=state_indices,
        out=out,
    )  # fmt: skip
    check_array("x", x, (None, None), rows=True)
    T, C = x.shape
    check_array("weight", weight, (C, None))
    K = weight.shape[1]
    if not 2 <= K <= MAX_WIDTH:
        raise UsageError(f"weight must have shape (C, K) with K 2..{MAX_WIDTH}, got {weight.shape}")
    if bias is not None:
        check_array("bias", bias, (C,))
    check_array("state", state, (None, C, K - 1), DTYPES[:Q8_0])
    check_sequences(indptr, state_indices, T, len(state))
    if activation is not None and activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)
    out = output_array(x, (T, C), out, rows=True)
    variant: Any = cuda if is_cuda(x) else cpu
    silu = activation is not None
    variant.causal_conv1d(x, weight, bias, state, indptr, state_indices, silu, out)
    return out
