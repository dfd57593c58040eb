"""NumPy fallbacks of `nbflow_kernels.cpu.simd_compare`; a mask is int32 lanes of -1 or 0."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.interpreter import simd
from nbflow_kernels.cpu.interpreter.memory import LANES

Vector = NDArray[Any]


def any_ge(a: Vector, b: Vector) -> bool:
    """Return whether a lane of `a` is at least that of `b`."""
    return bool((a >= b).any())


def where_ge(a: Vector, b: Vector, x: Vector, y: Vector) -> Vector:
    """Return `x` where a >= b, else `y`."""
    return np.where(a >= b, x, y)


def wide_zero() -> Vector:
    """Return zeros."""
    return np.zeros(LANES)


def wide_add(total: Vector, v: Vector) -> Vector:
    """Return `total` plus float32 lanes, added in float64."""
    sums: Vector = total + v.astype(np.float64)
    return sums


def wide_sum(total: Vector) -> Any:
    """Return the sum of the lanes: i and i + 8, then i and i + 4, ..."""
    return simd.sum(total)


def bits_of(x):
    """Return the bits of a float32."""
    return int(np.float32(x).view(np.int32))


def less(a: Vector, b: Vector) -> Vector:
    """Return the mask of a < b; false for NaN."""
    mask: Vector = (a < b).astype(np.int32)
    return -mask


def differs(a: Vector, b: Vector) -> Vector:
    """Return the mask of a != b; true for NaN."""
    mask: Vector = (a != b).astype(np.int32)
    return -mask


def choose(mask: Vector, yes: Vector, no: Vector) -> Vector:
    """Return `yes` where the mask is true, else `no`."""
    return np.where(mask != 0, yes, no)


def any_lane(mask: Vector) -> bool:
    """Return whether the mask is true in any lane."""
    return bool((mask != 0).any())


def absolute(v: Vector) -> Vector:
    """Return the magnitudes."""
    return np.abs(v)


def sqrt(v: Vector) -> Vector:
    """Return the square roots."""
    return np.sqrt(v)


def smaller(a: Vector, b: Vector) -> Vector:
    """Return the smaller int32."""
    return np.minimum(a, b)


def larger(a: Vector, b: Vector) -> Vector:
    """Return the larger int32."""
    return np.maximum(a, b)
