"""Typical and tail-free filters on the CPU, as ranks and counts for `sampling.cpu`."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.sampling.cpu_radix_select import key_of, sort_descending
from nbflow_kernels.sampling.cpu_row_passes import (
    fill,
    launcher,
    n_chunks,
    probs_pass,
    typical_pass,
)


@jit.kernel
def _typical_ranks(probs, ranks, start, stop):
    V = probs.shape[1]
    tops, sums = np.empty(n_chunks(V), np.float32), np.empty(n_chunks(V), np.float64)
    for b in range(start, stop):
        total = probs_pass(probs[b], tops, sums)
        if total > 0.0:
            typical_pass(probs[b], total, ranks[b])
        else:
            fill(ranks[b], -np.inf)


@jit.kernel
def _tail_free_counts(probs, rows, z, first, counts, start, stop):
    V = probs.shape[1]
    tops, sums = np.empty(n_chunks(V), np.float32), np.empty(n_chunks(V), np.float64)
    keys, ids = np.empty(V, np.int64), np.empty(V, np.int32)
    sorted_keys, order = np.empty(V, np.int64), np.empty(V, np.int32)
    digits, differences = np.empty(2048, np.int64), np.empty(max(V, 2), np.float64)
    for b in range(start, stop):
        row = probs[rows[b]]
        total = probs_pass(row, tops, sums)
        counts[b] = np.inf
        if not total > 0.0 or not z[b] < 1.0 or V < 3:
            continue
        for j in range(V):
            keys[j], ids[j] = key_of(row[j]), j
        sort_descending(V, keys, ids, sorted_keys, order, digits)
        whole = 0.0
        for i in range(V - 2):
            here, following = np.float64(row[order[i]]), np.float64(row[order[i + 1]])
            difference = (here - following) - (following - np.float64(row[order[i + 2]]))
            differences[i] = abs(difference) / total
            whole += differences[i]
        reached = 0.0
        for i in range(V - 2):
            if i >= first:
                reached += differences[i] / whole if whole > 1e-6 else 1.0 / V
            if i > 0 and reached > z[b]:
                counts[b] = i
                break


typical_ranks = launcher(_typical_ranks, 20.0)
"""Write the rank of each token (`cpu_row_passes.typical_pass`); an invalid row becomes -inf."""
tail_free_counts = launcher(_tail_free_counts, 40.0)
"""Write the number of tokens that the tail-free filter keeps.

`rows` int32 (B,) indexes `probs`, `z` is float64 (B,), `first` the first second difference that
counts; `counts` float64 (B,) is infinity for a row that is not filtered or not a distribution.
"""
