"""Chain speculative sampling (rejection sampling of draft tokens) on the CPU."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_compare import wide_add, wide_sum, wide_zero
from nbflow_kernels.sampling.cpu_philox import uniform
from nbflow_kernels.sampling.cpu_row_passes import launcher, n_chunks, probs_pass


@jit.device_function
def _excess(target, draft, out):
    """Write max(target - draft, 0) to `out`; return the sum in float64."""
    n, total, rest, zero = len(target), wide_zero(), 0.0, simd.splat(0.0)
    q, p, at = simd.address(target), simd.address(draft), simd.address(out)
    for d in range(0, n - 15, 16):
        difference = simd.sub(simd.load_f32(q + 4 * d), simd.load_f32(p + 4 * d))
        x = simd.maximum(difference, zero)
        simd.store_f32(at + 4 * d, x)
        total = wide_add(total, x)
    for d in range(n // 16 * 16, n):
        out[d] = max(target[d] - draft[d], np.float32(0.0))
        rest += np.float64(out[d])
    return wide_sum(total) + rest


@jit.device_function
def _draw(weights, target):
    """Return the first element where the running sum passes `target`, or the last positive one."""
    chosen = -1
    reached = 0.0
    for j in range(len(weights)):
        if weights[j] > 0.0:
            chosen = j
            reached += np.float64(weights[j])
            if reached > target:
                break
    return chosen


@jit.kernel
def _chain(
    draft_probs, draft_token_ids, target_probs, seeds, offsets, out, accepted, emitted, start, stop
):
    n, V = draft_probs.shape[1], draft_probs.shape[2]
    weights = np.empty(V, np.float32)
    tops, sums = np.empty(n_chunks(V), np.float32), np.empty(n_chunks(V), np.float64)
    for b in range(start, stop):
        accepted[b] = emitted[b] = 0
        accepting = True
        for i in range(n):
            token = draft_token_ids[b, i]
            u = uniform(seeds[b], offsets[b], np.uint64(i))
            passes = u * np.float64(draft_probs[b, i, token]) < target_probs[b, i, token]
            accepted[b] += passes
            accepting = accepting and passes
            out[b, i] = -1
            if accepting:
                out[b, i] = token
                emitted[b] += 1
        out[b, n] = -1
        position = np.int64(emitted[b])
        last = min(position, n - 1) if n > 0 else 0
        row = target_probs[b, position]
        total = 0.0
        if position < n:
            total = _excess(row, draft_probs[b, last], weights)
        whole = probs_pass(row, tops, sums)
        u = uniform(seeds[b], offsets[b], np.uint64(n))
        if not whole > 0.0:
            emitted[b] = -1
        elif total > 0.0:
            out[b, position] = _draw(weights, u * total)
        else:
            out[b, position] = _draw(row, u * whole)


chain_speculative = launcher(_chain, 4.0)
"""See `nbflow_kernels.chain_speculative_sampling`; an invalid target row gives emitted -1."""
