"""Philox4x32-10 random numbers, a function of seed, offset and index."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit


@jit.kernel
def uniform(seed, offset, index):
    """Return random number `index` in [0, 1) of a seed and an offset (all uint64).

    The counter is (offset, index), the key the seed; J. Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", SC 2011.
    """
    word = np.uint64(0xFFFFFFFF)
    half, weight = np.uint64(32), np.uint64(0xD2511F53)
    c0, c1, c2, c3 = offset & word, offset >> half, index & word, index >> half
    k0, k1 = seed & word, seed >> half
    for _ in range(10):
        a, b = weight * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & word, (a >> half) ^ c3 ^ k1, a & word
        k0 = (k0 + np.uint64(0x9E3779B9)) & word
        k1 = (k1 + np.uint64(0xBB67AE85)) & word
    high, low = np.float64(c0 >> np.uint64(5)), np.float64(c1 >> np.uint64(6))
    return (high * 67108864.0 + low) / 9007199254740992.0  # 2**26, 2**53: exact
