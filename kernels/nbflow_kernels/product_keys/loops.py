"""The ops as plain loops, for reading: every pair of keys is looked at."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit


@jit.kernel(strict=True)
def product_key_routing(scores, first, n_experts, weights, ids):
    """Choose experts by `scores` (T, 2 K); write `weights` and `ids` (T, top_k)."""
    n_keys = scores.shape[1] // 2
    for t in range(len(scores)):
        taken = np.zeros(n_keys * n_keys, np.bool_)
        total = 0.0
        for r in range(weights.shape[1]):
            best, largest = 0, np.float32(-np.inf)
            for expert in range(n_keys * n_keys):
                i, j = expert // n_keys, expert % n_keys
                score = scores[t, i] + scores[t, n_keys + j]
                if not taken[expert] and score > largest:
                    best, largest = expert, score
            taken[best] = True
            own = best - first
            ids[t, r] = own if 0 <= own < n_experts else -1
            weights[t, r] = largest
        highest = np.float64(weights[t, 0])
        for r in range(weights.shape[1]):
            total += np.exp(np.float64(weights[t, r]) - highest)
        for r in range(weights.shape[1]):
            weights[t, r] = np.float32(np.exp(np.float64(weights[t, r]) - highest) / total)


@jit.kernel(strict=True)
def gathered_dot(x, table, ids, out):
    """Multiply rows of `x` (T, E) with rows `ids` (T, R) of `table`."""
    for t in range(ids.shape[0]):
        for r in range(ids.shape[1]):
            total, row = 0.0, ids[t, r]
            if 0 <= row < len(table):
                for e in range(x.shape[1]):
                    total += np.float64(x[t, e]) * np.float64(table[row, e])
            out[t, r] = np.float32(total)
