"""Softmax, argmax, exact filters and sampling on the CPU; threads divide the rows.

A row is read once or twice (`cpu_row_passes`); filters read only chunks whose largest element can
matter (`cpu_radix_select`, `cpu_filters`); a draw depends on its row, seed and offset
(`cpu_philox`).
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_compare import where_ge, wide_add, wide_sum, wide_zero
from nbflow_kernels.sampling.cpu_filters import BY_RANK, TOP_K, draw, filter_row, float_at_least
from nbflow_kernels.sampling.cpu_philox import uniform
from nbflow_kernels.sampling.cpu_radix_select import (
    allocate_scratch,
    candidates,
    key_of,
    kth_largest,
    resolve,
    sort_descending,
)
from nbflow_kernels.sampling.cpu_row_passes import (
    CHUNK,
    LOWEST,
    exp_pass,
    fill,
    keep_from,
    launcher,
    logits_pass,
    n_chunks,
    probs_pass,
    scale,
)

INVALID = -1  # token of a row that is not a distribution or has a NaN


@jit.kernel
def _softmax(logits, temperature, out, start, stop):
    V = logits.shape[1]
    tops, sums = np.empty(n_chunks(V), np.float32), np.empty(n_chunks(V), np.float64)
    for b in range(start, stop):
        top, bad = logits_pass(logits[b], tops)
        if bad or top == np.inf or top <= LOWEST:
            fill(out[b], np.nan)
            continue
        factor = np.float32(1.0) / temperature[b]
        total = exp_pass(logits[b], top, factor, out[b], tops, sums)
        scale(out[b], np.float32(1.0 / total))


@jit.kernel(unroll=False)
def _argmax(logits, out, start, stop):
    tops = np.empty(n_chunks(logits.shape[1]), np.float32)
    for b in range(start, stop):
        top, bad = logits_pass(logits[b], tops)
        out[b] = INVALID
        if not bad:
            index = 0
            while tops[index // CHUNK] < top:
                index += CHUNK
            while logits[b, index] < top:
                index += 1
            out[b] = index


@jit.kernel
def _sample(ranks, probs, rows, limits, top_k_first, seeds, offsets, out, shares, start, stop):
    V = probs.shape[1]
    scratch = allocate_scratch(V)
    tops, sums = np.empty(n_chunks(V), np.float32), np.empty(n_chunks(V), np.float64)
    for i in range(start, stop):
        rank, row = ranks[rows[i]], probs[rows[i]]
        out[i], shares[i] = INVALID, 0.0
        total = probs_pass(row, tops, sums)
        if total > 0.0:
            if limits[i, BY_RANK] > 0.0:
                logits_pass(rank, tops)
            cut, last, kept = filter_row(
                rank, row, tops, sums, total, limits[i], top_k_first, scratch
            )
            u = uniform(seeds[i], offsets[i], np.uint64(0))
            chosen = draw(rank, row, cut, last, sums, kept, u)
            out[i], shares[i] = chosen, np.float64(row[chosen]) / kept


@jit.kernel
def _sample_logits(
    logits, rows, temperature, limits, top_k_first, seeds, offsets, out, start, stop
):
    V = logits.shape[1]
    scratch, kept_logits = allocate_scratch(V), np.empty(V + 16, np.float32)
    weights, positions = np.empty(V + 16, np.float32), np.empty(V, np.int32)
    tops, sums = np.empty(n_chunks(V), np.float32), np.empty(n_chunks(V), np.float64)
    for i in range(start, stop):
        row = logits[rows[i]]
        out[i] = INVALID
        top, bad = logits_pass(row, tops)
        if bad or top == np.inf or top <= LOWEST:
            continue
        m, few = V, top_k_first and limits[i, TOP_K] < V
        source = row
        if few:
            m = _keep_top(row, tops, np.int64(limits[i, TOP_K]), kept_logits, positions, scratch)
            source = kept_logits[:m]
        c = n_chunks(m)
        factor = np.float32(1.0) / temperature[i]
        total = exp_pass(source, top, factor, weights[:m], tops[:c], sums[:c])
        u = uniform(seeds[i], offsets[i], np.uint64(0))
        cut, last, kept = filter_row(
            weights[:m], weights[:m], tops[:c], sums[:c], total, limits[i], top_k_first, scratch
        )
        chosen = draw(weights[:m], weights[:m], cut, last, sums[:c], kept, u)
        out[i] = positions[chosen] if few else chosen


@jit.device_function
def _keep_top(row, tops, count, values, positions, scratch):
    """Write the `count` largest of a row and their indices, by index; return `count`."""
    low = kth_largest(tops, count, scratch[5]) if count <= len(tops) else np.float32(-np.inf)
    n = candidates(row, row, tops, low, np.float32(np.inf), scratch)
    cut, last, _ = resolve(n, count, np.inf, scratch)
    m = 0
    for j in range(n):
        value = scratch[0][j]
        if value > cut or (value == cut and scratch[2][j] <= last):
            values[m], positions[m] = value, scratch[2][j]
            m += 1
    return m


@jit.kernel
def _renorm(ranks, probs, limits, out, valid, start, stop):
    V = probs.shape[1]
    scratch = allocate_scratch(V)
    tops, sums = np.empty(n_chunks(V), np.float32), np.empty(n_chunks(V), np.float64)
    for i in range(start, stop):
        rank, row = ranks[i], probs[i]
        total = probs_pass(row, tops, sums)
        valid[i] = total > 0.0
        if not total > 0.0:
            continue
        if limits[i, BY_RANK] > 0.0:
            logits_pass(rank, tops)
        cut, last, kept = filter_row(rank, row, tops, sums, total, limits[i], False, scratch)
        for c in range(len(tops)):
            first, end = c * CHUNK, min(V, (c + 1) * CHUNK)
            if tops[c] >= cut:
                for j in range(first, end):  # read before written: `out` may be `probs`
                    keep = rank[j] > cut or (rank[j] == cut and j <= last)
                    out[i, j] = np.float64(row[j]) / kept if keep else 0.0
            else:
                fill(out[i, first:end], 0.0)


@jit.kernel
def _xtc(probs, parameters, seeds, offsets, out, valid, start, stop):
    V = probs.shape[1]
    scratch = allocate_scratch(V)
    tops, sums = np.empty(n_chunks(V), np.float32), np.empty(n_chunks(V), np.float64)
    for i in range(start, stop):
        total = probs_pass(probs[i], tops, sums)
        valid[i] = total > 0.0
        if not total > 0.0:
            continue
        n, survivor = 0, -1
        if uniform(seeds[i], offsets[i], np.uint64(0)) < parameters[i, 0]:
            least, infinity = float_at_least(parameters[i, 1] * total), np.float32(np.inf)
            n = candidates(probs[i], probs[i], tops, least, infinity, scratch)
        for j in range(n):
            if survivor < 0 or scratch[1][j] <= scratch[1][survivor]:
                survivor = j
        for j in range(V):
            out[i, j] = probs[i, j]
        for j in range(n):
            if j != survivor:
                out[i, scratch[2][j]] = 0.0
        total = probs_pass(out[i], tops, sums)
        for j in range(V):
            out[i, j] = np.float64(out[i, j]) / total


@jit.kernel
def _top_k(x, k, in_order, values, indices, start, stop):
    V = x.shape[1]
    scratch = allocate_scratch(V)
    sorted_keys, positions = np.empty(k, np.int64), np.empty(k, np.int32)
    tops, largest = np.empty(n_chunks(V), np.float32), np.empty(k, np.float32)
    for b in range(start, stop):
        if logits_pass(x[b], tops)[1]:
            indices[b, 0] = INVALID
            continue
        _keep_top(x[b], tops, k, largest, positions, scratch)
        if not in_order:
            for j in range(k):
                values[b, j], indices[b, j] = largest[j], positions[j]
            continue
        for j in range(k):
            scratch[1][j] = key_of(largest[j])
        sort_descending(k, scratch[1], positions, sorted_keys, indices[b], scratch[3])
        for j in range(k):
            values[b, j] = x[b, indices[b, j]]


@jit.kernel
def _top_k_mask(logits, counts, out, valid, start, stop):
    V = logits.shape[1]
    scratch = allocate_scratch(V)
    values, positions = np.empty(V, np.float32), np.empty(V, np.int32)
    tops = np.empty(n_chunks(V), np.float32)
    for b in range(start, stop):
        valid[b] = not logits_pass(logits[b], tops)[1]
        if not valid[b]:
            continue
        m = _keep_top(logits[b], tops, counts[b], values, positions, scratch)
        fill(out[b], -np.inf)
        for j in range(m):
            out[b, positions[j]] = values[j]


@jit.device_function
def _deviation(row):
    """Return the standard deviation of the finite elements of a row, in float64."""
    at, n = simd.address(row), len(row)
    zero, one, lowest = simd.splat(0.0), simd.splat(1.0), simd.splat(LOWEST)
    total, number, squares = wide_zero(), wide_zero(), wide_zero()
    rest, rest_number, rest_squares = 0.0, 0.0, 0.0
    for d in range(0, n - 15, 16):
        x = simd.load_f32(at + 4 * d)
        total = wide_add(total, where_ge(x, lowest, x, zero))
        number = wide_add(number, where_ge(x, lowest, one, zero))
    for d in range(n // 16 * 16, n):
        if row[d] >= LOWEST:
            rest += np.float64(row[d])
            rest_number += 1.0
    count = wide_sum(number) + rest_number
    mean = np.float32((wide_sum(total) + rest) / count)
    means = simd.splat(mean)
    for d in range(0, n - 15, 16):
        x = simd.load_f32(at + 4 * d)
        difference = where_ge(x, lowest, simd.sub(x, means), zero)
        squares = wide_add(squares, simd.mul(difference, difference))
    for d in range(n // 16 * 16, n):
        if row[d] >= LOWEST:
            rest_squares += (np.float64(row[d]) - mean) ** 2
    return np.sqrt((wide_sum(squares) + rest_squares) / count)


@jit.kernel
def _n_sigma_mask(logits, n, out, valid, start, stop):
    V = logits.shape[1]
    tops = np.empty(n_chunks(V), np.float32)
    for b in range(start, stop):
        top, bad = logits_pass(logits[b], tops)
        valid[b] = not (bad or top == np.inf)
        if not valid[b]:
            continue
        cut = np.float32(-np.inf)
        if top > -np.inf and n[b] > 0.0:
            cut = float_at_least(np.float64(top) - n[b] * _deviation(logits[b]))
        keep_from(logits[b], cut, out[b])


softmax = launcher(_softmax, 20.0)
"""See `nbflow_kernels.softmax`; `temperature` is float32 (B,)."""
argmax = launcher(_argmax, 2.0)
"""See `nbflow_kernels.argmax`; a row with a NaN gives -1."""
sample = launcher(_sample, 6.0)
"""Draw one token for each entry of `rows`; -1 where a row is not a distribution.

`rows` int32 (B,) indexes `probs` and `ranks`, float32 (R, V).  Filters keep the largest ranks,
which are the probabilities except for the typical filter.  `limits` float64 (B, 5) holds the
parameters of the filters (`cpu_filters`); `seeds` and `offsets` are uint64 (B,).  Writes the
tokens to `out` int32 (B,) and their shares of the kept mass to `shares` float64 (B,).
"""
sample_logits = launcher(_sample_logits, 20.0)
"""Softmax and `sample` of rows of logits, fused; `temperature` is float32 (B,)."""
renorm = launcher(_renorm, 6.0)
"""Write the kept elements divided by their sum, and zeros elsewhere.

`ranks` and `limits` are as for `sample`; `valid` int32 (B,) becomes 0 or 1.
"""
xtc = launcher(_xtc, 6.0)
"""See `nbflow_kernels.xtc_renorm_probs`; `valid` int32 (B,) becomes 0 or 1.

`parameters` float64 (B, 2) holds probability and threshold.
"""
top_k = launcher(_top_k, 3.0)
"""See `nbflow_kernels.top_k`; a row with a NaN gives -1."""
top_k_mask = launcher(_top_k_mask, 4.0)
"""See `nbflow_kernels.top_k_mask_logits`; `counts` is int64 (B,), at most V."""
n_sigma_mask = launcher(_n_sigma_mask, 6.0)
"""See `nbflow_kernels.top_n_sigma_mask_logits`; `n` is float64 (B,)."""
