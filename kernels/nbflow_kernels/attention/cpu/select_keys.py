"""Index scores of a row's keys and the largest of them, a row at a time."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of, read_f32
from nbflow_kernels.cpu.simd_row_end import load_up_to
from nbflow_kernels.sampling.cpu_radix_select import kth_largest


def select_top_keys(
    q, weights, k_cache, batch_indices, positions, kv_indices, kv_indptr, out
):  # fmt: skip
    """See `nbflow_kernels.select_top_keys`."""
    T, H, D = q.shape
    hold(q, weights, k_cache)
    parallel_for(
        _select, T, float(q.size * len(kv_indices) * k_cache.shape[1]),
        address_of(q), q.strides[0], address_of(weights), weights.strides[0], H, D,
        address_of(k_cache), k_cache.strides[0], k_cache.strides[1], k_cache.shape[1],
        batch_indices, positions, kv_indices, kv_indptr, out,
    )  # fmt: skip


@jit.device_function
def _score(q, weights, H, D, key):
    """Return the index score of a key."""
    total = np.float32(0.0)
    for h in range(H):
        products = simd.splat(0.0)
        for d in range(0, D, 16):
            query = load_up_to(q + 4 * (h * D + d), D - d)
            products = simd.fma(query, load_up_to(key + 4 * d, D - d), products)
        total += max(simd.sum(products), np.float32(0.0)) * read_f32(weights + 4 * h)
    return total


@jit.kernel
def _select(
    q, q_row_bytes, weights, weight_row_bytes, H, D, keys, page_bytes, key_bytes, page_size,
    batch_indices, positions, kv_indices, kv_indptr, out, start, stop
):  # fmt: skip
    top_k = out.shape[1]
    for t in range(start, stop):
        n = np.int64(positions[t]) + 1
        if n <= top_k:
            for j in range(top_k):
                out[t, j] = j if j < n else -1
            continue
        scores, work = np.empty(n, np.float32), np.empty(n, np.float32)
        first = kv_indptr[batch_indices[t]]
        for s in range(n):
            page = np.int64(kv_indices[first + s // page_size])
            key = keys + page * page_bytes + s % page_size * key_bytes
            scores[s] = _score(q + t * q_row_bytes, weights + t * weight_row_bytes, H, D, key)
        least, ties, j = kth_largest(scores, top_k, work), top_k, 0
        for s in range(n):
            ties -= 1 if scores[s] > least else 0
        for s in range(n):
            tied = scores[s] == least and ties > 0
            if scores[s] > least or tied:
                ties -= 1 if tied else 0
                out[t, j] = s
                j += 1
        for i in range(j, top_k):
            out[t, i] = -1
