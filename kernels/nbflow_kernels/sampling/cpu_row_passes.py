"""Passes over a row: maximum, sum, exp, log.

A row is cut into chunks of `CHUNK` elements.  The passes write the largest element of each chunk
(`tops`) and often its float64 sum (`sums`), so that later steps read only the chunks they need.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_compare import log, where_ge, wide_add, wide_sum, wide_zero

# 8 vectors: reducing the lanes costs about as much as reading them, and a vocabulary of 128256 has
# 1002 chunks, enough to bound the k-th largest element for any usual k.
CHUNK = 128
INFINITY_BITS = 0x7F800000
LOWEST = np.float32(-3.4028234663852886e38)
TINY = np.float32(1.1754943508222875e-38)  # smallest normal float32


def launcher(kernel, cost):
    """Return a function that divides the rows of a kernel's last argument among the threads.

    `cost` is the work for each of the columns of the first argument, in multiply-adds.
    """

    def launch(*arguments):
        B, V = len(arguments[-1]), arguments[0].shape[-1]
        parallel_for(kernel, B, cost * B * V, *arguments)

    return launch


@jit.device_function
def n_chunks(n):
    """Return the number of chunks of a row of `n`."""
    return (n + CHUNK - 1) // CHUNK


@jit.device_function
def fill(row, value):
    """Fill a row with one value."""
    n, at, values = len(row), simd.address(row), simd.splat(value)
    for d in range(0, n - 15, 16):
        simd.store_f32(at + 4 * d, values)
    for d in range(n // 16 * 16, n):
        row[d] = value


@jit.device_function
def scale(row, factor):
    """Multiply a row by one value."""
    n, at, factors = len(row), simd.address(row), simd.splat(factor)
    for d in range(0, n - 15, 16):
        simd.store_f32(at + 4 * d, simd.mul(simd.load_f32(at + 4 * d), factors))
    for d in range(n // 16 * 16, n):
        row[d] *= factor


@jit.device_function
def keep_from(row, least, out):
    """Copy a row with -inf for the elements below `least`."""
    n, at, target = len(row), simd.address(row), simd.address(out)
    bound, excluded = simd.splat(least), simd.splat(-np.inf)
    for d in range(0, n - 15, 16):
        x = simd.load_f32(at + 4 * d)
        simd.store_f32(target + 4 * d, where_ge(x, bound, x, excluded))
    for d in range(n // 16 * 16, n):
        out[d] = row[d] if row[d] >= least else -np.inf


@jit.device_function
def logits_pass(row, tops):
    """Return the largest element and whether the row has a NaN."""
    n, at = len(row), simd.address(row)
    sign = simd.splat_i32(0)
    magnitude, infinity = simd.splat_i32(0x7FFFFFFF), simd.splat_i32(INFINITY_BITS)
    largest, bad = np.float32(-np.inf), False
    for c in range(len(tops)):
        stop = min(n, (c + 1) * CHUNK)
        whole = stop - (stop - c * CHUNK) % 16
        top = simd.splat(-np.inf)
        for d in range(c * CHUNK, whole, 16):
            x = simd.load_f32(at + 4 * d)
            top = where_ge(x, top, x, top)  # one instruction, unlike maximum
            # negative if and only if the magnitude is above infinity: a NaN
            sign = simd.or_(sign, simd.sub(infinity, simd.and_(simd.as_i32(x), magnitude)))
        chunk_top = simd.max(top)
        for d in range(whole, stop):
            chunk_top = max(chunk_top, row[d])
            bad = bad or row[d] != row[d]
        tops[c] = chunk_top
        largest = max(largest, chunk_top)
    negative = simd.max(simd.to_f32(simd.shr(sign, simd.splat_i32(31))))
    return largest, bad or negative > 0.0


@jit.device_function
def probs_pass(row, tops, sums):
    """Return the sum of a row, or -1 if an element is negative, infinite or NaN."""
    n, at = len(row), simd.address(row)
    zero = simd.splat(0.0)
    below = zero
    total, bad = 0.0, False
    for c in range(len(tops)):
        stop = min(n, (c + 1) * CHUNK)
        whole = stop - (stop - c * CHUNK) % 16
        top, parts = simd.splat(-np.inf), wide_zero()
        for d in range(c * CHUNK, whole, 16):
            x = simd.load_f32(at + 4 * d)
            top = where_ge(x, top, x, top)  # one instruction, unlike maximum
            below = simd.maximum(below, simd.sub(zero, x))
            parts = wide_add(parts, x)
        chunk_top, chunk_sum = simd.max(top), wide_sum(parts)
        for d in range(whole, stop):
            chunk_top = max(chunk_top, row[d])
            bad = bad or row[d] < 0.0
            chunk_sum += np.float64(row[d])
        tops[c], sums[c] = chunk_top, chunk_sum
        total += chunk_sum
    if bad or simd.max(below) > 0.0 or not total < np.inf:  # the sum of a NaN is a NaN
        return -1.0
    return total


@jit.device_function
def _exp_vector(x, minus, times):
    """Return exp((x - minus) * times), 0 for -inf."""
    low = simd.splat(LOWEST)
    x = simd.maximum(x, low)
    seen = simd.minimum(simd.sub(x, low), simd.splat(1.0))  # simd.exp makes 1e-38 of -inf
    return simd.mul(simd.exp(simd.mul(simd.sub(x, minus), times)), seen)


@jit.device_function
def exp_pass(row, shift, factor, target, tops, sums):
    """Write exp((x - shift) * factor) to `target`; return the sum.

    A chunk is added in float32, 8 numbers per lane, with a smaller error than that of exp.
    """
    n, at, to = len(row), simd.address(row), simd.address(target)
    minus, times = simd.splat(shift), simd.splat(factor)
    tail = np.empty(16, np.float32)
    total = 0.0
    for c in range(len(tops)):
        stop = min(n, (c + 1) * CHUNK)
        whole = stop - (stop - c * CHUNK) % 16
        top, parts = simd.splat(0.0), simd.splat(0.0)
        for d in range(c * CHUNK, whole, 16):
            e = _exp_vector(simd.load_f32(at + 4 * d), minus, times)
            simd.store_f32(to + 4 * d, e)
            top = simd.maximum(top, e)
            parts = simd.add(parts, e)
        if whole < stop:
            for d in range(16):
                tail[d] = row[whole + d] if whole + d < stop else -np.inf
            e = _exp_vector(simd.load_f32(simd.address(tail)), minus, times)
            simd.store_f32(simd.address(tail), e)
            top = simd.maximum(top, e)
            parts = simd.add(parts, e)
            for d in range(whole, stop):
                target[d] = tail[d - whole]
        tops[c], sums[c] = simd.max(top), np.float64(simd.sum(parts))
        total += sums[c]
    return total


@jit.device_function
def _log_pass(row, target):
    """Write ln x to `target`, subnormals as the smallest normal; return sum x ln x."""
    n, at, to = len(row), simd.address(row), simd.address(target)
    tail = np.zeros(16, np.float32)
    tiny, total = simd.splat(TINY), wide_zero()
    for d in range(0, n - 15, 16):
        x = simd.load_f32(at + 4 * d)
        logs = log(simd.maximum(x, tiny))
        simd.store_f32(to + 4 * d, logs)
        total = wide_add(total, simd.mul(x, logs))
    for d in range(n // 16 * 16, n):
        tail[d % 16] = row[d]
    x = simd.load_f32(simd.address(tail))
    logs = log(simd.maximum(x, tiny))
    simd.store_f32(simd.address(tail), logs)
    for d in range(n // 16 * 16, n):
        target[d] = tail[d % 16]
    return wide_sum(wide_add(total, simd.mul(x, logs)))  # the lanes past the end add 0


@jit.device_function
def typical_pass(row, total, ranks):
    """Write -abs(ln p - E[ln p]) to `ranks`, -inf for p = 0; the most typical is the largest.

    Normalization by `total` cancels: it shifts ln x and its mean alike.
    """
    mean = np.float32(_log_pass(row, ranks) / total)
    for d in range(len(row)):
        ranks[d] = -abs(ranks[d] - mean) if row[d] > 0.0 else -np.inf
