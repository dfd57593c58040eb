"""Scalar helpers of the readable loops (`loops.py`) of the op families.

A `loops.py` shows the algorithm of a family's kernels in plain loops: order of additions, tiles,
decoding.  It is compiled like a kernel but without implicit fusing, and gives the kernel's bits.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit


@jit.kernel(strict=True)
def fma(a, b, c):
    """Return a * b + c for float32, rounded once.

    The product is exact in float64.  The sum is rounded there to the odd one of its two neighbours,
    which never lies halfway between two float32 [1]_.

    References
    ----------
    .. [1] S. Boldo and G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved
       algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008.
    """
    product, c = np.float64(a) * np.float64(b), np.float64(c)
    total = product + c
    added = total - product
    error = (product - (total - added)) + (c - added)  # total + error is exact
    if error > 0.0 or error < 0.0:  # neither for infinities and NaN
        bits = np.float64(total).view(np.int64)
        if bits % 2 == 0:
            bits += 1 if (error > 0.0) == (total > 0.0) else -1
            total = np.int64(bits).view(np.float64)
    return np.float32(total)


@jit.device_function(strict=True)
def tree_sum(lanes):
    """Return the sum of 16 numbers as `simd.sum` adds them: i and i + 8, then i and i + 4, ..."""
    sums = lanes.copy()
    width = 8
    while width > 0:
        for i in range(width):
            sums[i] += sums[i + width]
        width //= 2
    return sums[0]
