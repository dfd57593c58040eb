"""State-space layers in NumPy float64, token by token as in the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.state_format import decode_state, encode_state, round_state

CHUNK = 32
"""Tokens of the chunked form of Mamba-2, after which the state is rounded."""


def is_rounded_before(t: int, begin: int, end: int) -> bool:
    """Return whether a state with chunks is rounded between two tokens of a call."""
    whole = end - (end - begin) % CHUNK
    return t > begin and (t >= whole or (t - begin) % CHUNK == 0)


def _time_step(dt: Any, bias: Any, softplus: bool, limits: tuple[float, float]) -> NDArray[Any]:
    """Return the time steps of raw ones."""
    v = np.asarray(dt, np.float64) + (0.0 if bias is None else np.asarray(bias, np.float64))
    return np.clip(np.logaddexp(0.0, v) if softplus else v, *limits)


def mamba2_scan(
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    state: Any,
    indptr: Any,
    state_indices: Any,
    *,
    d: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = True,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> NDArray[np.float64]:
    """See `nbflow_kernels.mamba2_scan`."""
    rows = np.asarray(x, np.float64)
    _, H, _ = rows.shape
    steps = _time_step(dt, dt_bias, dt_softplus, dt_limits)
    per_head = H // b.shape[1]
    y = np.zeros(rows.shape) if d is None else np.asarray(d, np.float64)[:, None] * rows
    for s, index in enumerate(state_indices):
        if indptr[s] == indptr[s + 1]:
            continue
        h = decode_state(state[index], b.shape[2]).astype(np.float64)  # (H, P, N)
        for t in range(indptr[s], indptr[s + 1]):
            if is_rounded_before(t, indptr[s], indptr[s + 1]):
                h = round_state(h, state.dtype)
            keys, queries = (np.repeat(v[t], per_head, axis=0)[:, None] for v in (b, c))
            decay = np.exp(np.asarray(a, np.float64) * steps[t])[:, None, None]
            h = decay * h + (steps[t][:, None] * rows[t])[:, :, None] * keys
            y[t] += (h * queries).sum(axis=2)
        state[index] = encode_state(h, state.dtype)
    return y


def mamba1_scan(
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    state: Any,
    indptr: Any,
    state_indices: Any,
    *,
    d: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = True,
) -> NDArray[np.float64]:
    """See `nbflow_kernels.mamba1_scan`."""
    rows = np.asarray(x, np.float64)
    steps = _time_step(dt, dt_bias, dt_softplus, (-np.inf, np.inf))
    y = np.zeros(rows.shape) if d is None else np.asarray(d, np.float64) * rows
    for s, index in enumerate(state_indices):
        if indptr[s] == indptr[s + 1]:
            continue
        h = decode_state(state[index], b.shape[1]).astype(np.float64)  # (C, N)
        for t in range(indptr[s], indptr[s + 1]):
            if t > indptr[s]:
                h = round_state(h, state.dtype)
            h = np.exp(steps[t][:, None] * a) * h + (steps[t] * rows[t])[:, None] * b[t]
            y[t] += (h * c[t]).sum(axis=1)
        state[index] = encode_state(h, state.dtype)
    return y
