"""Attention with the online softmax as plain loops, for reading.

A row goes through its keys in chunks, and knows after each the result over the keys so far: the
greatest score, the sum of exp(score - greatest), and the values weighted with that.  A greater
score in a later chunk shrinks what there is by one factor.  So no row of scores as long as the
context is ever stored.  The kernels do this for all heads that share keys at once, and join partial
results of `layout.SPLIT` keys in the same way.
"""

from __future__ import annotations

import math

import numpy as np

from nbflow_kernels.attention.plan_layout import CHUNK
from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.scalar_math import fma, tree_sum


@jit.kernel(strict=True)
def attend(q, k, v, sm_scale, causal, out):
    """Attend with queries (T, H, D) to keys and values (S, H_kv, D), the last rows aligned."""
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        n_keys = k.shape[0] - q.shape[0] + t + 1 if causal else k.shape[0]
        for h in range(q.shape[1]):
            one = q[t, h] * np.float32(sm_scale)
            _attend_one(one, k[:n_keys, h // group], v[:n_keys, h // group], out[t, h])


@jit.kernel(strict=True)
def _attend_one(q, k, v, out):
    """Attend with one query vector, chunk by chunk."""
    top, total = np.float32(-1e30), np.float32(0.0)
    out[:] = 0.0
    scores = np.zeros(CHUNK, np.float32)
    for first in range(0, len(k), CHUNK):
        last = min(first + CHUNK, len(k))
        before = top
        for j in range(first, last):
            scores[j - first] = _dot(q, k[j])
            top = max(top, scores[j - first])
        shrink = np.float32(math.exp(before - top))
        total *= shrink
        out *= shrink
        for j in range(first, last):
            weight = np.float32(math.exp(scores[j - first] - top))
            total += weight
            for d in range(len(out)):
                out[d] = fma(weight, v[j, d], out[d])
    out *= np.float32(1.0) / total if total > 0.0 else np.float32(0.0)


@jit.kernel(strict=True)
def _dot(a, b):
    """Return the dot product: 16 partial sums, added as a tree."""
    lanes = np.zeros(16, np.float32)
    for d in range(len(a)):
        lanes[d % 16] = fma(a[d], b[d], lanes[d % 16])
    return tree_sum(lanes)
