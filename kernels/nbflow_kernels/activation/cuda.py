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


def relu(x: Any, out: Any) -> None:
    """See `nbflow_kernels.relu`."""
    no_cuda_variant("relu")


def silu_and_mul(x: Any, out: Any) -> None:
    """See `nbflow_kernels.silu_and_mul`."""
    no_cuda_variant("silu_and_mul")


def gelu_and_mul(x: Any, out: Any) -> None:
    """See `nbflow_kernels.gelu_and_mul`."""
    no_cuda_variant("gelu_and_mul")


def gelu_tanh_and_mul(x: Any, out: Any) -> None:
    """See `nbflow_kernels.gelu_tanh_and_mul`."""
    no_cuda_variant("gelu_tanh_and_mul")


def relu_and_mul(x: Any, out: Any) -> None:
    """See `nbflow_kernels.relu_and_mul`."""
    no_cuda_variant("relu_and_mul")
