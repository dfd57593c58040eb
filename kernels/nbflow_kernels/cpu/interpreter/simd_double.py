"""NumPy fallbacks of `nbflow_kernels.cpu.simd_double`."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.interpreter.memory import LANES

Vector = NDArray[Any]


def widen(v: Vector) -> Vector:
    """Return float32 lanes as float64."""
    return v.astype(np.float64)


def narrow(v: Vector) -> Vector:
    """Return float64 lanes rounded to float32."""
    return v.astype(np.float32)


def splat(x: Any) -> Vector:
    """Return one scalar in all lanes."""
    return np.full(LANES, x, np.float64)


def add(a: Vector, b: Vector) -> Vector:
    """Return the sums."""
    return np.add(a, b)


def sub(a: Vector, b: Vector) -> Vector:
    """Return the differences."""
    return np.subtract(a, b)


def mul(a: Vector, b: Vector) -> Vector:
    """Return the products."""
    return np.multiply(a, b)


def div(a: Vector, b: Vector) -> Vector:
    """Return the quotients."""
    return np.divide(a, b)


def fma(a: Vector, b: Vector, c: Vector) -> Vector:
    """Return a * b + c with one rounding."""
    return np.array([_fma(*lane) for lane in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)])


def _fma(a: float, b: float, c: float) -> float:
    plain = a * b + c
    if not math.isfinite(plain):
        return plain
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return float(exact) if exact else plain  # a zero keeps its sign


def rint(v: Vector) -> Vector:
    """Return the nearest integers, halves to even."""
    return np.rint(v)


def where_less(a: Vector, b: Vector, x: Vector, y: Vector) -> Vector:
    """Return `x` where a < b, else `y`."""
    return np.where(a < b, x, y)
