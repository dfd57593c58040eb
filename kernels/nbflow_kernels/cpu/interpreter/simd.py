"""NumPy fallbacks of `nbflow_kernels.cpu.simd`: vectors of 16 lanes are NumPy arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.interpreter.memory import LANES, bf16_to_f32, read, write

Vector = NDArray[Any]


# ---- loads and stores -----------------------------------------------------------------------


def load_f32(addr: Any) -> Vector:
    """Return 16 float32."""
    return read(addr, np.float32, LANES)


def load_f16(addr: Any) -> Vector:
    """Return 16 float16, widened."""
    return read(addr, np.float16, LANES).astype(np.float32)


def load_bf16(addr: Any) -> Vector:
    """Return 16 bfloat16, widened."""
    return bf16_to_f32(read(addr, np.uint16, LANES))


def load_i32(addr: Any) -> Vector:
    """Return 16 int32."""
    return read(addr, np.int32, LANES)


def load_u8(addr: Any) -> Vector:
    """Return 16 unsigned bytes as int32."""
    return read(addr, np.uint8, LANES).astype(np.int32)


def load_i8(addr: Any) -> Vector:
    """Return 16 signed bytes as int32."""
    return read(addr, np.int8, LANES).astype(np.int32)


def store_f32(addr: Any, v: Vector) -> None:
    """Write 16 float32."""
    write(addr, _of(v, np.float32))


def store_i32(addr: Any, v: Vector) -> None:
    """Write 16 int32."""
    write(addr, _of(v, np.int32))


def _of(v: Vector, dtype: Any) -> Vector:
    """Return a vector; raise as the compiler would if it is of another type."""
    if v.dtype != dtype or v.shape != (LANES,):
        raise TypeError(f"wanted 16 lanes of {np.dtype(dtype)}, got {v.shape} of {v.dtype}")
    return v


def splat(x: Any) -> Vector:
    """Return a float32 in all lanes."""
    return np.full(LANES, x, np.float32)


def splat_f16(addr: Any) -> Vector:
    """Return one float16 in memory, as float32, in all lanes."""
    return np.full(LANES, read(addr, np.float16, 1)[0], np.float32)


def splat_i32(i: Any) -> Vector:
    """Return the low 32 bits of an integer in all lanes."""
    return np.full(LANES, int(i) & 0xFFFFFFFF, np.uint32).view(np.int32)


# ---- lane by lane ---------------------------------------------------------------------------


def _same(a: Vector, b: Vector) -> None:
    if a.dtype != b.dtype or a.shape != b.shape:
        raise TypeError(f"lanes do not match: {a.shape} of {a.dtype}, {b.shape} of {b.dtype}")


def _lane_by_lane(operation: Callable[..., Any], dtype: Any = None) -> Callable[..., Vector]:
    def apply(a: Vector, b: Vector) -> Vector:
        """Apply the operation to two vectors of one type; integers wrap around."""
        _same(a, b)
        result: Vector = operation(a if dtype is None else _of(a, dtype), b)
        return result

    return apply


add, sub, mul = map(_lane_by_lane, (operator.add, operator.sub, operator.mul))
and_, or_, shl = map(_lane_by_lane, (operator.and_, operator.or_, operator.lshift))
div = _lane_by_lane(operator.truediv, np.float32)
maximum = _lane_by_lane(np.fmax, np.float32)
minimum = _lane_by_lane(np.fmin, np.float32)


def shr(a: Vector, b: Vector) -> Vector:
    """Shift right, zeros coming in."""
    _same(a, b)
    unsigned = a.dtype.str.replace("i", "u")
    shifted: Vector = a.view(unsigned) >> b.view(unsigned)
    return shifted.view(a.dtype)


def fma(a: Vector, b: Vector, c: Vector) -> Vector:
    """Return a * b + c with one rounding."""
    _same(a, b)
    _same(a, c)
    product = np.multiply(a, b, dtype=np.float64)  # exact: 2 * 24 of 53 bits
    total = product + c
    if not _may_round_twice(total):
        return total.astype(np.float32)
    # Round to odd: a last bit that is set where something was cut off takes no part in a tie.
    part = total - product
    rest = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    inexact = (rest != 0) & (bits & 1 == 0) & np.isfinite(total)
    away = np.where((rest > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact, away, 0)).view(np.float64).astype(np.float32)


def _may_round_twice(total: Vector) -> bool:
    """Return whether a float64 lies halfway between two float32, or where these are denormal."""
    halfway = total.view(np.int64) & 0x1FFFFFFF == 0x10000000
    return bool((halfway | (np.abs(total) < 2.0**-125)).any())


def rint(v: Vector) -> Vector:
    """Return the nearest integer, halves to even."""
    return np.rint(_of(v, np.float32))


def to_f32(v: Vector) -> Vector:
    """Convert int32 to float32."""
    return _of(v, np.int32).astype(np.float32)


def to_i32(v: Vector) -> Vector:
    """Convert float32 to int32, toward zero."""
    return _of(v, np.float32).astype(np.int32)


def as_i32(v: Vector) -> Vector:
    """Return the bits of float32 as int32."""
    return _of(v, np.float32).view(np.int32)


def as_f32(v: Vector) -> Vector:
    """Return the float32 with these bits."""
    return _of(v, np.int32).view(np.float32)


# ---- across lanes ---------------------------------------------------------------------------


def sum(v: Vector) -> Any:
    """Return the sum: lanes i and i + 8, then i and i + 4, ..."""
    while len(v) > 1:
        v = v[: len(v) // 2] + v[len(v) // 2 :]
    return v[0]


def max(v: Vector) -> Any:
    """Return the greatest lane; NaN only if all are."""
    return np.fmax.reduce(v)


# ---- scalars --------------------------------------------------------------------------------


def half_to_float(bits):
    """Return the float16 with these bits as float32."""
    return np.float32(np.uint16(int(bits) & 0xFFFF).view(np.float16))


def float_to_half(x):
    """Return the bits of the float16 nearest to `x`, halves to even."""
    return np.float32(x).astype(np.float16).view(np.uint16)


def bits_to_float(bits):
    """Return the float32 with these bits."""
    return np.uint32(int(bits) & 0xFFFFFFFF).view(np.float32)


def address(array: NDArray[Any]) -> int:
    """Return the address of an array's first element."""
    return array.ctypes.data
