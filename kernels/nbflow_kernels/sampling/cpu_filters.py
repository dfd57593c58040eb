"""What the filters of one row keep, and a draw from it.

``limits`` is a row of float64: the parameters of the filters of a row, in the order below.  Each
has a value that switches it off.
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

# Places of the parameters in `limits`, and the values that keep everything.  SHARE is top-p or,
# with RANKED, the mass of the typical filter; FLOOR is a share of the row's sum.
TOP_K, SHARE, MIN_P, FLOOR, RANKED = range(5)
OFF = (np.inf, 1.0, 0.0, 0.0, 0.0)


@jit.device_function
def float_at_least(bound):
    """Return the least float32 that is not below a float64."""
    near = np.float32(bound)
    return near if np.float64(near) >= bound else np.nextafter(near, np.float32(np.inf))


@jit.device_function
def filter_row(rank, weight, tops, sums, total, limits, k_first, room):
    """Return the cut (see `select`) of all filters together, and the sum of what is kept.

    `tops` are those of the ranks.  `sums` comes in with the sums of the chunks' weights and leaves
    with those of what they keep.
    """
    V, share = len(rank), limits[SHARE]
    count = V if limits[TOP_K] >= V else np.int64(limits[TOP_K])
    mass = share * total * SLACK if share < 1.0 else np.inf
    cut, last, kept = np.float32(-np.inf), V, total
    if count < V or share < 1.0:
        low, high, above = cut, np.float32(np.inf), 0.0
        if count < V:
            low = kth_largest(tops, count, room[5]) if count <= len(tops) else low
        else:
            # what is below this does not sum to the share that is left out
            floor = np.float32((1.0 - share) * total * SLACK / V)
            if limits[RANKED] > 0.0:
                floor = np.float32(-128.0)  # ln p and its mean lie in -104..0 for p > 0
            low, high, above = mass_window(rank, weight, tops, mass, floor, sums, room)
        n = candidates(rank, weight, tops, low, high, room)
        if k_first and count < V and share < 1.0:
            mass = share * resolve(n, count, np.inf, room)[2] * SLACK
        if n > 0:
            cut, last, kept = resolve(n, count, mass - above, room)
        else:  # sums of the same elements in two orders differ by rounding
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
    """Return the element where the kept weights, added in order of index, pass `u` of their sum."""
    reached = 0.0
    c = 0
    while c < len(sums) and not reached + sums[c] > u * total:
        reached += sums[c]
        c += 1
    chosen = -1
    while chosen < 0:
        # rounding may have passed the end of the row: then the last kept element is drawn
        c = min(c, len(sums) - 1)
        for j in range(c * CHUNK, min(len(weight), (c + 1) * CHUNK)):
            if weight[j] > 0.0 and (rank[j] > cut or (rank[j] == cut and j <= last)):
                chosen = j
                reached += np.float64(weight[j])
                if reached > u * total:
                    break
        c -= 1
    return chosen
