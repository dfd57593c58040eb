"""NumPy fallbacks of `nbflow_kernels.cpu.register_tiles_columns`."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.cpu.interpreter.memory import LANES, read
from nbflow_kernels.cpu.interpreter.register_tiles import FloatTile, Vector


def load_columns(table: Any, offset: Any) -> FloatTile:
    """Return 32 int8 of 16 rows plus 128, four columns in a vector."""
    addresses = read(table, np.int64, LANES)
    rows = np.stack([read(int(at) + offset, np.uint8, 32) for at in addresses]) ^ np.uint8(128)
    words = rows.view(np.float32).T.reshape(8, 1, LANES)
    return np.ascontiguousarray(words)


def dot_columns(columns: FloatTile, start: Any, x: Any) -> Vector:
    """Return the int32 at `start` plus the dot product of the 32 int8 at `x` with each row."""
    rows = np.ascontiguousarray(columns[:, 0].T).view(np.uint8).astype(np.int32)
    products: Vector = rows @ read(x, np.int8, 32).astype(np.int32) + read(start, np.int32, 1)
    return products
