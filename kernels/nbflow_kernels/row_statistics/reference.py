"""Ops on rows by their statistics in NumPy float64, as in the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def match_rms(x: Any, like: Any, least: float = 1e-5) -> NDArray[np.float64]:
    """See `nbflow_kernels.match_rms`."""
    rows, other = np.asarray(x, np.float64), np.asarray(like, np.float64)
    own = np.maximum(np.mean(rows**2, axis=1, keepdims=True), least)
    return np.asarray(rows * np.sqrt(np.mean(other**2, axis=1, keepdims=True) / own))


def row_moments(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.row_moments`."""
    rows = np.asarray(x, np.float64)
    return np.stack([rows.sum(axis=1), np.sum(rows**2, axis=1)], axis=1)


def gaussian_topk(
    x: Any, deviations: float, *, moments: Any = None, width: int | None = None
) -> NDArray[np.float64]:
    """See `nbflow_kernels.gaussian_topk`."""
    rows = np.asarray(x, np.float64)
    sums = row_moments(rows) if moments is None else np.asarray(moments, np.float64)
    mean, square = (sums / (width or rows.shape[1])).T
    cutoff = mean + deviations * np.sqrt(np.maximum(square - mean**2, 0.0))
    return np.asarray(np.maximum(rows - cutoff[:, None], 0.0))
