"""Weights for golden vectors of quantizers: the same bits everywhere, whatever NumPy's version.

Random numbers are the 64-bit integers of SplitMix64 (Steele, Lea, Flood 2014), here a function of a
seed and a counter; all arithmetic on floats is exact or one IEEE operation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
ROWS, COLUMNS = 6, 768
_MASK = (1 << 64) - 1


def integers(seed: int, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    """Return 64 random bits for each element."""
    counter = np.arange(1, np.prod(shape) + 1, dtype=np.uint64)
    z = (counter + np.uint64(1000003 * seed)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).reshape(shape)


def bell(seed: int, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> Floats:
    """Return sums of four 16-bit integers, about normal with a deviation of 1.15."""
    bits = integers(seed, shape)
    total = sum((bits >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4))
    return (np.asarray(total).astype(np.int64) - 131070).astype(np.float32) / np.float32(2**15)


def inputs() -> dict[str, Floats]:
    """Return weights (6, 768) of many kinds, by name."""
    normal = bell(1)
    choice = integers(2, normal.shape)
    outlier = normal * np.float32(0.02)
    outlier[:, 5] = 3
    rows = np.float32([0, 0.7, 0.3, -0.3, 1e-20, 100])[:, None]
    return {
        "normal": normal,
        "half_columns": normal * np.where(np.arange(COLUMNS) % 7 < 3, np.float32(1), 0.125),
        "heavy": normal * normal * normal,
        "small": normal * np.float32(2.0**-11),
        "float16_subnormal": normal * np.float32(2.0**-21),
        "below_float16": normal * np.float32(2.0**-66),
        "large": normal * np.float32(2.0**15),
        "positive": np.abs(normal) + np.float32(1),
        "negative": -np.abs(normal) - np.float32(100),
        "sparse": np.where(choice % np.uint64(10) == 0, normal, np.float32(0)),
        "outlier": outlier,
        "quarters": (choice % np.uint64(121)).astype(np.float32) / np.float32(4) - np.float32(15),
        "two_values": np.where(choice & np.uint64(1), np.float32(0.7), np.float32(-0.1)),
        "constant_rows": np.broadcast_to(rows, normal.shape).astype(np.float32),
    }


def importances() -> dict[str, Floats]:
    """Return importances: of columns (768,), some of them 0, and of weights (6, 768)."""
    columns = np.abs(bell(3, (COLUMNS,)))
    columns = columns * columns
    columns[:40] = 0
    return {"columns": columns, "weights": np.abs(bell(4))}
