"""Softmax, argmax and exact sampling on the CPU.

Filters keep a prefix of a row's elements in falling order (equals: lowest index first).  The prefix
is found without sorting: the bits of positive floats are ordered like the floats, so three passes
over digits of 11, 10 and 11 bits find the smallest kept value and how many of its equals are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import simd
from nbflow_kernels._jit import njit
from nbflow_kernels.threads import split_rows

# What `sample` and `renorm` write instead of a token for a row that is not a distribution.
INVALID = -1
INFINITY_BITS = 0x7F800000
BLOCK = 4096
LOWEST = np.float32(-3.4028234663852886e38)


def softmax(logits: np.ndarray, temperature: np.ndarray, out: np.ndarray) -> None:
    """See `nbflow_kernels.softmax`; `temperature` is float32 (B,)."""
    B, V = logits.shape
    split_rows(_softmax, B, 20.0 * B * V, logits, temperature, out)


def argmax(logits: np.ndarray, out: np.ndarray) -> None:
    """See `nbflow_kernels.argmax`; a row with a NaN gives -1."""
    B, V = logits.shape
    split_rows(_argmax, B, 2.0 * B * V, logits, out)


def sample(
    probs: np.ndarray,
    rows: np.ndarray,
    limits: np.ndarray,
    top_k_first: bool,
    seeds: np.ndarray,
    offsets: np.ndarray,
    out: np.ndarray,
) -> None:
    """Draw one token for each entry of `rows`; -1 where a row is not a distribution.

    `rows` int32 (B,) names rows of `probs` (R, V) float32; `limits` float64 (3, B) holds top_k,
    top_p and min_p; `seeds` and `offsets` uint64 (B,); `out` int32 (B,).  With `top_k_first` the
    top_p is a share of what top_k keeps, otherwise of the whole row.
    """
    B, V = len(rows), probs.shape[1]
    bits = probs.view(np.int32)
    work = 10.0 * B * V
    split_rows(_sample, B, work, probs, bits, rows, limits, top_k_first, seeds, offsets, out)


def renorm(probs: np.ndarray, limits: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write the kept elements divided by their sum, zeros elsewhere; return which rows are valid.

    `limits` is float64 (3, B) as for `sample`.
    """
    B, V = probs.shape
    valid = np.empty(B, np.int32)
    split_rows(_renorm, B, 10.0 * B * V, probs, probs.view(np.int32), limits, out, valid)
    return valid


@njit
def _top_and_nan(row: Any, n: Any) -> Any:
    """Return the largest of the first n // 16 * 16 elements at `row`; whether one is a NaN."""
    top = simd.splat(-np.inf)
    sign = simd.splat_i32(0)
    magnitude, infinity = simd.splat_i32(0x7FFFFFFF), simd.splat_i32(INFINITY_BITS)
    for d in range(0, n - 15, 16):
        x = simd.load_f32(row + 4 * d)
        top = simd.maximum(top, x)
        # negative exactly if the magnitude's bits are above those of infinity
        sign = simd.or_(sign, simd.sub(infinity, simd.and_(simd.as_i32(x), magnitude)))
    negative = simd.max(simd.to_f32(simd.shr(sign, simd.splat_i32(31))))
    return simd.max(top), negative > 0.0


@njit
def _row_top(row: Any) -> Any:
    """Return the largest element of a row and whether it has a NaN."""
    n = len(row)
    top, bad = _top_and_nan(simd.address(row), n)
    for d in range(n // 16 * 16, n):
        top = max(top, row[d])
        bad = bad or row[d] != row[d]
    return top, bad


@njit
def _exp_parts(row: Any, shift: Any, factor: Any, target: Any, n: Any) -> Any:
    """Write exp((x - shift) * factor) for 16 elements at a time; return the sum of them."""
    low, one = simd.splat(LOWEST), simd.splat(1.0)
    minus, times, total = simd.splat(shift), simd.splat(factor), simd.splat(0.0)
    for d in range(0, n, 16):
        x = simd.maximum(simd.load_f32(row + 4 * d), low)
        seen = simd.minimum(simd.sub(x, low), one)  # 0 for -inf, which simd.exp makes 1e-38
        e = simd.mul(simd.exp(simd.mul(simd.sub(x, minus), times)), seen)
        simd.store_f32(target + 4 * d, e)
        total = simd.add(total, e)
    return simd.sum(total)


@njit
def _softmax(logits: Any, temperature: Any, out: Any, start: Any, stop: Any) -> None:
    V = logits.shape[1]
    whole = V // 16 * 16
    tail = np.empty(16, np.float32)
    for b in range(start, stop):
        row, target = simd.address(logits) + 4 * V * b, simd.address(out) + 4 * V * b
        top, bad = _row_top(logits[b])
        if bad or top == np.inf or top <= LOWEST:
            for d in range(V):
                out[b, d] = np.nan
            continue
        factor = np.float32(1.0) / temperature[b]
        total = 0.0  # float64 over blocks, so that rounding does not grow with V
        for d in range(0, whole, BLOCK):
            n = min(BLOCK, whole - d)
            total += np.float64(_exp_parts(row + 4 * d, top, factor, target + 4 * d, n))
        if whole < V:
            for d in range(16):
                tail[d] = logits[b, whole + d] if whole + d < V else -np.inf
            place = simd.address(tail)
            total += np.float64(_exp_parts(place, top, factor, place, 16))
            for d in range(whole, V):
                out[b, d] = tail[d - whole]
        divisor = np.float32(total)
        for d in range(V):
            out[b, d] /= divisor


@njit
def _argmax(logits: Any, out: Any, start: Any, stop: Any) -> None:
    for b in range(start, stop):
        top, bad = _row_top(logits[b])
        out[b] = INVALID
        if not bad:
            place = 0
            while logits[b, place] < top:
                place += 1
            out[b] = place


@njit
def _sum_of(row: Any) -> Any:
    """Return the sum of a row in float64, or -1 if an element is negative, infinite or NaN."""
    total = 0.0
    for x in row:
        if not (x >= 0.0 and x < np.inf):
            return -1.0
        total += np.float64(x)
    return total


@njit
def _select(row: Any, bits: Any, count: Any, mass: Any, counts: Any, masses: Any) -> Any:
    """Find the shortest prefix, in falling order, of `count` elements or a sum of `mass`.

    Return the bits of its smallest value, how many elements of that value it has, and its sum.
    """
    prefix, shift, seen, sum_seen = 0, 32, 0, 0.0
    found: Any = 0
    kept: Any = 0
    for width in (11, 10, 11):  # the sign bit is 0: row elements are not negative
        parent = shift
        shift -= width
        buckets = 1 << width
        counts[:buckets] = 0
        masses[:buckets] = 0.0
        for j in range(len(row)):
            b = np.int64(bits[j]) & 0x7FFFFFFF  # -0.0 counts as 0.0
            if (b >> parent) == prefix:
                bucket = (b >> shift) & (buckets - 1)
                counts[bucket] += 1
                masses[bucket] += np.float64(row[j])
        n: Any = 0
        mass_here = 0.0
        for step in range(buckets):
            place = buckets - 1 - step
            if counts[place] > 0:
                # a bucket counts as passed only when there is another one below it: rounding may
                # keep the sum of all below `mass`
                seen, sum_seen = seen + n, sum_seen + mass_here
                found, n, mass_here = place, counts[place], masses[place]
                if seen + n >= count or sum_seen + mass_here >= mass:
                    break
        prefix = (prefix << width) | found
    each = mass_here / n
    kept = min(n, count - seen)
    if each > 0.0 and sum_seen + mass_here >= mass:
        kept = min(kept, max(np.int64(np.ceil((mass - sum_seen) / each)), 1))
    return prefix, kept, sum_seen + kept * each


@njit
def _prefix(
    row: Any, bits: Any, top_k: Any, top_p: Any, k_first: Any, total: Any, room: Any
) -> Any:
    """Return the smallest value's bits and its number of elements for top_k and top_p together."""
    counts, masses = room
    V = len(row)
    count = V if top_k >= V else np.int64(top_k)
    mass: Any = np.inf
    if top_p < 1.0:
        if k_first and count < V:
            total = _select(row, bits, count, np.inf, counts, masses)[2]
        mass = top_p * total
    if count == V and mass == np.inf:
        return 0, V
    pivot, ties, _ = _select(row, bits, count, mass, counts, masses)
    return pivot, ties


@njit
def _keep(row: Any, bits: Any, pivot: Any, ties: Any, least: Any, kept: Any) -> Any:
    """Mark the kept elements in `kept` (uint8); return their sum in float64."""
    total = 0.0
    for j in range(len(row)):
        b = np.int64(bits[j]) & 0x7FFFFFFF
        keep = b > pivot
        if b == pivot and ties > 0:
            keep = True
            ties -= 1
        keep = keep and np.float64(row[j]) >= least
        kept[j] = keep
        if keep:
            total += np.float64(row[j])
    return total


@njit
def _uniform(seed: Any, offset: Any) -> Any:
    """Return the number in [0, 1) of a seed and an offset (uint64), from Philox4x32-10."""
    word = np.uint64(0xFFFFFFFF)
    half, weight = np.uint64(32), np.uint64(0xD2511F53)
    c0, c1, c2, c3 = offset & word, offset >> half, np.uint64(0), np.uint64(0)
    k0, k1 = seed & word, seed >> half
    for _ in range(10):
        a, b = weight * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & word, (a >> half) ^ c3 ^ k1, a & word
        k0 = (k0 + np.uint64(0x9E3779B9)) & word
        k1 = (k1 + np.uint64(0xBB67AE85)) & word
    high, low = np.float64(c0 >> np.uint64(5)), np.float64(c1 >> np.uint64(6))
    return (high * 67108864.0 + low) / 9007199254740992.0  # 2**26, 2**53: exact


@njit
def _sample(
    probs: Any,
    bits: Any,
    rows: Any,
    limits: Any,
    top_k_first: Any,
    seeds: Any,
    offsets: Any,
    out: Any,
    start: Any,
    stop: Any,
) -> None:
    room = (np.empty(2048, np.int64), np.empty(2048, np.float64))
    kept = np.empty(probs.shape[1], np.uint8)
    for i in range(start, stop):
        row, row_bits = probs[rows[i]], bits[rows[i]]
        out[i] = INVALID
        total = _sum_of(row)
        if not total > 0.0:
            continue
        pivot, ties = _prefix(row, row_bits, limits[0, i], limits[1, i], top_k_first, total, room)
        least = 0.0
        if limits[2, i] > 0.0:
            least = limits[2, i] * np.float64(_row_top(row)[0])
        total = _keep(row, row_bits, pivot, ties, least, kept)
        target = _uniform(seeds[i], offsets[i]) * total
        reached = 0.0
        for j in range(len(row)):
            if kept[j] != 0 and row[j] > 0.0:
                out[i] = j
                reached += np.float64(row[j])
                if reached > target:
                    break


@njit
def _renorm(
    probs: Any, bits: Any, limits: Any, out: Any, valid: Any, start: Any, stop: Any
) -> None:
    room = (np.empty(2048, np.int64), np.empty(2048, np.float64))
    kept = np.empty(probs.shape[1], np.uint8)
    for i in range(start, stop):
        total = _sum_of(probs[i])
        valid[i] = total > 0.0
        if total > 0.0:
            pivot, ties = _prefix(probs[i], bits[i], limits[0, i], limits[1, i], False, total, room)
            total = _keep(probs[i], bits[i], pivot, ties, 0.0, kept)
            for j in range(probs.shape[1]):
                out[i, j] = np.float64(probs[i, j]) / total if kept[j] != 0 else 0.0
