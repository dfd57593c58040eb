"""Activations: element by element, and the gated forms of feed-forward layers."""

from __future__ import annotations

from nbflow_kernels.activation.gated import (
    gelu_and_mul,
    gelu_quick_and_mul,
    gelu_tanh_and_mul,
    glu,
    relu2_and_mul,
    relu_and_mul,
    sigmoid_and_mul,
    silu_and_mul,
    swigluoai_and_mul,
)
from nbflow_kernels.activation.plain import gelu, gelu_quick, gelu_tanh, relu, relu2, sigmoid, silu

__all__ = [
    "gelu",
    "gelu_and_mul",
    "gelu_quick",
    "gelu_quick_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "glu",
    "relu",
    "relu2",
    "relu2_and_mul",
    "relu_and_mul",
    "sigmoid",
    "sigmoid_and_mul",
    "silu",
    "silu_and_mul",
    "swigluoai_and_mul",
]
