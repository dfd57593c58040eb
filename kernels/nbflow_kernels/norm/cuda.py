"""Normalization on CUDA devices: not built yet, the functions say so."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def rmsnorm(x: Any, weight: Any, eps: float, offset: float, out: Any) -> None:
    """See `nbflow_kernels.rmsnorm`."""
    no_cuda_variant("rmsnorm")


def fused_add_rmsnorm(x: Any, residual: Any, weight: Any, eps: float, offset: float) -> None:
    """See `nbflow_kernels.fused_add_rmsnorm`."""
    no_cuda_variant("fused_add_rmsnorm")


def l2norm(x: Any, eps: float, out: Any) -> None:
    """See `nbflow_kernels.l2norm`."""
    no_cuda_variant("l2norm")


def layernorm(x: Any, weight: Any, bias: Any, eps: float, out: Any) -> None:
    """See `nbflow_kernels.layernorm`."""
    no_cuda_variant("layernorm")


def fused_add_layernorm(x: Any, residual: Any, weight: Any, bias: Any, eps: float) -> None:
    """See `nbflow_kernels.fused_add_layernorm`."""
    no_cuda_variant("fused_add_layernorm")


def linear_norm(x: Any, scale: float, out: Any) -> None:
    """See `nbflow_kernels.linear_norm`."""
    no_cuda_variant("linear_norm")
