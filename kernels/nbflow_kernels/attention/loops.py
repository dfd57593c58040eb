"""Online softmax of attention in plain, single-steppable loops.

A row walks over its keys in chunks and keeps the result over the keys so far: the row maximum, the
sum of exp(score - maximum), and the values weighted by exp(score - maximum).  A larger maximum in a
later chunk rescales sum and values, so scores are never stored for the whole context.  The fast
kernels (`cpu/flash_attention.py`, `cuda/*.cu`) process all heads of a group together, and merge
partial results of `plan_layout.SPLIT` keys in the same way.
"""

from __future__ import annotations

import math

import numpy as np

from nbflow_kernels.attention.plan_layout import CHUNK
from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.scalar_math import fma, tree_sum


@jit.kernel(strict=True)
def attend(q, k, v, sm_scale, causal, out):
    """Attend from queries (T, H, D), the last T rows, to keys and values (S, H_kv, D)."""
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        n_keys = k.shape[0] - q.shape[0] + t + 1 if causal else k.shape[0]
        for h in range(q.shape[1]):
            one = q[t, h] * np.float32(sm_scale)
            _attend_one(one, k[:n_keys, h // group], v[:n_keys, h // group], out[t, h])


@jit.device_function(strict=True)
def _attend_one(q, k, v, out):
    """Attend from one query vector, chunk by chunk."""
    row_max, row_sum = np.float32(-1e30), np.float32(0.0)
    out[:] = 0.0
    scores = np.zeros(CHUNK, np.float32)
    for first in range(0, len(k), CHUNK):
        last = min(first + CHUNK, len(k))
        before = row_max
        for j in range(first, last):
            scores[j - first] = _dot(q, k[j])
            row_max = max(row_max, scores[j - first])
        rescale = np.float32(math.exp(before - row_max))
        row_sum *= rescale
        out *= rescale
        for j in range(first, last):
            weight = np.float32(math.exp(scores[j - first] - row_max))
            row_sum += weight
            for d in range(len(out)):
                out[d] = fma(weight, v[j, d], out[d])
    out *= np.float32(1.0) / row_sum if row_sum > 0.0 else np.float32(0.0)


@jit.device_function(strict=True)
def _dot(a, b):
    """Return the dot product as a tree of 16 partial sums."""
    lanes = np.zeros(16, np.float32)
    for d in range(len(a)):
        lanes[d % 16] = fma(a[d], b[d], lanes[d % 16])
    return tree_sum(lanes)
