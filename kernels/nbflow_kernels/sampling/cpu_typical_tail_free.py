"""Typical and tail-free filters on the CPU, brought to what the draws know: ranks and counts."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.sampling.cpu_radix_select import key_of, sort_falling
from nbflow_kernels.sampling.cpu_row_passes import n_chunks, probs_pass, typical_pass


def typical_ranks(probs: np.ndarray, ranks: np.ndarray) -> None:
    """Write how typical each token is, see `rows.typical_pass`; a bad row becomes -inf."""
    B, V = probs.shape
    parallel_for(_typical_ranks, B, 20.0 * B * V, probs, ranks)


def tail_free_counts(
    probs: np.ndarray, rows: np.ndarray, z: np.ndarray, first: int, counts: np.ndarray
) -> None:
    """Write how many of the largest the tail-free filter keeps, see the public function.

    `rows` int32 (B,) names rows of `probs`, `z` is float64 (B,), `first` the first bend that
    counts; `counts` float64 (B,) is infinity for a row that is not filtered or not a distribution.
    """
    B, V = len(rows), probs.shape[1]
    parallel_for(_tail_free_counts, B, 40.0 * B * V, probs, rows, z, first, counts)


@jit.kernel
def _typical_ranks(probs, ranks, start, stop):
    V = probs.shape[1]
    tops, sums = np.empty(n_chunks(V), np.float32), np.empty(n_chunks(V), np.float64)
    for b in range(start, stop):
        total = probs_pass(probs[b], tops, sums)
        if total > 0.0:
            typical_pass(probs[b], total, ranks[b])
        else:
            for j in range(V):
                ranks[b, j] = -np.inf


@jit.kernel
def _tail_free_counts(probs, rows, z, first, counts, start, stop):
    V = probs.shape[1]
    tops, sums = np.empty(n_chunks(V), np.float32), np.empty(n_chunks(V), np.float64)
    keys, ids = np.empty(V, np.int64), np.empty(V, np.int32)
    sorted_keys, order = np.empty(V, np.int64), np.empty(V, np.int32)
    digits, bends = np.empty(2048, np.int64), np.empty(max(V, 2), np.float64)
    for b in range(start, stop):
        row = probs[rows[b]]
        total = probs_pass(row, tops, sums)
        counts[b] = np.inf
        if not total > 0.0 or not z[b] < 1.0 or V < 3:
            continue
        for j in range(V):
            keys[j], ids[j] = key_of(row[j]), j
        sort_falling(V, keys, ids, sorted_keys, order, digits)
        whole = 0.0
        for i in range(V - 2):
            here, following = np.float64(row[order[i]]), np.float64(row[order[i + 1]])
            bend = (here - following) - (following - np.float64(row[order[i + 2]]))
            bends[i] = abs(bend) / total
            whole += bends[i]
        reached = 0.0
        for i in range(V - 2):
            if i >= first:
                reached += bends[i] / whole if whole > 1e-6 else 1.0 / V
            if i > 0 and reached > z[b]:
                counts[b] = i
                break
