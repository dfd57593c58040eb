"""Mamba-2 as plain loops, one head at a time, in the order of additions of the CPU kernels.

`steps` is the recurrence; `chunk` computes the same for all its tokens at once, see
`nbflow_kernels.state_space.cpu_chunks`.  Weights are the time steps after bias, softplus and
limits.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.scalar_math import fma, tree_sum


@jit.device_function
def _exp(v):
    """Return e**v with the bits of the kernels."""
    return simd.max(simd.exp(simd.splat(v)))


@jit.kernel(strict=True)
def steps(x, weights, log_decay, b, c, state, skip, y):
    """Run over x (T, P), b and c (T, N), and update the state (P, N)."""
    for t in range(x.shape[0]):
        decay = _exp(log_decay * weights[t])
        for p in range(x.shape[1]):
            lanes = np.zeros(16, np.float32)
            added = weights[t] * x[t, p]
            for n in range(b.shape[1]):
                state[p, n] = fma(decay, state[p, n], added * b[t, n])
                lanes[n % 16] = fma(state[p, n], c[t, n], lanes[n % 16])
            y[t, p] = fma(skip, x[t, p], tree_sum(lanes))


@jit.kernel(strict=True)
def chunk(x, weights, log_decay, b, c, state, skip, y):
    """Compute all tokens of x (T, P) from one state (P, N), which is updated at the end."""
    T, P, N = x.shape[0], x.shape[1], b.shape[1]
    high, low = np.empty(T, np.float32), np.empty(T, np.float32)
    total = 0.0
    for j in range(T):
        total += np.float64(log_decay) * np.float64(weights[j])
        high[j] = np.float32(total)
        low[j] = np.float32(total - np.float64(high[j]))
    product = np.zeros((T, T), np.float32)
    for i in range(T):
        for j in range(i + 1):
            score = np.float32(0.0)
            for n in range(N):
                score = fma(b[j, n], c[i, n], score)
            product[i, j] = _exp((high[i] - high[j]) + (low[i] - low[j])) * weights[j] * score
    whole = _exp(high[T - 1] + low[T - 1])
    for p in range(P):
        for i in range(T):
            result = np.float32(0.0)
            for n in range(N):
                result = fma(state[p, n], c[i, n], result)
            result *= _exp(high[i] + low[i])
            for j in range(i + 1):
                result = fma(x[j, p], product[i, j], result)
            y[i, p] = fma(skip, x[i, p], result)
        for n in range(N):
            state[p, n] *= whole
            for j in range(T):
                after = _exp((high[T - 1] - high[j]) + (low[T - 1] - low[j]))
                state[p, n] = fma(x[j, p] * (weights[j] * after), b[j, n], state[p, n])
