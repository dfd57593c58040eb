"""NumPy fallbacks of `nbflow_kernels.cpu.register_tiles_sums`."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.cpu.interpreter.memory import LANES, write
from nbflow_kernels.cpu.interpreter.register_tiles import FloatTile


def half_lanes() -> int:
    """Return 8."""
    return LANES // 2


def fold_lanes(tile: FloatTile, half: Any) -> FloatTile:
    """Return two partial sums of each vector of a tile of two groups, by four tokens."""
    for width in (8, 4, 2):
        tile = tile[..., :width] + tile[..., width:]
    return tile.reshape(-1, 1, LANES)


def store_sums(at: Any, token: Any, first: FloatTile, second: FloatTile) -> None:
    """Write the sums of four groups, two folded in each tile, to ``at + token * t``."""
    pairs = [tile.reshape(-1, 2, 2) for tile in (first, second)]
    sums = np.concatenate([pair[..., 0] + pair[..., 1] for pair in pairs], 1)
    for t, row in enumerate(sums):
        write(at + token * t, row)
