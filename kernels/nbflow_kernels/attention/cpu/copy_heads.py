"""Copy of the first columns of every head between matrices of heads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for


def copy_heads(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Copy (T, H, n) into another view of that shape; arguments are not checked."""
    parallel_for(_copy_heads, len(x), float(x.size), x, out)


@jit.kernel
def _copy_heads(x, out, start, stop):
    for t in range(start, stop):
        for h in range(x.shape[1]):
            for d in range(x.shape[2]):
                out[t, h, d] = x[t, h, d]
