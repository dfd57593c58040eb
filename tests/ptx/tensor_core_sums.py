"""Sum of products of a tensor core, term by term in integers: slow, and plain to read."""

from __future__ import annotations

import math
from collections.abc import Sequence


def exponent(x: float, smallest: int) -> int:
    """Return the exponent of a number other than 0, of its type's subnormal ones the smallest."""
    return max(math.frexp(x)[1] - 1, smallest)


def tensor_core_sum(
    a: Sequence[float], b: Sequence[float], c: float, *, terms: int, bits: int, smallest: int
) -> float:
    """Return A . B + C as a float32 number: passes of so many terms, cut to so many bits."""
    for k in range(0, len(a), terms):
        pairs = list(zip(a[k : k + terms], b[k : k + terms], strict=True))
        tops = [exponent(x, smallest) + exponent(y, smallest) for x, y in pairs if x * y]
        top = max([*tops, exponent(c, -126) if c else -126])
        values = [*(x * y for x, y in pairs), c]  # exact in float64
        total = sum(math.trunc(math.ldexp(v, bits - top)) for v in values)
        kept = max(total.bit_length() - 24, -126 - 23 - (top - bits), 0)  # towards zero
        c = math.ldexp((abs(total) >> kept) << kept, top - bits) * (1 if total > 0 else -1)
    return c
