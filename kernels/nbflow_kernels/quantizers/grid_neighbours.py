"""Nearest-neighbour lists of the iq grids.

Quantizers round weights to a point of the cube and then try only the grid points near it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats.ggml import iq_grids as grids
from nbflow_kernels.formats.registry import Bytes


class Neighbours(NamedTuple):
    """The grid points near each point of the cube; a point on the grid has only itself."""

    first: NDArray[np.int32]
    """Start of the list of each cube point, by its bits; the last entry is the end."""
    points: NDArray[np.uint16]
    """Grid points of all lists: the nearest first, of equally near ones the lowest."""
    grid: grids.Grid
    """The points of the grid."""
    dimensions: int
    """Coordinates of a point: 8 or 4."""


# name -> grid, dimensions, shells: distinct distances in a list, as published
_GRIDS = {
    "iq1": (grids.GRID_IQ1, 8, 3),
    "iq2_xxs": (grids.GRID_IQ2_XXS, 8, 2),
    "iq2_xs": (grids.GRID_IQ2_XS, 8, 2),
    "iq2_s": (grids.GRID_IQ2_S, 8, 1),
    "iq3_xxs": (grids.GRID_IQ3_XXS, 4, 2),
    "iq3_s": (grids.GRID_IQ3_S, 4, 3),
}


@functools.cache
def neighbours(name: str) -> Neighbours:
    """Return the neighbours of all cube points of the grid called `name`."""
    grid, dimensions, shells = _GRIDS[name]
    width, n_levels = (2, 3) if dimensions == 8 else (3, 8)
    number = np.arange(n_levels**dimensions)
    cube = np.stack([number // n_levels**i % n_levels for i in range(dimensions)], axis=1)
    on_grid = grids.coordinates(grid[:, None], dimensions)
    bits = (cube << width * np.arange(dimensions)).sum(axis=1)
    counts = np.zeros(1 << width * dimensions, np.int32)
    lists = []
    for at in range(0, len(cube), 512):  # bounds the table of distances to 4 MB
        row, point = _near(cube[at : at + 512], on_grid, shells)
        counts[bits[at : at + 512]] = np.bincount(row)
        lists.append(point)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    # cube points are enumerated in the order of their bits
    points = np.concatenate(lists).astype(np.uint16)
    return Neighbours(first, points, grid, dimensions)


def _near(
    cube: NDArray[np.int64], on_grid: Bytes, shells: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pairs (cube point, grid point): those on the grid, or in the nearest shells."""
    a, b = cube.astype(np.float32), on_grid.astype(np.float32)
    squares = np.square(a).sum(axis=1)[:, None] + np.square(b).sum(axis=1)
    distance = (squares - 2 * a @ b.T).astype(np.int16)
    reach = distance.min(axis=1, keepdims=True)
    off = reach[:, 0] > 0
    for _ in range(shells - 1):
        beyond = np.where(distance > reach, distance, np.int16(999)).min(axis=1)
        reach[off, 0] = beyond[off]
    row, point = np.nonzero(distance <= reach)
    order = np.lexsort((distance[row, point], row))
    return row[order], point[order]
