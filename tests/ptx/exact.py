"""Float rounding in exact rational arithmetic, one value at a time: the reference of the tests."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

#: significand bits, lowest exponent of a normal number, highest exponent
FORMATS = {
    "f16": (11, -14, 15),
    "bf16": (8, -126, 127),
    "f32": (24, -126, 127),
    "f64": (53, -1022, 1023),
}


def round_to(x: Fraction, name: str, mode: str = "rn") -> float:
    """Round a fraction to a format; the result is exact as a Python float."""
    bits, low, high = FORMATS[name]
    if x == 0:
        return 0.0
    size = abs(x)
    e = math.floor(math.log2(size.numerator) - math.log2(size.denominator))
    while Fraction(2) ** e > size:
        e -= 1
    while Fraction(2) ** (e + 1) <= size:
        e += 1
    unit = Fraction(2) ** (max(e, low) - bits + 1)
    q, rest = divmod(size, unit)
    negative = x < 0
    up = {
        "rn": rest * 2 > unit or (rest * 2 == unit and q % 2 == 1),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    value = (q + up) * unit
    largest = (2 - Fraction(2) ** (1 - bits)) * Fraction(2) ** high
    if value > largest:
        to_infinity = mode == "rn" or ((mode == "rm") == negative and mode != "rz")
        return math.copysign(math.inf if to_infinity else float(largest), -1 if negative else 1)
    return -float(value) if negative else float(value)


def decode(bits: int, name: str) -> float:
    """Return the value of a bit pattern."""
    if name == "bf16":
        return float(np.uint32(bits << 16).view(np.float32))
    kinds = {
        "f16": (np.uint16, np.float16),
        "f32": (np.uint32, np.float32),
        "f64": (np.uint64, np.float64),
    }
    u, f = kinds[name]
    return float(u(bits).view(f))


def encode(x: float, name: str) -> int:
    """Return the bit pattern of a value the format holds exactly (NaN: the canonical one)."""
    if math.isnan(x):
        return {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8000000000000}[name]
    if name == "bf16":
        return int(np.float32(x).view(np.uint32)) >> 16
    kinds = {
        "f16": (np.uint16, np.float16),
        "f32": (np.uint32, np.float32),
        "f64": (np.uint64, np.float64),
    }
    u, f = kinds[name]
    return int(f(x).view(u))
