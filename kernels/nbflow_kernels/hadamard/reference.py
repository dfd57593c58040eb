"""Hadamard transforms in NumPy float64: the product with the matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def hadamard_matrix(n: int) -> NDArray[np.float64]:
    """Return Sylvester's matrix (n, n), entries 1 and -1, of a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def hadamard_transform(x: Any, block: int) -> NDArray[np.float64]:
    """See `nbflow_kernels.hadamard_transform`."""
    rows = np.asarray(x, np.float64)
    blocks = rows.reshape(len(rows), rows.shape[1] // block, block)
    rotated: NDArray[np.float64] = blocks @ hadamard_matrix(block) / np.sqrt(block)
    return rotated.reshape(rows.shape)
