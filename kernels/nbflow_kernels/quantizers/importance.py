"""Importance weights of columns: checks, and importance from activation statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers.gptq import Hessian

DAMPING = 0.01


def checked_importance(importance: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the importance as float32 (1 or rows, K), or raise."""
    array = np.asarray(importance)
    if array.dtype.type not in (np.float32, np.float16, np.float64):
        raise TypeError(
            f"importance must have dtype float32, float16 or float64, got {array.dtype.name}"
        )
    if array.shape not in (shape[-1:], shape):
        raise UsageError(
            f"importance must have shape {shape[-1:]} (columns) or {shape} (weights), "
            f"got {array.shape}"
        )
    with np.errstate(over="ignore"):
        weight = np.asarray(array, dtype=np.float32)
    wrong = ~(np.isfinite(weight) & (weight >= 0))
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise UsageError(
            f"importance must be finite and >= 0 in float32, got {array[where]} at {list(where)}"
        )
    return np.ascontiguousarray(weight.reshape(-1, shape[-1]))


def column_importance(statistics: Any, width: int, K: int) -> NDArray[np.float32] | None:
    """Return column importance (1, width) relative to the largest, 0 in the padding."""
    squares = mean_squares(statistics)
    if squares is None:
        return None
    largest = squares.max(initial=0.0)
    importance = np.zeros((1, width), np.float32)
    importance[0, :K] = squares / largest if largest > 0 else 1
    return importance


def checked_statistics(
    statistics: Any, K: int, damping: float = DAMPING
) -> Hessian | NDArray[np.float64] | None:
    """Check statistics; return a `Hessian`, mean squares (K,), or None."""
    if statistics is None:
        return None
    if not isinstance(statistics, Hessian):
        array = np.asarray(statistics, np.float64)
        if array.ndim == 1:
            if array.shape != (K,) or not np.isfinite(array).all() or array.min() < 0:
                raise UsageError(
                    f"mean squares must be finite, >= 0 and have shape ({K},), got {array.shape}"
                )
            return array
        statistics = Hessian(array, damping)
    if len(statistics) != K:
        raise UsageError(
            f"second moments must have shape ({K}, {K}), the columns of x, "
            f"got {statistics.matrix.shape}"
        )
    return statistics  # type: ignore[no-any-return]


def mean_squares(
    statistics: Hessian | NDArray[np.float64] | None,
) -> NDArray[np.float64] | None:
    """Return mean squares of the columns, or None without statistics."""
    if isinstance(statistics, Hessian):
        return statistics.matrix.diagonal()
    return statistics
