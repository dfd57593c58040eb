"""Twins of `nbflow_kernels.cpu.simd_compare`; `f64x16` is an array of float64."""

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


def float_of(bits):
    """Return the float32 with these bits."""
    return np.uint32(int(bits) & 0xFFFFFFFF).view(np.float32)
