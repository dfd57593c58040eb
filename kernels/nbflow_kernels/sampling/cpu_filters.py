"""Filters of one row, and a draw from the kept elements.

``limits`` holds the parameters of a row's filters, float64, in the order below.  Each has a value
that disables it.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.sampling.cpu_radix_select import (
    SLACK,
    candidates,
    kept_pass,
    kth_largest,
    mass_window,
    resolve,
)
from nbflow_kernels.sampling.cpu_row_passes import CHUNK

# Index of each parameter in `limits`, and the values that disable the filters.  TOP_P is top-p or,
# with BY_RANK, the mass of the typical filter; FLOOR is a share of the row's sum.
TOP_K, TOP_P, MIN_P, FLOOR, BY_RANK = range(5)
OFF = (np.inf, 1.0, 0.0, 0.0, 0.0)


@jit.device_function
def float_at_least(bound):
    """Return a float64 rounded up to float32."""
    near = np.float32(bound)
    return near if np.float64(near) >= bound else np.nextafter(near, np.float32(np.inf))


@jit.device_function
def filter_row(rank, weight, tops, sums, total, limits, k_first, scratch):
    """Return the cut (`cpu_radix_select`) of all filters combined, and the sum of the kept weights.

    `tops` are the largest ranks of the chunks.  `sums` are the sums of their weights, and become
    the sums of their kept weights.
    """
    V, share = len(rank), limits[TOP_P]
    count = V if limits[TOP_K] >= V else np.int64(limits[TOP_K])
    mass = share * total * SLACK if share < 1.0 else np.inf
    cut, last, kept = np.float32(-np.inf), V, total
    if count < V or share < 1.0:
        low, high, above = cut, np.float32(np.inf), 0.0
        if count < V:
            low = kth_largest(tops, count, scratch[5]) if count <= len(tops) else low
        else:
            # elements below sum to less than the share that is dropped
            floor = np.float32((1.0 - share) * total * SLACK / V)
            if limits[BY_RANK] > 0.0:
                floor = np.float32(-128.0)  # ln p and its mean lie in -104..0 for p > 0
            low, high, above = mass_window(rank, weight, tops, mass, floor, sums, scratch)
        n = candidates(rank, weight, tops, low, high, scratch)
        if k_first and count < V and share < 1.0:
            mass = share * resolve(n, count, np.inf, scratch)[2] * SLACK
        if n > 0:
            cut, last, kept = resolve(n, count, mass - above, scratch)
        else:  # sums in two orders differ by rounding
            cut = high
    top = 0.0
    for c in range(len(tops)):
        top = max(top, np.float64(tops[c]))
    bound = float_at_least(max(limits[MIN_P] * top, min(limits[FLOOR] * total, top)))
    if bound > cut and bound > 0.0:
        cut, last = bound, V
    if cut > -np.inf:
        kept = kept_pass(rank, weight, tops, cut, last, sums)
    return cut, last, kept


@jit.device_function
def draw(rank, weight, cut, last, sums, total, u):
    """Return the index at which the cumulative kept weight passes `u` times the total."""
    reached = 0.0
    c = 0
    while c < len(sums) and not reached + sums[c] > u * total:
        reached += sums[c]
        c += 1
    chosen = -1
    while chosen < 0:
        # rounding may pass the end of the row: draw the last kept element
        c = min(c, len(sums) - 1)
        for j in range(c * CHUNK, min(len(weight), (c + 1) * CHUNK)):
            if weight[j] > 0.0 and (rank[j] > cut or (rank[j] == cut and j <= last)):
                chosen = j
                reached += np.float64(weight[j])
                if reached > u * total:
                    break
        c -= 1
    return chosen
