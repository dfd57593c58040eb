"""Radix select: the cut of a top-k, top-p or typical filter, without sorting the row.

A filter keeps a prefix of the elements in descending order of *rank* (equals: the lowest index
first): `count` of them, or as many as bring the sum of their *weights* to `mass`.  For top-k and
top-p rank and weight are both the probability; the typical filter has other ranks.  The result is a
*cut*: the last kept rank, and the index of the last kept element of that rank.

1. The largest ranks of the chunks (`cpu_row_passes`) bound the k-th largest rank from below: k
   chunks have an element of at least the k-th largest of them (`kth_largest`).
2. For the mass of a flat row `mass_window` brackets the cut by passes that sum the weights above
   four ranks at once.
3. `candidates` collects the elements in the bracket from the chunks that can have any.
4. `resolve` finds the cut among them: ranks as integers of the same order, three passes over digits
   of 11, 11 and 10 bits, most significant first.

There are few levels of calls, since each level is compiled again into the one above it.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_compare import (
    any_ge,
    bits_of,
    where_ge,
    wide_add,
    wide_sum,
    wide_zero,
)
from nbflow_kernels.sampling.cpu_row_passes import CHUNK

N_LIKELY = 64  # elements that hold most of the mass of a usual row
# Narrowing the bracket pays until it is 1/16 of a factor of two wide: there a row of 128256 normal
# logits has about a thousand elements.
NARROW = 1 << 19
# Rounding of 128256 additions in float64: sqrt(128256) * 2**-53 = 4e-14 of the sum.
SLACK = 1.0 - 1e-13


@jit.device_function
def allocate_scratch(n):
    """Return the scratch arrays of the functions below, for rows of up to `n` elements."""
    return (
        np.empty(n, np.float32),  # weights of the candidates
        np.empty(n, np.int64),  # their ranks as integers
        np.empty(n, np.int32),  # their indices in the row, ascending
        np.empty(2048, np.int64),
        np.empty(2048, np.float64),
        np.empty((n + CHUNK - 1) // CHUNK, np.float32),
    )


@jit.device_function(inline="always")
def key_of(x):
    """Return an integer in 0..2**32 - 1 with the order of float32; -0 = 0."""
    b = bits_of(x)
    return 2147483648 + (b if b >= 0 else -(b & 0x7FFFFFFF))


@jit.device_function(inline="always")
def value_of(key):
    """Return the float32 of a key."""
    b = key - 2147483648
    return simd.bits_to_float(b if b >= 0 else -b - 2147483648)


@jit.device_function
def kth_largest(values, k, work):
    """Return the k-th largest of `values` by quickselect on a copy."""
    low, high, target = 0, len(values) - 1, k - 1
    for i in range(len(values)):
        work[i] = values[i]
    while low < high:
        a, b, c = work[low], work[(low + high) // 2], work[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while work[i] > pivot:
                i += 1
            while work[j] < pivot:
                j -= 1
            if i <= j:
                work[i], work[j] = work[j], work[i]
                i += 1
                j -= 1
        if target <= j:
            high = j
        elif target >= i:
            low = i
        else:
            break
    return work[target]


@jit.device_function
def candidates(rank, weight, tops, least, below, scratch):
    """Collect the elements with a rank in [least, below), by index; return their number."""
    values, keys, ids = scratch[0], scratch[1], scratch[2]
    at, bound = simd.address(rank), simd.splat(least)
    end, outside = simd.splat(below), simd.splat(-np.inf)
    n = 0
    for c in range(len(tops)):
        if tops[c] >= least:
            stop = min(len(rank), (c + 1) * CHUNK)
            for d in range(c * CHUNK, stop, 16):
                last = min(d + 16, stop)
                if last == d + 16:
                    x = simd.load_f32(at + 4 * d)
                    if not any_ge(where_ge(x, end, outside, x), bound):
                        continue
                for j in range(d, last):
                    if rank[j] >= least and not rank[j] >= below:
                        values[n], keys[n], ids[n] = weight[j], key_of(rank[j]), j
                        n += 1
    return n


@jit.device_function
def resolve(n, count, mass, scratch):
    """Return the cut among `n` candidates and the sum of the kept weights.

    `count` and `mass` refer to the candidates.  At least one element is kept.
    """
    values, keys, ids, counts, masses = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    prefix, shift, seen, sum_seen = 0, 32, 0, 0.0
    for width in (11, 11, 10):
        parent = shift
        shift -= width
        buckets = 1 << width
        for b in range(buckets):
            counts[b], masses[b] = 0, 0.0
        for j in range(n):
            if (keys[j] >> parent) == prefix:
                bucket = (keys[j] >> shift) & (buckets - 1)
                counts[bucket] += 1
                masses[bucket] += np.float64(values[j])
        found = 0
        here = 0
        mass_here = 0.0
        for step in range(buckets):
            bucket = buckets - 1 - step
            if counts[bucket] > 0:
                # a bucket is passed only if another one follows: with rounding the sum of all may
                # stay below `mass`
                seen, sum_seen = seen + here, sum_seen + mass_here
                found, here, mass_here = bucket, counts[bucket], masses[bucket]
                if seen + here >= count or sum_seen + mass_here >= mass:
                    break
        prefix = (prefix << width) | found
    ties, tie_mass = count - seen, max(mass - sum_seen, 1e-300)
    last = -1
    for j in range(n):
        if keys[j] == prefix and ties > 0 and tie_mass > 0.0:
            ties -= 1
            tie_mass -= np.float64(values[j])
            sum_seen += np.float64(values[j])
            last = np.int64(ids[j])
    return value_of(prefix), last, sum_seen


@jit.device_function
def kept_pass(rank, weight, tops, cut, last, sums):
    """Write the sum of the kept weights of each chunk; return the total."""
    n, total = len(rank), 0.0
    at, weights = simd.address(rank), simd.address(weight)
    bound, zero = simd.splat(cut), simd.splat(0.0)
    for c in range(len(tops)):
        sums[c] = 0.0
        if not tops[c] >= cut:
            continue
        first, stop = c * CHUNK, min(n, (c + 1) * CHUNK)
        whole = first
        if stop <= last + 1:  # keeps all elements equal to the cut
            whole = stop - (stop - first) % 16
            parts = wide_zero()
            for d in range(first, whole, 16):
                w = simd.load_f32(weights + 4 * d)
                parts = wide_add(parts, where_ge(simd.load_f32(at + 4 * d), bound, w, zero))
            sums[c] = wide_sum(parts)
        elif first > last:  # keeps none of them
            whole = stop - (stop - first) % 16
            parts = wide_zero()
            for d in range(first, whole, 16):
                w = simd.load_f32(weights + 4 * d)
                parts = wide_add(parts, where_ge(bound, simd.load_f32(at + 4 * d), zero, w))
            sums[c] = wide_sum(parts)
        for j in range(whole, stop):
            if rank[j] > cut or (rank[j] == cut and j <= last):
                sums[c] += np.float64(weight[j])
        total += sums[c]
    return total


@jit.device_function
def _above(rank, weight, keys, sums):
    """Write the sums of the weights at and above each of four ranks, given as keys."""
    a, b, c, d = value_of(keys[0]), value_of(keys[1]), value_of(keys[2]), value_of(keys[3])
    va, vb, vc, vd = simd.splat(a), simd.splat(b), simd.splat(c), simd.splat(d)
    zero, at, weights = simd.splat(0.0), simd.address(rank), simd.address(weight)
    ta, tb, tc, td = wide_zero(), wide_zero(), wide_zero(), wide_zero()
    n = len(rank)
    for i in range(0, n - 15, 16):
        r, w = simd.load_f32(at + 4 * i), simd.load_f32(weights + 4 * i)
        ta = wide_add(ta, where_ge(r, va, w, zero))
        tb = wide_add(tb, where_ge(r, vb, w, zero))
        tc = wide_add(tc, where_ge(r, vc, w, zero))
        td = wide_add(td, where_ge(r, vd, w, zero))
    sums[0], sums[1], sums[2], sums[3] = wide_sum(ta), wide_sum(tb), wide_sum(tc), wide_sum(td)
    for i in range(n // 16 * 16, n):
        w = np.float64(weight[i])
        sums[0] += w if rank[i] >= a else 0.0
        sums[1] += w if rank[i] >= b else 0.0
        sums[2] += w if rank[i] >= c else 0.0
        sums[3] += w if rank[i] >= d else 0.0


@jit.device_function
def mass_window(rank, weight, tops, mass, floor, sums, scratch):
    """Return ranks [low, high) that bracket the cut of `mass`, and the weight from `high` on.

    The elements of rank `floor` and above have at least `mass`.
    """
    low, high = floor, np.float32(np.inf)
    if len(tops) < N_LIKELY:
        return low, high, 0.0
    few = kth_largest(tops, np.int64(N_LIKELY), scratch[5])
    above = kept_pass(rank, weight, tops, few, len(rank), sums)
    if above >= mass or not floor < few:
        return few, high, 0.0
    low_key, high_key = key_of(floor), key_of(few)
    keys, parts = np.empty(4, np.int64), np.empty(4, np.float64)
    while high_key - low_key > NARROW:
        for k in range(4):
            keys[k] = low_key + (high_key - low_key) * (k + 1) // 5
        _above(rank, weight, keys, parts)
        for k in range(3, -1, -1):
            if parts[k] >= mass:
                low_key = keys[k]
                break
            high_key, above = keys[k], parts[k]
    return value_of(low_key), value_of(high_key), above


@jit.device_function
def _digit_pass(n, shift, keys, ids, out_keys, out_ids, counts):
    """Sort stably by one digit of 11 bits, descending."""
    for b in range(2048):
        counts[b] = 0
    for j in range(n):
        counts[2047 - ((keys[j] >> shift) & 2047)] += 1
    position = 0
    for b in range(2048):
        counts[b], position = position, position + counts[b]
    for j in range(n):
        b = 2047 - ((keys[j] >> shift) & 2047)
        position = counts[b]
        counts[b] = position + 1
        out_keys[position], out_ids[position] = keys[j], ids[j]


@jit.device_function
def sort_descending(n, keys, ids, out_keys, out_ids, counts):
    """Sort `n` elements stably by key, descending: LSD radix sort.

    Three passes; `keys` and `ids` are overwritten.
    """
    _digit_pass(n, 0, keys, ids, out_keys, out_ids, counts)
    _digit_pass(n, 11, out_keys, out_ids, keys, ids, counts)
    _digit_pass(n, 22, keys, ids, out_keys, out_ids, counts)
