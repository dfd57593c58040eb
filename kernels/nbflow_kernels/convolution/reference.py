"""Causal convolution in NumPy float64, as in the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


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
        inputs = np.concatenate([state[s].T, x[begin:end]])
        for t in range(end - begin):
            out[begin + t] = (inputs[t : t + len(taps)] * taps).sum(0)
        state[s] = inputs[end - begin :].T
    if bias is not None:
        out += bias
    return out / (1.0 + np.exp(-out)) if activation == "silu" else out
