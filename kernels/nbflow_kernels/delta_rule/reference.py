"""The gated delta rule in NumPy float64, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.state_format import decode_state, encode_state, round_state

CHUNK = 8
"""Tokens of the chunked form, after which the state is rounded."""


def gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    indptr: Any,
    state_indices: Any,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    start_positions: Any = None,
    chunked: bool = True,
) -> NDArray[np.float64]:
    """See `nbflow_kernels.gated_delta_rule`; its forms differ by the state's roundings."""
    q, k, v, g, beta = (np.asarray(a, np.float64) for a in (q, k, v, g, beta))
    if normalize_qk:
        q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    q = q * (q.shape[2] ** -0.5 if scale is None else scale)
    heads = v.shape[1] // q.shape[1]
    q, k = q.repeat(heads, 1), k.repeat(heads, 1)  # (T, Hv, Dk)
    decay = np.exp(g if g.ndim == 3 else g[..., None])
    out = np.zeros(v.shape)
    for b, s in enumerate(state_indices):
        if indptr[b] == indptr[b + 1]:
            continue
        begin, end = indptr[b], indptr[b + 1]
        position = 0 if start_positions is None else start_positions[b]
        S = decode_state(state[s], v.shape[2]).astype(np.float64)
        for t in range(begin, end):
            first = t - (position + t - begin) % CHUNK
            is_chunk = chunked and first >= begin and first + CHUNK <= end
            if t > begin and (t == first or not is_chunk):
                S = round_state(S, state.dtype)
            S *= decay[t][..., None]
            u = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", S, k[t]))
            S += k[t][..., None] * u[:, None]
            out[t] = np.einsum("hkv,hk->hv", S, q[t])
        state[s] = encode_state(S, state.dtype)
    return out
