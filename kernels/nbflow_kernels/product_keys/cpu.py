"""Retrieval by product keys on the CPU, token by token.

The best sums of two sorted lists are a merge: of the keys of the first half, only the best top_k
count, each with the keys of the second half in order, of which the next one is a candidate.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.cpu.simd_row_end import load_up_to


def product_key_routing(scores, first, n_experts, weights, ids):
    """See `nbflow_kernels.product_key_routing`."""
    T, top_k = weights.shape
    n_best = min(scores.shape[1] // 2, top_k)
    order = np.empty((T, 3, n_best), np.int32)  # best keys of both halves, next of the second
    work = float(T * n_best * (scores.shape[1] + top_k))
    parallel_for(_route, T, work, scores, first, n_experts, order, weights, ids)


def gathered_dot(x, table, ids, out):
    """See `nbflow_kernels.gathered_dot`."""
    hold(x, table)
    parallel_for(
        _gathered_dot, len(ids), float(ids.size * x.shape[1]),
        address_of(x), x.strides[0], address_of(table), table.shape[0], x.shape[1], ids, out,
    )  # fmt: skip


@jit.device_function
def _sort_best(values, order):
    """Write the indices of the largest values in order, the lowest first among equals."""
    last = -1
    for r in range(len(order)):
        best = -1
        for i in range(len(values)):
            v = values[i]
            if last >= 0 and not (v < values[last] or (v == values[last] and i > last)):
                continue  # chosen before
            if best < 0 or v > values[best]:
                best = i
        last = max(best, 0)  # a NaN is chosen again
        order[r] = last


@jit.kernel
def _route(scores, first, n_experts, order, weights, ids, start, stop):
    """Choose experts for rows [start, stop)."""
    n_keys, n_best, top_k = scores.shape[1] // 2, order.shape[2], weights.shape[1]
    for t in range(start, stop):
        rows, other, following = order[t, 0], order[t, 1], order[t, 2]
        _sort_best(scores[t, :n_keys], rows)
        _sort_best(scores[t, n_keys:], other)
        following[:] = 0
        for r in range(top_k):
            best, expert, largest = -1, 0, np.float32(-np.inf)
            for a in range(n_best):
                b = following[a]
                if b == n_best:
                    continue
                score = scores[t, rows[a]] + scores[t, n_keys + other[b]]
                found = rows[a] * n_keys + other[b]
                if best < 0 or score > largest or (score == largest and found < expert):
                    best, expert, largest = a, found, score
                if b == 0:
                    break  # the keys behind have no larger sums
            following[best] += 1
            own = expert - first
            ids[t, r] = own if 0 <= own < n_experts else -1
            weights[t, r] = largest
        highest, total = np.float64(weights[t, 0]), 0.0
        for r in range(top_k):
            total += np.exp(np.float64(weights[t, r]) - highest)
        for r in range(top_k):
            weights[t, r] = np.float32(np.exp(np.float64(weights[t, r]) - highest) / total)


@jit.kernel
def _gathered_dot(x, x_bytes, table, n_rows, E, ids, out, start, stop):
    """Compute rows [start, stop)."""
    for t in range(start, stop):
        at = x + t * x_bytes
        for r in range(ids.shape[1]):
            row = ids[t, r]
            if row < 0 or row >= n_rows:
                out[t, r] = np.float32(0.0)
                continue
            w = table + 4 * np.int64(row) * E
            a0 = a1 = simd.splat(0.0)
            for e in range(0, E, 32):
                a0 = simd.fma(load_up_to(at + 4 * e, E - e), load_up_to(w + 4 * e, E - e), a0)
                left = E - e - 16
                a1 = simd.fma(
                    load_up_to(at + 4 * e + 64, left), load_up_to(w + 4 * e + 64, left), a1
                )
            out[t, r] = simd.sum(simd.add(a0, a1))
