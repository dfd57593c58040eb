"""NumPy fallbacks of `nbflow_kernels.cpu.register_tiles_lower`."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.cpu.interpreter import simd
from nbflow_kernels.cpu.interpreter.memory import read
from nbflow_kernels.cpu.interpreter.register_tiles import FloatTile, Vector


def _added(total: FloatTile, at: Any, row: Any, other: FloatTile, diagonal: int) -> FloatTile:
    """Add a lower triangular matrix times `other` to `total` in place, token by token."""
    for t in range(len(total)):
        factors: Vector = read(at + row * t, np.float32, t + 1)
        for s in range(t + diagonal):
            for g, x in enumerate(other[s]):
                total[t, g] = simd.fma(factors[s].repeat(len(x)), x, total[t, g])
    return total


def substitute(tile: FloatTile, at: Any, row: Any) -> FloatTile:
    """Solve a system whose matrix has ones on its diagonal and -M below."""
    found = tile.copy()
    return _added(found, at, row, found, 0)


def add_lower(tile: FloatTile, at: Any, row: Any, u: Any) -> FloatTile:
    """Add M times the tokens at `u`."""
    return _added(tile.copy(), at, row, read(u, np.float32, tile.size).reshape(tile.shape), 1)
