"""Float arithmetic as the instructions define it: formats NumPy lacks, and exact rounding.

Everything takes and returns NumPy arrays or scalars.  Sums and products of float32 are rounded
once: they are formed in float64 with the sticky bit of what float64 could not hold ("rounding to
odd", Boldo and Melquiond 2008), which makes the second rounding harmless.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

_ODD = np.int64(1)
_TINY32 = np.float64(2.0**-126)


def bf16_to_f32(bits: Any) -> Any:
    """Return bfloat16 bit patterns (uint16) as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Any, mode: str = "rn") -> Any:
    """Round float32 to bfloat16 bits (uint16); NaN becomes 0x7fff."""
    u = x.view(np.uint32)
    if mode == "rn":
        r = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    else:
        r = u >> np.uint32(16)
        inexact = (u & np.uint32(0xFFFF)) != 0
        away = {"rz": False, "rm": (u >> np.uint32(31)) != 0, "rp": (u >> np.uint32(31)) == 0}[mode]
        r = r + (inexact & away).astype(np.uint32)
    return np.where(np.isnan(x), np.uint16(0x7FFF), r.astype(np.uint16))


def f64_to_bf16(x: Any, mode: str = "rn") -> Any:
    """Round float64 to bfloat16 bits once."""
    r = narrow(x, np.float32, "rz")
    inexact = (r.astype(np.float64) != x) & np.isfinite(x)
    bits = r.view(np.uint32) | inexact.astype(np.uint32)  # round to odd, then round again
    return f32_to_bf16(bits.view(np.float32), mode)


def split16(words: Any) -> tuple[Any, Any]:
    """Return the low and the high half of 32-bit words (uint16)."""
    return (words & np.uint32(0xFFFF)).astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)


def join16(low: Any, high: Any) -> Any:
    """Return 32-bit words of two 16-bit halves."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Return ``(s, e)`` with ``s = fl(a + b)`` and ``s + e = a + b`` exactly (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def add_to_odd(a: Any, b: Any) -> Any:
    """Return ``a + b`` (float64) rounded to odd: the last bit is set when inexact."""
    s, e = two_sum(a, b)
    fix = (e != 0) & np.isfinite(s) & np.isfinite(e)
    bits = s.view(np.int64)
    even = (bits & _ODD) == 0
    step = np.where((e > 0) == (s > 0), _ODD, -_ODD)
    return np.where(fix & even, bits + step, bits).view(np.float64)


def narrow(x: Any, dtype: Any, mode: str = "rn") -> Any:
    """Round float64 `x` to `dtype` in the given mode (``rn rz rm rp rna``)."""
    r = x.astype(dtype)
    if mode == "rn":
        return r
    back = r.astype(np.float64)
    down, up = np.nextafter(r, dtype(-np.inf)), np.nextafter(r, dtype(np.inf))
    over, under = back > x, back < x
    if mode == "rm":
        return np.where(over, down, r)
    if mode == "rp":
        return np.where(under, up, r)
    return np.where(over & (x > 0), down, np.where(under & (x < 0), up, r))


def fma32(a: Any, b: Any, c: Any, mode: str = "rn") -> Any:
    """Return ``a * b + c`` for float32, rounded once."""
    p = a.astype(np.float64) * b.astype(np.float64)  # exact: 24 + 24 bits
    c = c.astype(np.float64)
    if mode != "rn":
        return narrow(_with_zero_sign(add_to_odd(p, c), p, c, mode), np.float32, mode)
    s = p + c
    r = s.astype(np.float32)
    # Rounding twice differs from once only if float64 landed on a midpoint of float32 (the 29
    # dropped bits are 100...0), or where float32 is subnormal and drops more bits.
    tie = (s.view(np.int64) & np.int64(0x1FFFFFFF)) == np.int64(0x10000000)
    tie |= (np.abs(s) < _TINY32) & (s != 0)
    if not tie.any():
        return r
    if tie.ndim == 0:
        return add_to_odd(p, c).astype(np.float32)[()]
    p, c = np.broadcast_to(p, tie.shape), np.broadcast_to(c, tie.shape)
    r[tie] = add_to_odd(p[tie], c[tie]).astype(np.float32)
    return r


def add32(a: Any, b: Any, mode: str) -> Any:
    """Return ``a + b`` for float32 in a directed rounding mode."""
    return fma32(a, np.float32(1), b, mode)


def mul32(a: Any, b: Any, mode: str) -> Any:
    """Return ``a * b`` for float32 in a directed rounding mode."""
    return narrow(a.astype(np.float64) * b.astype(np.float64), np.float32, mode)


def _with_zero_sign(s: Any, p: Any, c: Any, mode: str) -> Any:
    """Give an exact cancellation its IEEE 754 sign: -0 when rounding down."""
    if mode != "rm":
        return s
    return np.where((s == 0) & ((p != 0) | (np.signbit(p) != np.signbit(c))), -0.0, s)


def div32(a: Any, b: Any, mode: str) -> Any:
    """Return ``a / b`` for float32 in a directed rounding mode."""
    r = a / b
    q, d = r.astype(np.float64) * b.astype(np.float64), a.astype(np.float64)
    flip = np.signbit(b)
    return _directed(r, np.where(flip, q < d, q > d), np.where(flip, q > d, q < d), mode)


def sqrt32(a: Any, mode: str) -> Any:
    """Return the square root of float32 in a directed rounding mode."""
    r = np.sqrt(a)
    q, d = r.astype(np.float64) ** 2, a.astype(np.float64)
    return _directed(r, q > d, q < d, mode)


def _directed(r: Any, over: Any, under: Any, mode: str) -> Any:
    """Step a nearest result to its neighbour where it is on the wrong side."""
    dtype = r.dtype.type
    down, up = np.nextafter(r, dtype(-np.inf)), np.nextafter(r, dtype(np.inf))
    over, under = over & ~np.isnan(r), under & ~np.isnan(r)
    if mode == "rm":
        return np.where(over, down, r)
    if mode == "rp":
        return np.where(under, up, r)
    return np.where(over & ~np.signbit(r), down, np.where(under & np.signbit(r), up, r))


def two_product(a: Any, b: Any) -> tuple[Any, Any]:
    """Return ``(p, e)`` with ``p = fl(a * b)``, ``p + e = a * b`` (Dekker; no over-/underflow)."""
    split = np.float64(134217729.0)  # 2**27 + 1
    ca, cb = split * a, split * b
    ah, bh = ca - (ca - a), cb - (cb - b)
    al, bl = a - ah, b - bh
    p = a * b
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def fma64(a: Any, b: Any, c: Any, mode: str = "rn") -> Any:
    """Return ``a * b + c`` for float64, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    shape = a.shape
    a, b, c = a.reshape(-1), b.reshape(-1), c.reshape(-1)
    if mode == "rn":
        ph, pl = two_product(a, b)
        th, tl = two_sum(c, pl)
        vh, vl = two_sum(ph, th)
        r = vh + add_to_odd(tl, vl)
        # Without intermediate overflow or underflow the steps above are exact.
        size_p, size_c = np.abs(ph), np.abs(c)
        safe = ((size_p > 1e-200) | (a == 0) | (b == 0)) & (size_p < 1e280)
        safe &= (np.abs(a) < 1e280) & (np.abs(b) < 1e280)
        safe &= ((size_c > 1e-200) | (c == 0)) & (size_c < 1e280) & (np.abs(r) > 1e-200)
    else:
        r, safe = np.empty(a.shape), np.zeros(a.shape, np.bool_)
    for j in np.flatnonzero(~safe):
        r[j] = exact64(lambda x, y, z: x * y + z, (a[j], b[j], c[j]), mode)
    return r.reshape(shape)[()]


def exact64(f: Any, values: tuple[Any, ...], mode: str) -> float:
    """Evaluate a rational function of float64 values exactly and round it once.

    `f` is called with fractions, or, when a value is not finite or the result is zero, with
    floats (whose signs, infinities and NaN are then right).
    """
    floats = [np.float64(v) for v in values]
    plain = f(*floats)
    if not all(np.isfinite(floats)):
        return float(plain)
    try:
        exact = f(*[Fraction(float(v)) for v in values])
    except ZeroDivisionError:
        return float(plain)
    if exact == 0:
        signed = np.signbit(plain) if plain == 0 else False
        negative = mode == "rm" and len(values) != 1 and _cancelled(values)
        return -0.0 if signed or negative else 0.0
    return round_fraction(exact, mode)


def _cancelled(values: tuple[Any, ...]) -> bool:
    """Return whether a zero result came from two terms that cancelled."""
    if len(values) == 3:
        product = np.copysign(1.0, values[0]) * np.copysign(1.0, values[1])
        return bool(np.signbit(product) != np.signbit(values[2]))
    return bool(
        values[0] == -values[1]
        and (values[0] != 0 or np.signbit(values[0]) != np.signbit(values[1]))
    )


def round_fraction(exact: Fraction, mode: str) -> float:
    """Round a nonzero fraction to float64 in the given mode."""
    try:
        r = float(exact)
    except OverflowError:
        r = float("inf") if exact > 0 else float("-inf")
    if mode == "rn":
        return r
    over = r == float("inf") or (r != float("-inf") and Fraction(r) > exact)
    under = r == float("-inf") or (r != float("inf") and Fraction(r) < exact)
    if over and (mode == "rm" or (mode == "rz" and exact > 0)):
        return float(np.nextafter(r, -np.inf))
    if under and (mode == "rp" or (mode == "rz" and exact < 0)):
        return float(np.nextafter(r, np.inf))
    return r


def flush(x: Any) -> Any:
    """Replace float32 subnormals by zeros of the same sign (``.ftz``)."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def saturate(x: Any) -> Any:
    """Clamp to [0, 1]; NaN becomes +0 (``.sat``)."""
    one = x.dtype.type(1)
    return np.where(x > 0, np.minimum(x, one), x.dtype.type(0))


def minimum(a: Any, b: Any, *, propagate: bool = False) -> Any:
    """Return ``min`` of PTX: a number beats NaN unless `propagate`; -0 is below +0."""
    return _extreme(a, b, np.fmin, np.bitwise_or, propagate)


def maximum(a: Any, b: Any, *, propagate: bool = False) -> Any:
    """Return ``max`` of PTX: a number beats NaN unless `propagate`; +0 is above -0."""
    return _extreme(a, b, np.fmax, np.bitwise_and, propagate)


def _extreme(a: Any, b: Any, pick: Any, zeros: Any, propagate: bool) -> Any:
    dtype = a.dtype.type
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize]
    r = pick(a, b)
    r = np.where((a == 0) & (b == 0), zeros(a.view(bits), b.view(bits)).view(dtype), r)
    if propagate:
        r = np.where(np.isnan(a) | np.isnan(b), dtype(np.nan), r)
    return r.astype(dtype)


def _fp8_table(exponent_bits: int) -> np.ndarray:
    """Values of the 256 codes of e4m3 (no infinities) or e5m2."""
    codes = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    e, m = (codes >> mantissa_bits) & (2**exponent_bits - 1), codes & (2**mantissa_bits - 1)
    scale = 2.0**-mantissa_bits
    value = np.where(e == 0, m * scale * 2.0 ** (1 - bias), (1 + m * scale) * 2.0 ** (e - bias))
    if exponent_bits == 4:
        value = np.where((e == 15) & (m == 7), np.nan, value)
    else:
        value = np.where(e == 31, np.where(m == 0, np.inf, np.nan), value)
    return np.where(codes >= 128, -value, value)


FP8 = {"e4m3": _fp8_table(4), "e5m2": _fp8_table(5)}


def to_fp8(x: Any, name: str) -> Any:
    """Round to 8 bits, to nearest even, finite values saturating (``cvt.rn.satfinite``)."""
    table = FP8[name][:128]
    finite = table[np.isfinite(table)]
    size = np.minimum(np.abs(x.astype(np.float64)), finite[-1])
    low = np.searchsorted(finite, size, side="right") - 1
    high = np.minimum(low + 1, len(finite) - 1)
    below, above = size - finite[low], finite[high] - size
    up = (above < below) | ((above == below) & (low % 2 == 1))
    code = np.where(up, high, low) | (np.signbit(x) * 128)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def round_tf32(x: Any, mode: str = "rna") -> Any:
    """Round float32 to the 10-bit mantissa of tf32 (kept in float32's layout), as uint32 bits."""
    u = x.view(np.uint32)
    if mode == "rna":
        r = u + np.uint32(0x1000)
    elif mode == "rn":
        r = u + np.uint32(0xFFF) + ((u >> np.uint32(13)) & np.uint32(1))
    else:
        r = u
    return np.where(np.isfinite(x), r & np.uint32(0xFFFFE000), u)
