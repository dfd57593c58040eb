"""Gated products on CUDA devices: a thread computes four columns, see `gating.cu`."""

from __future__ import annotations

import functools
from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.activation.cuda import FUNCTIONS

_THREADS = 128


@functools.cache
def _kernel(function: str, wide: bool) -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "gating.cu", f"gated_product<{function}, {str(wide).lower()}>",
        "f32* gate, f32* x, f32* out, i32 T, i32 width, i64 gate_row, i64 x_row, i64 out_row",
    )  # fmt: skip


def gated_product(gate: Any, x: Any, activation: str, out: Any) -> None:
    """See `nbflow_kernels.gated_product`; the gate may also be one row (I,) for all."""
    T, width = out.shape
    if not T * width:
        return
    arrays = gate, x, out
    rows = [array.strides[0] // array.itemsize if array.ndim == 2 else 0 for array in arrays]
    wide = all(n % 4 == 0 for n in (width, *rows))
    wide = wide and all(cuda.address(array) % 16 == 0 for array in arrays)
    n_blocks = cuda.ceil_div(cuda.ceil_div(width, 4), _THREADS)
    function = "Identity" if activation == "identity" else FUNCTIONS[activation]
    _kernel(function, wide)(T * n_blocks, _THREADS, (*arrays, T, width, *rows))


@functools.cache
def _clip_kernel() -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "gating.cu", "clip",
        "f32* x, f32* out, i32 T, i32 width, i64 x_row, i64 out_row, f32 limit",
    )  # fmt: skip


def clip(x: Any, limit: float, out: Any) -> None:
    """See `nbflow_kernels.clip`."""
    T, width = out.shape
    if T * width:
        rows = [array.strides[0] // array.itemsize for array in (x, out)]
        n_blocks = cuda.ceil_div(T * width, _THREADS)
        _clip_kernel()(n_blocks, _THREADS, (x, out, T, width, *rows, limit))


@functools.cache
def _decay_kernel() -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "gating.cu", "log_decay",
        "f32* x, f32* rate, f32* bias, f32* out, i32 T, i32 width, i64 x_row, i64 out_row",
    )  # fmt: skip


def log_decay(x: Any, rate: Any, bias: Any, out: Any) -> None:
    """See `nbflow_kernels.log_decay`."""
    T, width = out.shape
    if T * width:
        rows = [array.strides[0] // array.itemsize for array in (x, out)]
        n_blocks = cuda.ceil_div(T * width, _THREADS)
        _decay_kernel()(n_blocks, _THREADS, (x, rate, bias, out, T, width, *rows))


@functools.cache
def _extend_kernel() -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "gating.cu", "extend_heads",
        "f32* x, f32* numbers, f32* out, i32 T, i32 H, i32 D, i32 W, i64 x_row, i64 numbers_row, "
        "i64 out_row, i32 exponential",
    )  # fmt: skip


def extend_heads(x: Any, numbers: Any, exponential: bool, out: Any) -> None:
    """See `nbflow_kernels.extend_heads`."""
    (T, H, D), W = x.shape, out.shape[2]
    if T * H:
        arrays = x, numbers, out
        rows = [array.strides[0] // array.itemsize for array in arrays]
        n_blocks = cuda.ceil_div(T * H * W, _THREADS)
        _extend_kernel()(n_blocks, _THREADS, (*arrays, T, H, D, W, *rows, int(exponential)))
