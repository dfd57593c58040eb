"""The ops as plain loops, for reading; sums are taken one number after the other."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit


@jit.kernel(strict=True)
def match_rms(x, like, least, out):
    """Scale rows of `x` (T, E) to the root mean square of those of `like`."""
    T, E = x.shape
    for t in range(T):
        own, other = 0.0, 0.0
        for i in range(E):
            own += np.float64(x[t, i]) * np.float64(x[t, i])
            other += np.float64(like[t, i]) * np.float64(like[t, i])
        factor = np.float32(np.sqrt(other / E / max(own / E, least)))
        for i in range(E):
            out[t, i] = x[t, i] * factor


@jit.kernel(strict=True)
def row_moments(x, out):
    """Write the sum and the sum of squares of rows of `x` (T, I) to `out` (T, 2)."""
    for t in range(x.shape[0]):
        total, squares = 0.0, 0.0
        for i in range(x.shape[1]):
            total += np.float64(x[t, i])
            squares += np.float64(x[t, i]) * np.float64(x[t, i])
        out[t, 0], out[t, 1] = np.float32(total), np.float32(squares)


@jit.kernel(strict=True)
def gaussian_topk(x, moments, width, deviations, out):
    """Subtract mean and `deviations` standard deviations of rows of `width` columns, and clip."""
    for t in range(x.shape[0]):
        mean = np.float64(moments[t, 0]) / width
        variance = np.float64(moments[t, 1]) / width - mean * mean
        cutoff = np.float32(mean + deviations * np.sqrt(max(variance, 0.0)))
        for i in range(x.shape[1]):
            v = x[t, i] - cutoff
            out[t, i] = v if not v < 0.0 else np.float32(0.0)  # a NaN stays
