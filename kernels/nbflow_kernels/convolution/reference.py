"""Causal convolution in NumPy float64, as in the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.state_format import decode_state, encode_state, round_state


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any,
    state: Any,
    indptr: Any,
    state_indices: Any,
    activation: str | None = None,
) -> NDArray[np.float64]:
    """See `nbflow_kernels.causal_conv1d`."""
    taps = np.asarray(weight, np.float64).T  # (K, C)
    out = np.zeros(x.shape)
    for b, s in enumerate(state_indices):
        begin, end = indptr[b], indptr[b + 1]
        if begin == end:
            continue
        before = decode_state(state[s], len(taps) - 1).T.astype(np.float64)
        kept = round_state(np.asarray(x[begin:end], np.float64), state.dtype)
        inputs = np.concatenate([before, kept])
        for t in range(end - begin):
            out[begin + t] = (inputs[t : t + len(taps) - 1] * taps[:-1]).sum(0)
            out[begin + t] += x[begin + t] * taps[-1]
        state[s] = encode_state(inputs[end - begin :].T, state.dtype)
    if bias is not None:
        out += bias
    return out / (1.0 + np.exp(-out)) if activation == "silu" else out
