"""Normalization in NumPy float64, as in the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rmsnorm(x: Any, weight: Any, *, eps: float, offset: float = 0.0) -> NDArray[np.float64]:
    """See `nbflow_kernels.rmsnorm`."""
    rows = np.asarray(x, np.float64)
    scale = np.asarray(weight, np.float64) + offset
    return np.asarray(rows / np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + eps) * scale)


def layernorm(x: Any, weight: Any, bias: Any = None, *, eps: float) -> NDArray[np.float64]:
    """See `nbflow_kernels.layernorm`."""
    rows = np.asarray(x, np.float64)
    centred = rows - rows.mean(axis=-1, keepdims=True)
    y = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps) * weight
    return np.asarray(y if bias is None else y + bias)


def fused_add_rmsnorm(
    x: Any, residual: Any, weight: Any, *, eps: float, offset: float = 0.0
) -> None:
    """See `nbflow_kernels.fused_add_rmsnorm`."""
    residual += x
    x[...] = rmsnorm(residual, weight, eps=eps, offset=offset)
