"""Largest scores of a window of each row, and translation of their positions, row by row."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of, read_f32
from nbflow_kernels.sampling.cpu_radix_select import kth_largest

_COST = 8.0  # operations per score, for the choice of thread count


def top_k_transform(x, windows, offsets, pages, page_size, prefer_last, out, raw):  # fmt: skip
    """See `nbflow_kernels.sampling.top_k_transform`.

    `windows` are lengths and starts, `pages` the table with its row and first entry for each row
    of `x`; without them, positions are added to `offsets`.
    """
    hold(x)
    parallel_for(
        _transform, len(out), _COST * x.size, address_of(x), x.strides[0], *windows, offsets,
        *pages, page_size, prefer_last, out, raw,
    )  # fmt: skip


@jit.kernel
def _transform(
    x, row_bytes, lengths, starts, offsets, table, batches, firsts, page_size, prefer_last, out,
    raw, start, stop
):  # fmt: skip
    top_k = out.shape[1]
    for t in range(start, stop):
        n = np.int64(lengths[t])
        if n <= top_k:
            for j in range(top_k):
                raw[t, j] = j if j < n else -1
        else:
            _select(x + t * row_bytes + 4 * np.int64(starts[t]), n, prefer_last, raw[t])
        for j in range(top_k):
            position = np.int64(raw[t, j])
            if position < 0:
                out[t, j] = -1
            elif len(table):
                page = np.int64(table[batches[t], firsts[t] + position // page_size])
                out[t, j] = page * page_size + position % page_size
            else:
                out[t, j] = offsets[t] + position


@jit.device_function
def _select(row, n, prefer_last, out):
    """Write the positions of the largest of n scores at address `row`, ascending."""
    scores, work = np.empty(n, np.float32), np.empty(n, np.float32)
    for s in range(n):
        scores[s] = read_f32(row + 4 * s)
    least = kth_largest(scores, len(out), work)
    quota, skipped = len(out), 0
    for s in range(n):
        quota -= 1 if scores[s] > least else 0
        skipped += 1 if scores[s] == least else 0
    skipped = skipped - quota if prefer_last else 0
    j = 0
    for s in range(n):
        if scores[s] == least:
            skipped -= 1
            if skipped >= 0 or quota == 0:
                continue
            quota -= 1
        elif not scores[s] > least:
            continue
        out[j] = s
        j += 1
