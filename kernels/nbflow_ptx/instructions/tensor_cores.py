"""Sums of products as tensor cores round them.

A tensor core adds the products of a pass and the accumulator at once.  It aligns all of them to
the largest exponent, cuts off what lies more than `SumRule.fraction_bits` below it, adds exactly
and cuts the sum to float32 (towards zero).  A term's exponent is that of its operands, added: a
product of significands may be up to 4, and a *subnormal* operand counts with the smallest exponent
of its type, however small it is.  So products with small subnormal operands lose bits.

The rules and their constants are those of Microsoft's MMA-Sim (arXiv:2511.10909), whose authors
found them to be bit-exact on devices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Three = tuple[Any, Any, Any]
#: Exponent of the subnormal numbers of a type.
_SMALLEST_EXPONENT = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14, "f32": -126}
_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
#: Subtracted from the exponent of a zero, so that its products are below any accumulator.
_FOR_ZERO = 1000
#: Products computed at once: their arrays stay in the L2 cache.
_PRODUCTS_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class SumRule:
    """Rounding of a sum of products.

    Attributes
    ----------
    terms : int
        Products of a pass; longer sums take several passes, each of which rounds its result.
    fraction_bits : int
        Terms are cut to this number of bits below the unit of the largest one.
    result_bits : int
        Bits of the result's significand behind its leading one.
    """

    terms: int
    fraction_bits: int
    result_bits: int = 23


@cache
def sum_rule(arch: str, kind: str, *, warpgroup: bool = False) -> SumRule:
    """Return the rule of a device (``"sm_80"``) for operands of type `kind`."""
    found = re.match(r"sm_(\d+)", arch)
    number = int(found[1]) if found else 80
    if kind in ("e4m3", "e5m2") and (number < 90 or warpgroup):
        return SumRule(32 if warpgroup else 16, 13, 13)
    # Volta; Turing, Ampere and Ada; Hopper and later
    n_bytes, bits = (8, 23) if number < 75 else (16, 24) if number < 90 else (32, 25)
    return SumRule(n_bytes // _BYTES[kind], bits)


def multiply_add(
    a: Any, b: Any, c: Any, kind: str, rule: SumRule, *, c_kind: str = "f32", to: str = "f32"
) -> Any:
    """Return A B + C of matrices along the last axis.

    Parameters
    ----------
    a, b, c : array
        Elements of A (k, m, matrices), B (k, n, matrices) and C (m, n, matrices) as float32.
    kind, c_kind : str
        Types of the operands and of C.
    to : str
        ``"f32"``: float32 results, rounded towards zero.  ``"f16"``: results in float64 for the
        caller to round to nearest, as tensor cores do (passes before the last are rounded here).
    """
    depth, m, count = a.shape
    n = b.shape[1]
    out = np.empty((m, n, count), np.float32 if to == "f32" else np.float64)
    exponents_a, exponents_b = _exponents(a, kind), _exponents(b, kind)
    special = max(e.max(initial=0) for e in (exponents_a, exponents_b, _exponents(c, c_kind))) > 127
    # matrices are the innermost axis; large ones alone, so that theirs is
    products = m * n * min(depth, rule.terms)
    at_once = max(1, _PRODUCTS_AT_ONCE // products) if products <= 1 << 13 else 1
    for first in range(0, count, at_once):
        some = slice(first, first + at_once)
        sums, of_sums = c[..., some], c_kind
        for k in range(0, depth, rule.terms):
            part = slice(k, k + rule.terms), slice(None), some
            numbers = np.ascontiguousarray(a[part]), np.ascontiguousarray(b[part]), sums
            exponents = exponents_a[part], exponents_b[part], _exponents(sums, of_sums)
            exact, least = _pass(numbers, exponents, kind, rule)
            if special:
                exact = _with_special(exact, *numbers)
            if to == "f16":
                sums, of_sums = exact.astype(np.float16).astype(np.float32), "f16"
            else:
                sums, of_sums = _towards_zero(exact, rule.result_bits, least), "f32"
        out[..., some] = exact if to == "f16" else sums
    return out


def _exponents(x: Any, kind: str) -> Any:
    """Return the exponents with which numbers of a type count, in float32; zeros have none."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    bits = bits & 0x7FFFFFFF
    found = (bits >> 23).astype(np.int16)
    found -= 127
    np.maximum(found, _SMALLEST_EXPONENT[kind], out=found)
    found -= (bits == 0).view(np.int8) * np.int16(_FOR_ZERO)
    return found


def _pass(numbers: Three, exponents: Three, kind: str, rule: SumRule) -> tuple[Any, int]:
    """Return the sums of one pass in float64, exact but for the cuts, and the least unit.

    `numbers` are those of A, B and C; the unit is that of terms, as an exponent.
    """
    (a, b, c), (exponents_a, exponents_b, exponents_c) = numbers, exponents
    top = np.maximum.reduce(exponents_a[:, :, None] + exponents_b[:, None], axis=0)
    np.maximum(top, exponents_c, out=top)
    np.maximum(top, _SMALLEST_EXPONENT["f32"], out=top)
    up = (rule.fraction_bits - top).astype(np.int64)
    unit = (up + 1023 << 52).view(np.float64)
    if kind in ("f16", "e4m3", "e5m2"):  # products are exact in float32
        products = np.multiply(a[:, :, None], b[:, None])
        # out of float32's range only if all products are zero
        products *= (np.minimum(up, 127).astype(np.int32) + 127 << 23).view(np.float32)
    else:
        products = np.multiply(a[:, :, None], b[:, None], dtype=np.float64)
        products *= unit
    cut = products.astype(np.int32)  # towards zero; below 4 * 2**fraction_bits
    wide = len(a) << rule.fraction_bits + 2 > 1 << 31
    total = np.add.reduce(cut, axis=0, dtype=np.int64 if wide else np.int32).astype(np.float64)
    total += np.trunc(c * unit)
    total /= unit
    return total, int(top.min(initial=0)) - rule.fraction_bits


def _towards_zero(x: Any, bits: int, unit: int) -> Any:
    """Round multiples of 2**`unit` to float32, keeping `bits` bits behind the leading one."""
    cut = (x.view(np.int64) & np.int64(-1 << (52 - bits))).view(np.float64)
    if unit < -126 - bits:  # perhaps more bits than a subnormal number has
        tiny = np.abs(x) < 2.0**-126
        cut = np.where(tiny, np.trunc(x * 2.0 ** (126 + bits)) * 2.0 ** -(126 + bits), cut)
    return cut.astype(np.float32)


def _with_special(exact: Any, a: Any, b: Any, c: Any) -> Any:
    """Return infinities and NaN as IEEE 754 has them, where a sum has such a term."""
    plain = np.einsum("kmw,knw->mnw", a, b, dtype=np.float64) + c
    return np.where(np.isfinite(plain), exact, plain)
