"""The scalar types of PTX and how NumPy holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

#: NumPy type of a register by its size in bytes; predicates are Booleans (0 bytes).
STORAGE: dict[int, Any] = {
    0: np.bool_,
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}
SIGNED: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Type:
    """A PTX type: its name without the dot, its size, and the NumPy type of one value.

    ``kind`` is ``u`` (unsigned), ``s`` (signed), ``b`` (bits), ``f`` (a float NumPy has), ``p``
    (predicate) or ``x`` (a float NumPy does not have, or a packed pair: held as bits).
    """

    name: str
    kind: str
    nbytes: int
    dtype: Any


def _types() -> dict[str, Type]:
    table = {"pred": Type("pred", "p", 0, np.bool_)}
    for n in (1, 2, 4, 8):
        table[f"u{8 * n}"] = Type(f"u{8 * n}", "u", n, STORAGE[n])
        table[f"b{8 * n}"] = Type(f"b{8 * n}", "b", n, STORAGE[n])
        table[f"s{8 * n}"] = Type(f"s{8 * n}", "s", n, SIGNED[n])
    for name, dtype in (("f16", np.float16), ("f32", np.float32), ("f64", np.float64)):
        table[name] = Type(name, "f", np.dtype(dtype).itemsize, dtype)
    packed = {"bf16": 2, "f16x2": 4, "bf16x2": 4, "tf32": 4, "e4m3x2": 2, "e5m2x2": 2, "b128": 16}
    for name, n in packed.items():
        table[name] = Type(name, "x", n, STORAGE[min(n, 8)])
    return table


TYPES = _types()
FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")
SPACES = ("param", "global", "shared", "local", "const")
