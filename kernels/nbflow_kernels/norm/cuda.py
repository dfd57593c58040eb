"""Normalization on CUDA devices: one warp or thread block per vector, see `norm.cu`."""

from __future__ import annotations

import functools
from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.formats.float8 import Float8

_WARP_VECTORS = 8  # vectors per thread block where a warp normalizes a vector


@functools.cache
def _instance(
    function: str, threads: int, n: int, wide: bool, type: Float8 | None = None
) -> cuda.Kernel:
    bias, bias_row, scalars = "", "", "f32 divisor, f32 eps, f32 offset"
    if function == "layer":
        bias, bias_row, scalars = "f32*? bias, ", "i32 bias_row, ", "f32 eps"
    result = "Float32" if type is None else f"Float8<{', '.join(map(str, type))}>"
    return cuda.cpp_kernel(
        __file__, "norm.cu", f"{function}<{threads}, {n}, {str(wide).lower()}, {result}>",
        f"f32* x, f32*? residual, f32*? weight, {bias}{'f32' if type is None else 'u8'}* out, "
        "i32 n_vectors, i32 H, i32 E, i64 x_row, i64 residual_row, i64 out_row, i32 weight_row, "
        f"{bias_row}f32 out_factor, {scalars}",
    )  # fmt: skip


_linear = cuda.cpp_kernel(
    __file__, "norm.cu", "linear",
    "f32* x, f32* out, i32 n_vectors, i32 H, i32 E, i64 x_row, i64 out_row, f32 scale",
)  # fmt: skip


def rmsnorm(x, weight, eps, offset, out, *, residual=None, divisor=None, codec=None):
    """See `nbflow_kernels.norm.cpu.rmsnorm`."""
    divisor = float(divisor or x.shape[-1])
    _launch("rms", x, residual, (weight,), out, codec, divisor, eps, offset)


def layernorm(x, weight, bias, eps, out, *, residual=None, codec=None):
    """See `nbflow_kernels.norm.cpu.layernorm`."""
    _launch("layer", x, residual, (weight, bias), out, codec, eps)


@functools.cache
def _gated_instance(threads: int, n: int, wide: bool, silu: bool) -> cuda.Kernel:
    choices = f"{threads}, {n}, {str(wide).lower()}, {'Silu' if silu else 'Sigmoid'}"
    return cuda.cpp_kernel(
        __file__, "norm.cu", f"gated_rms<{choices}>",
        "f32* x, f32* gate, f32* weight, f32* out, i32 n_vectors, i32 H, i32 E, i64 x_row, "
        "i64 gate_row, i64 out_row, i32 weight_group, f32 eps, i32 gate_first",
    )  # fmt: skip


def gated_rmsnorm(x, gate, weight, eps, group_size, gate_first, activation, out):
    """See `nbflow_kernels.norm.cpu_gated.gated_rmsnorm`."""
    H = x.shape[1] // group_size
    n, (threads, numbers) = len(x) * H, _shape(group_size)
    wide = _wide(group_size, x, gate, weight, out)
    weight_group = group_size if weight.shape[0] == x.shape[1] else 0
    args = (
        x, gate, weight, out, n, H, group_size, _row(x), _row(gate), _row(out), weight_group,
        eps, gate_first,
    )  # fmt: skip
    _gated_instance(threads, numbers, wide, activation == "silu")(*_grid(n, threads), args)


def linear_norm(x: Any, scale: float, out: Any) -> None:
    """See `nbflow_kernels.linear_norm`."""
    if x.size:
        n, H, E = _vectors(x)
        _linear(min(n, 65535), 256, (x, out, n, H, E, _row(x), _row(out), scale))


def _launch(function, x, residual, weights, out, codec, *scalars):
    """Launch a template's instance; `weights` are those of each column, or None."""
    if not x.size:
        return
    n, H, E = _vectors(x)
    threads, numbers = _shape(E)
    wide = _wide(E, x, residual, *weights, out)
    args = (
        x, residual, *weights, out, n, H, E, _row(x), _row(residual), _row(out),
        *(_columns(weight, E) for weight in weights), 1.0 if codec is None else codec.factor,
        *scalars,
    )  # fmt: skip
    type = None if codec is None else codec.type
    _instance(function, threads, numbers, wide, type)(*_grid(n, threads), args)


def _vectors(x: Any) -> tuple[int, int, int]:
    """Return the number of vectors, those of a row, and their length."""
    H = x.shape[1] if x.ndim == 3 else 1
    return x.shape[0] * H, H, x.shape[-1]


def _shape(E: int) -> tuple[int, int]:
    """Return the threads per vector and the float4 values per thread."""
    threads = next((t for t in (32, 128, 256, 512) if 16 * t >= E), 1024)
    needed = cuda.ceil_div(E, 4 * threads)
    return threads, 1 << (needed - 1).bit_length()  # few instances: a power of two


def _grid(n_vectors: int, threads: int) -> tuple[int, tuple[int, int]]:
    side_by_side = _WARP_VECTORS if threads == 32 else 1
    return cuda.ceil_div(n_vectors, side_by_side), (threads, side_by_side)


def _row(x: Any) -> int:
    """Return the row stride in elements."""
    return 0 if x is None else x.strides[0] // x.itemsize


def _columns(weight: Any, E: int) -> int:
    """Return the stride of the weights between heads."""
    return E if weight is not None and weight.ndim == 2 else 0


def _wide(E: int, *arrays: Any) -> bool:
    """Return whether every vector of every array allows 16-byte accesses."""
    return E % 4 == 0 and all(
        cuda.address(a) % 16 == 0 and _row(a) % 4 == 0 for a in arrays if a is not None
    )
