"""Embedding lookup in NumPy float64, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def embedding(ids: Any, table: Any, *, scale: float = 1.0) -> NDArray[np.float64]:
    """See `nbflow_kernels.embedding`."""
    if not isinstance(table, np.ndarray):
        from nbflow_kernels.formats import dequantize

        table = dequantize(table)
    if table.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        table = (table.astype(np.uint32) << 16).view(np.float32)
    rows = np.empty((len(ids), table.shape[1]), np.float64)
    for t, i in enumerate(ids):
        rows[t] = scale * table[i].astype(np.float64)
    return rows
