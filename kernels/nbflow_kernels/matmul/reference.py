"""Matrix product in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def matmul(
    x: Any, w: Any, *, bias: Any = None, accumulate: bool = False, out: Any = None
) -> NDArray[np.float64]:
    """See `nbflow_kernels.matmul`."""
    if not isinstance(w, np.ndarray):
        from nbflow_kernels.formats import dequantize

        w = dequantize(w)
    if w.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        w = (w.astype(np.uint32) << 16).view(np.float32)
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    if bias is not None:
        y = y + bias
    if accumulate:
        out += y
        return np.asarray(out)
    return y
