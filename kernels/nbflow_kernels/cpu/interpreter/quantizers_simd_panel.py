"""Twins of `nbflow_kernels.quantizers.simd_panel`; a mask is int32 lanes of -1 or 0."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[Any]


def less(a: Vector, b: Vector) -> Vector:
    """Return the mask of a < b; false where one is not a number."""
    mask: Vector = (a < b).astype(np.int32)
    return -mask


def differs(a: Vector, b: Vector) -> Vector:
    """Return the mask of a != b; true where one is not a number."""
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
