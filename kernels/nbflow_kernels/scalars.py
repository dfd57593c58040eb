"""What the readable loops of the families (`loops.py`) share: one number at a time, no vectors.

A `loops.py` stands beside the kernels of a family and shows their algorithm: the order of the
additions, the tiles, what is decoded when.  It is compiled like a kernel, only without fusing on
its own account, and gives the kernel's bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._jit import strict_njit


@strict_njit
def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c for float32, rounded once but for one case in 2 ** 29.

    The product is exact in float64.  The sum is rounded there first, which changes the result only
    if it comes to lie halfway between two float32.
    """
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


@strict_njit
def tree_sum(lanes: Any) -> Any:
    """Return the sum of 16 numbers as `simd.sum` adds them: i and i + 8, then i and i + 4, ..."""
    sums = lanes.copy()
    width = 8
    while width > 0:
        for i in range(width):
            sums[i] += sums[i + width]
        width //= 2
    return sums[0]
