"""Ops on rows by their statistics on the CPU: row by row, 16 columns at a time."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_math import keep_nan
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to


def match_rms(x, like, least, out):
    """See `nbflow_kernels.match_rms`."""
    hold(x, like, out)
    T, E = x.shape
    parallel_for(
        _match_rms, T, 3.0 * T * E,
        address_of(x), x.strides[0], address_of(like), like.strides[0],
        address_of(out), out.strides[0], E, least,
    )  # fmt: skip


def row_moments(x, out):
    """See `nbflow_kernels.row_moments`."""
    hold(x)
    T, width = x.shape
    parallel_for(_row_moments, T, 2.0 * T * width, address_of(x), x.strides[0], width, out)


def gaussian_topk(x, moments, width, deviations, out):
    """Cut rows of `width` columns in all, of which `x` has some, given their sums (T, 2)."""
    hold(x, out)
    T, n = x.shape
    parallel_for(
        _gaussian_topk, T, 2.0 * T * n,
        address_of(x), x.strides[0], moments, address_of(out), out.strides[0], n, float(width),
        deviations,
    )  # fmt: skip


@jit.device_function
def _sums(x, n):
    """Return the sum and the sum of squares of n numbers, each in four times 16 lanes."""
    zero = simd.splat(0.0)
    a0 = a1 = a2 = a3 = zero
    b0 = b1 = b2 = b3 = zero
    for i in range(0, n, 64):
        v0, v1 = load_up_to(x + 4 * i, n - i), load_up_to(x + 4 * i + 64, n - i - 16)
        v2, v3 = load_up_to(x + 4 * i + 128, n - i - 32), load_up_to(x + 4 * i + 192, n - i - 48)
        a0, a1, a2, a3 = simd.add(a0, v0), simd.add(a1, v1), simd.add(a2, v2), simd.add(a3, v3)
        b0, b1 = simd.fma(v0, v0, b0), simd.fma(v1, v1, b1)
        b2, b3 = simd.fma(v2, v2, b2), simd.fma(v3, v3, b3)
    total = simd.sum(simd.add(simd.add(a0, a1), simd.add(a2, a3)))
    return total, simd.sum(simd.add(simd.add(b0, b1), simd.add(b2, b3)))


@jit.kernel
def _match_rms(x, x_bytes, like, like_bytes, out, out_bytes, E, least, start, stop):
    """Scale rows [start, stop)."""
    for t in range(start, stop):
        at = x + t * x_bytes
        _, own = _sums(at, E)
        _, other = _sums(like + t * like_bytes, E)
        mean = max(np.float64(own) / E, least)
        factor = simd.splat(np.float32(np.sqrt(np.float64(other) / E / mean)))
        for i in range(0, E, 16):
            v = simd.mul(load_up_to(at + 4 * i, E - i), factor)
            store_up_to(out + t * out_bytes + 4 * i, E - i, v)


@jit.kernel
def _row_moments(x, x_bytes, n, out, start, stop):
    """Write the sums of rows [start, stop)."""
    for t in range(start, stop):
        out[t, 0], out[t, 1] = _sums(x + t * x_bytes, n)


@jit.kernel
def _gaussian_topk(x, x_bytes, moments, out, out_bytes, n, width, deviations, start, stop):
    """Cut rows [start, stop)."""
    for t in range(start, stop):
        mean = np.float64(moments[t, 0]) / width
        variance = np.float64(moments[t, 1]) / width - mean * mean
        deviation = np.sqrt(max(variance, 0.0))
        cutoff = simd.splat(np.float32(mean + deviations * deviation))
        for i in range(0, n, 16):
            v = simd.sub(load_up_to(x + t * x_bytes + 4 * i, n - i), cutoff)
            y = keep_nan(simd.maximum(v, simd.splat(0.0)), v)
            store_up_to(out + t * out_bytes + 4 * i, n - i, y)
