"""Embedding rows on the CPU.

NumPy's gather does it: the op moves bytes and has no arithmetic, and a kernel would have to be
compiled before the first token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def embedding(ids: NDArray[np.int32], table: NDArray[Any], out: NDArray[np.float32]) -> None:
    """See `nbflow_kernels.embedding`."""
    if table.dtype == np.float32:
        # mode="clip" (ids are checked) lets NumPy write into `out` without a buffer
        np.take(table, ids, axis=0, out=out, mode="clip")
    elif table.dtype == np.uint16:
        np.left_shift(table[ids], 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = table[ids]


def scale_rows(out: NDArray[np.float32], scale: float) -> None:
    """Multiply all rows by `scale`, in place."""
    np.multiply(out, np.float32(scale), out=out)
