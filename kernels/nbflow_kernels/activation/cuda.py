"""Activations on CUDA devices: not built yet, the functions say so."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def silu(x: Any, out: Any) -> None:
    """See `nbflow_kernels.silu`."""
    no_cuda_variant("silu")


def gelu(x: Any, out: Any) -> None:
    """See `nbflow_kernels.gelu`."""
    no_cuda_variant("gelu")


def gelu_tanh(x: Any, out: Any) -> None:
    """See `nbflow_kernels.gelu_tanh`."""
    no_cuda_variant("gelu_tanh")


def gelu_quick(x: Any, out: Any) -> None:
    """See `nbflow_kernels.gelu_quick`."""
    no_cuda_variant("gelu_quick")


def relu(x: Any, out: Any) -> None:
    """See `nbflow_kernels.relu`."""
    no_cuda_variant("relu")


def relu2(x: Any, out: Any) -> None:
    """See `nbflow_kernels.relu2`."""
    no_cuda_variant("relu2")


def sigmoid(x: Any, out: Any) -> None:
    """See `nbflow_kernels.sigmoid`."""
    no_cuda_variant("sigmoid")


def silu_and_mul(x: Any, out: Any) -> None:
    """See `nbflow_kernels.silu_and_mul`."""
    no_cuda_variant("silu_and_mul")


def gelu_and_mul(x: Any, out: Any) -> None:
    """See `nbflow_kernels.gelu_and_mul`."""
    no_cuda_variant("gelu_and_mul")


def gelu_tanh_and_mul(x: Any, out: Any) -> None:
    """See `nbflow_kernels.gelu_tanh_and_mul`."""
    no_cuda_variant("gelu_tanh_and_mul")


def gelu_quick_and_mul(x: Any, out: Any) -> None:
    """See `nbflow_kernels.gelu_quick_and_mul`."""
    no_cuda_variant("gelu_quick_and_mul")


def relu_and_mul(x: Any, out: Any) -> None:
    """See `nbflow_kernels.relu_and_mul`."""
    no_cuda_variant("relu_and_mul")


def relu2_and_mul(x: Any, out: Any) -> None:
    """See `nbflow_kernels.relu2_and_mul`."""
    no_cuda_variant("relu2_and_mul")


def sigmoid_and_mul(x: Any, out: Any) -> None:
    """See `nbflow_kernels.sigmoid_and_mul`."""
    no_cuda_variant("sigmoid_and_mul")


def glu(x: Any, activation: str, gate_first: bool, out: Any) -> None:
    """See `nbflow_kernels.glu`."""
    no_cuda_variant("glu")


def swigluoai_and_mul(x: Any, alpha: float, limit: float, interleaved: bool, out: Any) -> None:
    """See `nbflow_kernels.swigluoai_and_mul`."""
    no_cuda_variant("swigluoai_and_mul")
