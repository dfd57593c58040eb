"""Activations in NumPy float64, as in the formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The normal distribution function by erfc, which keeps its digits where it is small.
_normal = np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2.0)), otypes=[np.float64])


def silu(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.silu`."""
    v = np.asarray(x, np.float64)
    return np.asarray(v / (1.0 + np.exp(-v)))


def gelu(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.gelu`."""
    v = np.asarray(x, np.float64)
    return np.asarray(v * _normal(v)) if v.size else v


def gelu_tanh(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.gelu_tanh`."""
    v = np.asarray(x, np.float64)
    u = math.sqrt(2.0 / math.pi) * (v + 0.044715 * v**3)
    return np.asarray(v / (1.0 + np.exp(-2.0 * u)))  # 0.5 * (1 + tanh(u)), without cancellation


def relu(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.relu`."""
    return np.maximum(np.asarray(x, np.float64), 0.0)


def _gate_and_up(x: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    gate, up = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return gate, up


def silu_and_mul(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.silu_and_mul`."""
    gate, up = _gate_and_up(x)
    return silu(gate) * up


def gelu_and_mul(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.gelu_and_mul`."""
    gate, up = _gate_and_up(x)
    return gelu(gate) * up


def gelu_tanh_and_mul(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.gelu_tanh_and_mul`."""
    gate, up = _gate_and_up(x)
    return gelu_tanh(gate) * up


def relu_and_mul(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.relu_and_mul`."""
    gate, up = _gate_and_up(x)
    return relu(gate) * up
