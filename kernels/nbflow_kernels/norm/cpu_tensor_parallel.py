"""RMSNorm of rows sharded over ranks: local sums of squares, all-reduce, local scaling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for


def sum_squares(x: NDArray[np.float32], counts: bool, out: NDArray[np.float32]) -> None:
    """Write each row's sum of squares (0 unless it counts) to (T,); a launcher."""
    parallel_for(_sum_squares, len(x), float(x.size), x, np.float64(counts), out)


def rmsnorm_with_sums(
    x: NDArray[np.float32],
    sums: NDArray[np.float32],
    weight: NDArray[np.float32],
    width: int,
    eps: float,
    offset: float,
    out: NDArray[np.float32],
) -> None:
    """Normalize shards (T, n) of rows of `width` columns, given the sums of squares (T,)."""
    parallel_for(_scale, len(x), float(x.size), x, sums, weight, float(width), eps, offset, out)


@jit.kernel
def _sum_squares(x, factor, out, start, stop):
    for t in range(start, stop):
        total = 0.0
        for d in range(x.shape[1]):
            total += np.float64(x[t, d]) * np.float64(x[t, d])
        out[t] = np.float32(total * factor)


@jit.kernel
def _scale(x, sums, weight, width, eps, offset, out, start, stop):
    for t in range(start, stop):
        factor = 1.0 / np.sqrt(np.float64(sums[t]) / width + eps)
        for d in range(x.shape[1]):
            out[t, d] = np.float32(np.float64(x[t, d]) * factor * (weight[d] + offset))
