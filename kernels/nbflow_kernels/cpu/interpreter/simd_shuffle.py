"""NumPy fallbacks of `nbflow_kernels.cpu.simd_shuffle`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.interpreter.memory import LANES, read, write

Vector = NDArray[Any]


def evens(a: Vector, b: Vector) -> Vector:
    """Return lanes 0, 2, 4... of `a`, then of `b`."""
    return np.concatenate([a[::2], b[::2]])


def odds(a: Vector, b: Vector) -> Vector:
    """Return lanes 1, 3, 5... of `a`, then of `b`."""
    return np.concatenate([a[1::2], b[1::2]])


def twice_low(v: Vector) -> Vector:
    """Return lanes 0, 0, 1, 1 ... 7, 7."""
    return v[: LANES // 2].repeat(2)


def twice_high(v: Vector) -> Vector:
    """Return lanes 8, 8 ... 15, 15."""
    return v[LANES // 2 :].repeat(2)


def swap_pairs(v: Vector) -> Vector:
    """Return lanes 1, 0, 3, 2 ... 15, 14."""
    return v.reshape(-1, 2)[:, ::-1].reshape(LANES)


def split_columns(rows: Any, k: int, to: Any) -> None:
    """Copy 16 rows of `k` float32 column by column."""
    write(to, read(rows, np.float32, LANES * k).reshape(LANES, k).T.ravel())


def join_columns(columns: Any, k: int, to: Any) -> None:
    """Copy `k` columns of 16 float32 row by row."""
    write(to, read(columns, np.float32, LANES * k).reshape(k, LANES).T.ravel())


def negate_evens(v: Vector) -> Vector:
    """Return `v` with the sign of its even lanes flipped."""
    signs = np.tile(np.array([1 << 31, 0], np.uint32), LANES // 2)
    return (v.view(np.uint32) ^ signs).view(np.float32)


def lookup(table: Vector, index: Vector) -> Vector:
    """Return the lanes of `table` at `index`."""
    return np.asarray(table[index])
