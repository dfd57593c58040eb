"""The normalizations as plain loops, in the order of additions of `cpu`, for reading.

Sums over a row have 64 lanes: lane i adds elements i, i + 64, ...  Lanes i, i + 16, i + 32 and
i + 48 are added as (a + b) + (c + d), and the sixteen results as a tree; the elements after the
last multiple of 64 follow one by one.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.scalar_math import fma, tree_sum


@jit.device_function(strict=True)
def _sum(x, mean, squares):
    """Return the sum of x, or of (x - mean) ** 2."""
    body = len(x) - len(x) % 64
    lanes = np.zeros((4, 16), np.float32)
    for i in range(body):
        a, b = i // 16 % 4, i % 16
        v = x[i] - mean
        lanes[a, b] = fma(v, v, lanes[a, b]) if squares else lanes[a, b] + v
    total = tree_sum((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]))
    for i in range(body, len(x)):
        v = x[i] - mean
        total += v * v if squares else v
    return total


@jit.kernel(strict=True)
def rmsnorm(x, weight, eps, out):
    """Divide each row of `x` (T, E) by its root mean square, times `weight` (E)."""
    for t in range(x.shape[0]):
        mean_square = _sum(x[t], np.float32(0.0), True) / np.float32(x.shape[1])
        scale = np.float32(1.0) / np.sqrt(mean_square + np.float32(eps))
        for i in range(x.shape[1]):
            out[t, i] = x[t, i] * scale * weight[i]


@jit.kernel(strict=True)
def layernorm(x, weight, bias, eps, out):
    """Subtract each row's mean and divide by its standard deviation, times `weight` plus `bias`."""
    E = np.float32(x.shape[1])
    for t in range(x.shape[0]):
        mean = _sum(x[t], np.float32(0.0), False) / E
        variance = _sum(x[t], mean, True) / E
        scale = np.float32(1.0) / np.sqrt(variance + np.float32(eps))
        for i in range(x.shape[1]):
            out[t, i] = fma((x[t, i] - mean) * scale, weight[i], bias[i])
