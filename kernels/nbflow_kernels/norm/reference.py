"""Normalization in NumPy float64, as in the formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats.float8 import encode_float8


def rmsnorm(x: Any, weight: Any, *, eps: float = 1e-6, offset: float = 0.0) -> NDArray[np.float64]:
    """See `nbflow_kernels.rmsnorm`."""
    rows = np.asarray(x, np.float64)
    factor = 1.0 if weight is None else np.asarray(weight, np.float64) + offset
    mean_square = np.mean(rows**2, axis=-1, keepdims=True)
    return np.asarray(rows / np.sqrt(mean_square + eps) * factor)


def gemma_rmsnorm(x: Any, weight: Any, *, eps: float = 1e-6) -> NDArray[np.float64]:
    """See `nbflow_kernels.gemma_rmsnorm`."""
    return rmsnorm(x, weight, eps=eps, offset=1.0)


def layernorm(x: Any, weight: Any, bias: Any = None, *, eps: float = 1e-6) -> NDArray[np.float64]:
    """See `nbflow_kernels.layernorm`."""
    rows = np.asarray(x, np.float64)
    centred = rows - rows.mean(axis=-1, keepdims=True)
    variance = np.mean(centred**2, axis=-1, keepdims=True)
    factor = 1.0 if weight is None else np.asarray(weight, np.float64)
    shift = 0.0 if bias is None else np.asarray(bias, np.float64)
    return np.asarray(centred / np.sqrt(variance + eps) * factor + shift)


def fused_add_rmsnorm(
    x: Any, residual: Any, weight: Any, *, eps: float = 1e-6, offset: float = 0.0
) -> None:
    """See `nbflow_kernels.fused_add_rmsnorm`."""
    residual += x
    x[...] = rmsnorm(residual, weight, eps=eps, offset=offset)


def gemma_fused_add_rmsnorm(x: Any, residual: Any, weight: Any, *, eps: float = 1e-6) -> None:
    """See `nbflow_kernels.gemma_fused_add_rmsnorm`."""
    fused_add_rmsnorm(x, residual, weight, eps=eps, offset=1.0)


def fused_add_layernorm(
    x: Any, residual: Any, weight: Any, bias: Any = None, *, eps: float = 1e-6
) -> None:
    """See `nbflow_kernels.fused_add_layernorm`."""
    residual += x
    x[...] = layernorm(residual, weight, bias, eps=eps)


def rmsnorm_quant(
    out: Any, x: Any, weight: Any, scale: float, *, eps: float = 1e-6, out_format: str = "f8_e4m3"
) -> None:
    """See `nbflow_kernels.rmsnorm_quant`."""
    out[...] = encode_float8(rmsnorm(x, weight, eps=eps) / scale, out_format)


def fused_add_rmsnorm_quant(
    out: Any,
    x: Any,
    residual: Any,
    weight: Any,
    scale: float,
    *,
    eps: float = 1e-6,
    out_format: str = "f8_e4m3",
) -> None:
    """See `nbflow_kernels.fused_add_rmsnorm_quant`."""
    residual += x
    rmsnorm_quant(out, residual, weight, scale, eps=eps, out_format=out_format)


def layernorm_quant(
    out: Any,
    x: Any,
    weight: Any,
    bias: Any,
    scale: float,
    *,
    eps: float = 1e-6,
    out_format: str = "f8_e4m3",
) -> None:
    """See `nbflow_kernels.layernorm_quant`."""
    out[...] = encode_float8(layernorm(x, weight, bias, eps=eps) / scale, out_format)


def l2norm(x: Any, *, eps: float = 1e-6) -> NDArray[np.float64]:
    """See `nbflow_kernels.l2norm`."""
    rows = np.asarray(x, np.float64)
    return np.asarray(rows / np.sqrt(np.sum(rows**2, axis=-1, keepdims=True) + eps))


def linear_norm(x: Any, scale: float | None = None) -> NDArray[np.float64]:
    """See `nbflow_kernels.linear_norm`."""
    rows = np.asarray(x, np.float64)
    return rows * (math.sqrt(rows.shape[-1]) if scale is None else scale)


def gated_rmsnorm(
    x: Any,
    gate: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    group_size: int | None = None,
    gate_first: bool = False,
    activation: str = "silu",
) -> NDArray[np.float64]:
    """See `nbflow_kernels.gated_rmsnorm`."""
    rows, g = np.asarray(x, np.float64), np.asarray(gate, np.float64)
    factor = 1.0 / (1.0 + np.exp(-g)) * (g if activation == "silu" else 1.0)
    size = group_size or rows.shape[1]
    groups = (rows * factor if gate_first else rows).reshape(len(rows), rows.shape[1] // size, size)
    columns = np.asarray(weight, np.float64).reshape(-1, size)
    y = rmsnorm(groups, None, eps=eps) * columns
    return np.asarray(y.reshape(rows.shape) * (1.0 if gate_first else factor))
