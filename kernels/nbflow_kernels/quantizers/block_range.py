"""Smallest and largest weight of a block, and the check for finite weights, vectorized."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_compare import choose, less
from nbflow_kernels.errors import UsageError

INFINITY_BITS = 0x7F800000  # float32: larger ones without the sign are NaN
CHECKED = 1 << 14  # weights a call of the check takes at once


@jit.device_function(strict=True)
def smallest_and_largest(x):
    """Return the extremes of finite weights (n,), n a multiple of 16.

    Of 0 and -0, the first in the block counts: a published base has its sign.
    """
    at = simd.address(x)
    low = high = simd.load_f32(at)
    for i in range(at + 64, at + 4 * len(x), 64):
        v = simd.load_f32(i)
        low, high = choose(less(v, low), v, low), choose(less(high, v), v, high)
    smallest, largest = -simd.max(simd.mul(low, simd.splat(-1.0))), simd.max(high)
    if smallest == 0 or largest == 0:
        smallest = largest = x[0]
        for i in range(1, len(x)):
            smallest, largest = min(smallest, x[i]), max(largest, x[i])
    return smallest, largest


@jit.kernel
def _largest_bits(bits, largest, start, stop):
    """Write the largest bits, without the signs, of parts [start, stop) of a flat array."""
    for part in range(start, stop):
        most = np.int32(0)
        for word in bits[CHECKED * part : CHECKED * (part + 1)]:
            most = max(most, word & np.int32(0x7FFFFFFF))
        largest[part] = most


def finite_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return the array as contiguous float32, or raise naming the first non-finite value."""
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(array, dtype=np.float32)
    bits = values.reshape(-1).view(np.int32)
    largest = np.empty(-(-len(bits) // CHECKED), np.int32)
    parallel_for(_largest_bits, len(largest), 0.5 * len(bits), bits, largest)
    if not (largest >= INFINITY_BITS).any():
        return values
    finite = np.isfinite(values)
    where = tuple(int(i) for i in np.argwhere(~finite)[0])
    raise UsageError(
        f"x must be finite in float32, got {array[where]} at {list(where)} "
        f"({finite.size - int(finite.sum())} such values); repair the checkpoint"
    )
