"""Gated products in NumPy float64, as in the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.activation import reference as activations


def gated_product(gate: Any, x: Any, activation: str = "sigmoid") -> NDArray[np.float64]:
    """See `nbflow_kernels.gated_product`."""
    gates = np.asarray(gate, np.float64)
    if activation != "identity":
        gates = getattr(activations, activation)(gates)
    return gates * np.asarray(x, np.float64)


def clip(x: Any, limit: float) -> NDArray[np.float64]:
    """See `nbflow_kernels.clip`."""
    return np.clip(np.asarray(x, np.float64), -limit, limit)


def log_decay(x: Any, rate: Any, bias: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.log_decay`."""
    rate, bias = np.asarray(rate, np.float64), np.asarray(bias, np.float64)
    return np.asarray(rate * np.logaddexp(0.0, np.asarray(x, np.float64) + bias))


def extend_heads(
    x: Any, numbers: Any, n_columns: int, *, exponential: bool = False
) -> NDArray[np.float64]:
    """See `nbflow_kernels.extend_heads`."""
    T, H, D = x.shape
    result, given = np.zeros((T, H, D + n_columns)), np.asarray(numbers, np.float64)
    result[..., :D], result[..., D] = x, np.exp(given) if exponential else given
    return result
