"""The chunked form of `cpu` for one head, as plain loops in the order of its steps, for reading."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def chunk(
    q: Any, k: Any, v: Any, decay: Any, beta: Any, state: NDArray[Any]
) -> NDArray[np.float64]:
    """Compute n tokens of a head; update its state (Dk, Dv) and return their outputs (n, Dv).

    `q`, times the scale, `k` and `decay`, exp(g), have shape (n, Dk), `v` (n, Dv), `beta` (n,).
    """
    n, Dk = k.shape
    lower, upper = np.zeros((n, n)), np.zeros((n, n))
    keys = np.array(k)  # row s becomes k_s times the decays after s
    c = np.ones(Dk)  # product of the decays up to token t
    from_k, from_q = np.zeros(v.shape), np.zeros(v.shape)
    for t in range(n):
        c *= decay[t]
        for s in range(t):
            keys[s] *= decay[t]
            lower[t, s] = k[t] @ keys[s]
            upper[t, s] = q[t] @ keys[s]
        upper[t, t] = q[t] @ k[t]
        from_k[t] = (c * k[t]) @ state
        from_q[t] = (c * q[t]) @ state
    out, x = np.zeros(v.shape), np.zeros(v.shape)  # u_t is beta_t x_t
    for t in range(n):  # a triangular system, by substitution
        x[t] = v[t] - from_k[t]
        for s in range(t):
            x[t] -= lower[t, s] * beta[s] * x[s]
    for t in range(n):
        out[t] = from_q[t]
        for s in range(t + 1):
            out[t] += upper[t, s] * beta[s] * x[s]
    for i in range(Dk):
        state[i] *= c[i]
        for s in range(n):
            state[i] += keys[s, i] * beta[s] * x[s]
    return out
