"""Normalization on the CPU: a row at a time, 4 x 16 lanes along it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels import simd
from nbflow_kernels._jit import njit
from nbflow_kernels.threads import split_rows

_NO_RESIDUAL = np.empty((0, 0), np.float32)
_COST = 2  # multiply-adds per element, for the decision to use more than one thread


def rmsnorm(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: float,
    offset: float,
    out: NDArray[np.float32],
) -> None:
    """See `nbflow_kernels.rmsnorm`."""
    split_rows(_rmsnorm, x.shape[0], x.size * _COST, x, _NO_RESIDUAL, weight, eps, offset, out)


def fused_add_rmsnorm(
    x: NDArray[np.float32],
    residual: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: float,
    offset: float,
) -> None:
    """See `nbflow_kernels.fused_add_rmsnorm`."""
    split_rows(_rmsnorm, x.shape[0], x.size * _COST, x, residual, weight, eps, offset, x)


def layernorm(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    eps: float,
    out: NDArray[np.float32],
) -> None:
    """See `nbflow_kernels.layernorm`."""
    shift = np.zeros_like(weight) if bias is None else bias
    split_rows(_layernorm, x.shape[0], x.size * _COST, x, weight, shift, eps, out)


@njit
def _sum_of_squares(row: Any, mean: Any) -> Any:
    """Return the sum of (row - mean)**2: four times 16 lanes, then the ragged end."""
    E = row.shape[0]
    a = simd.address(row)
    m = simd.splat(mean)
    s0 = s1 = s2 = s3 = simd.splat(0.0)
    body = E - E % 64
    for i in range(0, body, 64):
        v0 = simd.sub(simd.load_f32(a + i * 4), m)
        v1 = simd.sub(simd.load_f32(a + i * 4 + 64), m)
        v2 = simd.sub(simd.load_f32(a + i * 4 + 128), m)
        v3 = simd.sub(simd.load_f32(a + i * 4 + 192), m)
        s0 = simd.fma(v0, v0, s0)
        s1 = simd.fma(v1, v1, s1)
        s2 = simd.fma(v2, v2, s2)
        s3 = simd.fma(v3, v3, s3)
    total = simd.sum(simd.add(simd.add(s0, s1), simd.add(s2, s3)))
    for i in range(body, E):
        v = row[i] - mean
        total += v * v
    return total


@njit
def _rmsnorm(
    x: Any, residual: Any, weight: Any, eps: Any, offset: Any, out: Any, start: Any, stop: Any
) -> None:
    """Normalize rows [start, stop) of `x`, or of `residual` after adding `x` to it, into `out`."""
    E = x.shape[1]
    body = E - E % 16
    add = residual.shape[0] > 0
    rows = residual if add else x
    wa = simd.address(weight)
    shift = np.float32(offset)
    for t in range(start, stop):
        row = rows[t]
        y = out[t]
        ra = simd.address(row)
        ya = simd.address(y)
        if add:
            xa = simd.address(x) + t * x.strides[0]
            for i in range(0, body, 16):
                v = simd.add(simd.load_f32(ra + i * 4), simd.load_f32(xa + i * 4))
                simd.store_f32(ra + i * 4, v)
            for i in range(body, E):
                row[i] += x[t, i]
        mean_square = _sum_of_squares(row, np.float32(0.0)) / np.float32(E)
        scale = np.float32(1.0) / np.sqrt(mean_square + np.float32(eps))
        for i in range(0, body, 16):
            w = simd.add(simd.load_f32(wa + i * 4), simd.splat(shift))
            v = simd.mul(simd.load_f32(ra + i * 4), simd.splat(scale))
            simd.store_f32(ya + i * 4, simd.mul(v, w))
        for i in range(body, E):
            y[i] = row[i] * scale * (weight[i] + shift)


@njit
def _layernorm(x: Any, weight: Any, bias: Any, eps: Any, out: Any, start: Any, stop: Any) -> None:
    """Normalize rows [start, stop): mean first, then the mean square of the differences."""
    E = x.shape[1]
    body = E - E % 16
    wa = simd.address(weight)
    ba = simd.address(bias)
    for t in range(start, stop):
        row = x[t]
        y = out[t]
        ra = simd.address(row)
        ya = simd.address(y)
        lanes = simd.splat(0.0)
        for i in range(0, body, 16):
            lanes = simd.add(lanes, simd.load_f32(ra + i * 4))
        total = simd.sum(lanes)
        for i in range(body, E):
            total += row[i]
        mean = total / np.float32(E)
        variance = _sum_of_squares(row, mean) / np.float32(E)
        scale = np.float32(1.0) / np.sqrt(variance + np.float32(eps))
        m = simd.splat(mean)
        s = simd.splat(scale)
        for i in range(0, body, 16):
            v = simd.mul(simd.sub(simd.load_f32(ra + i * 4), m), s)
            v = simd.fma(v, simd.load_f32(wa + i * 4), simd.load_f32(ba + i * 4))
            simd.store_f32(ya + i * 4, v)
        for i in range(body, E):
            y[i] = (row[i] - mean) * scale * weight[i] + bias[i]
