"""Activations in NumPy float64, as in the formulas: ``x * g(x)`` is NaN for -infinity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.activation.swigluoai import swigluoai_numbers

# The normal distribution function by erfc, which keeps its digits where it is small.
_normal = np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2.0)), otypes=[np.float64])


def _times(a: Any, b: Any) -> NDArray[np.float64]:
    """Return the product; 0 times infinity is NaN without a warning."""
    with np.errstate(invalid="ignore"):
        return np.asarray(a * b)


def sigmoid(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.sigmoid`."""
    with np.errstate(over="ignore"):  # 1 / infinity is what the formula means
        return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(x, np.float64))))


def silu(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.silu`."""
    return _times(np.asarray(x, np.float64), sigmoid(x))


def gelu(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.gelu`."""
    v = np.asarray(x, np.float64)
    return _times(v, _normal(v)) if v.size else v


def gelu_tanh(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.gelu_tanh`."""
    v = np.asarray(x, np.float64)
    u = math.sqrt(2.0 / math.pi) * (v + 0.044715 * v**3)
    return _times(v, sigmoid(2.0 * u))  # 0.5 * (1 + tanh(u)), without cancellation


def gelu_quick(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.gelu_quick`."""
    v = np.asarray(x, np.float64)
    return _times(v, sigmoid(1.702 * v))


def relu(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.relu`."""
    return np.maximum(np.asarray(x, np.float64), 0.0)


def relu2(x: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.relu2`."""
    return relu(x) ** 2


_FUNCTIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_quick": gelu_quick,
    "relu": relu,
    "relu2": relu2,
    "sigmoid": sigmoid,
}


def glu(x: Any, activation: str = "sigmoid", *, gate_first: bool = False) -> NDArray[np.float64]:
    """See `nbflow_kernels.glu`."""
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    gate, up = (first, second) if gate_first else (second, first)
    numbers = swigluoai_numbers(activation)
    if numbers is not None:
        both = np.concatenate([gate, up], axis=-1)
        return swigluoai_and_mul(both, *numbers, interleaved=False)
    return _times(_FUNCTIONS[activation](gate), up)


def _and_mul(name: str) -> Callable[[Any], NDArray[np.float64]]:
    """Return the gated form of a function, with the gate first."""
    return lambda x: glu(x, name, gate_first=True)


silu_and_mul = _and_mul("silu")
gelu_and_mul = _and_mul("gelu")
gelu_tanh_and_mul = _and_mul("gelu_tanh")
gelu_quick_and_mul = _and_mul("gelu_quick")
relu_and_mul = _and_mul("relu")
relu2_and_mul = _and_mul("relu2")
sigmoid_and_mul = _and_mul("sigmoid")


def swigluoai_and_mul(
    x: Any, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = True
) -> NDArray[np.float64]:
    """See `nbflow_kernels.swigluoai_and_mul`."""
    v = np.asarray(x, np.float64)
    gate, up = (v[..., ::2], v[..., 1::2]) if interleaved else np.split(v, 2, axis=-1)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return _times(up + 1.0, _times(gate, sigmoid(alpha * gate)))


def xielu(
    x: Any, alpha_p: float, alpha_n: float, *, beta: float = 0.5, eps: float = -1e-6
) -> NDArray[np.float64]:
    """See `nbflow_kernels.xielu`."""
    v = np.asarray(x, np.float64)
    positive = alpha_p * v**2 + beta * v
    negative = alpha_n * (np.expm1(np.minimum(v, eps)) - v) + beta * v
    return np.where(v > 0, positive, negative)
