"""Linear attention in NumPy float64, token by token as in the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.state_format import decode_state, encode_state, round_state
from nbflow_kernels.state_space.reference import is_rounded_before


def lightning_attention(
    q: Any,
    k: Any,
    v: Any,
    slopes: Any,
    state: Any,
    indptr: Any,
    state_indices: Any,
    *,
    scale: float | None = None,
) -> NDArray[np.float64]:
    """See `nbflow_kernels.lightning_attention`."""
    queries, keys, values = (np.asarray(a, np.float64) for a in (q, k, v))
    decay = np.exp(-np.asarray(slopes, np.float64))[:, None, None]
    y = np.zeros(queries.shape)
    for s, index in enumerate(state_indices):
        if indptr[s] == indptr[s + 1]:
            continue
        h = decode_state(state[index], q.shape[2]).astype(np.float64)  # (H, keys, values)
        for t in range(indptr[s], indptr[s + 1]):
            if is_rounded_before(t, indptr[s], indptr[s + 1]):
                h = round_state(h, state.dtype)
            h = decay * h + keys[t][:, :, None] * values[t][:, None, :]
            y[t] = (1.0 if scale is None else scale) * (queries[t][:, :, None] * h).sum(axis=1)
        state[index] = encode_state(h, state.dtype)
    return y
