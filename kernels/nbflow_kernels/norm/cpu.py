"""Normalization on the CPU: vector by vector, 4 x 16 columns at a time.

A vector is the last axis: a whole row of (T, E), or one head of (T, H, E).  The kernels take
addresses, so that one compiled form serves strided rows (a slice of columns of a wider
matrix), heads, and calls without a weight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.float8 import encode_float8_row
from nbflow_kernels.cpu.parallel_for import hold, not_capturable, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of, load_first, read_f32, store_first

_COST = 2  # multiply-adds per element, for the decision to use more than one thread

# Read for all columns if the weight or bias is None.
_ONES, _ZEROS = np.ones(16, np.float32), np.zeros(16, np.float32)


def rmsnorm(x, weight, eps, offset, out, *, residual=None, divisor=None, codec=None):
    """See `nbflow_kernels.rmsnorm`, and `fused_add_rmsnorm` with a residual.

    `divisor` turns the sum of squares into their mean; 1 makes `l2norm`.  With a `codec`
    (`Float8Codec`), `out` has float8 codes.
    """
    hold(x, residual, weight, out)
    parallel_for(
        _rmsnorm if codec is None else _rmsnorm_float8, x.shape[0], x.size * _COST,
        *_rows(x), *_rows(residual), *_columns(weight, _ONES), *_rows(out), *_heads(x),
        float(divisor or x.shape[-1]), eps, offset, *_codec(codec),
    )  # fmt: skip


def layernorm(x, weight, bias, eps, out, *, residual=None, codec=None):
    """See `nbflow_kernels.layernorm`, and `fused_add_layernorm` with a residual."""
    hold(x, residual, weight, bias, out)
    parallel_for(
        _layernorm if codec is None else _layernorm_float8, x.shape[0], x.size * _COST,
        *_rows(x), *_rows(residual), *_columns(weight, _ONES), *_columns(bias, _ZEROS),
        *_rows(out), *_heads(x), eps, *_codec(codec),
    )  # fmt: skip


def linear_norm(x: NDArray[np.float32], scale: float, out: NDArray[np.float32]) -> None:
    """See `nbflow_kernels.linear_norm`; NumPy needs no compilation and is as fast."""
    not_capturable()
    np.multiply(x, np.float32(scale), out=out)


def _rows(x: NDArray[np.float32] | None) -> tuple[int, int]:
    """Return the address and row stride in bytes of an array; zeros for None."""
    return (0, 0) if x is None else (address_of(x), x.strides[0])


def _columns(x: NDArray[np.float32] | None, default: NDArray[np.float32]) -> tuple[int, int, int]:
    """Return a weight's address and its strides in bytes between heads and between columns."""
    if x is None:
        return address_of(default), 0, 0
    return address_of(x), x.strides[0] if x.ndim == 2 else 0, 4


def _codec(codec):
    """Return the arguments of a kernel that writes float8: fields, and the factor of results."""
    if codec is None:
        return ()
    return ((*codec.type, np.float32(codec.factor)),)


def _heads(x: NDArray[np.float32]) -> tuple[int, int]:
    """Return the number of vectors in a row and their length."""
    return x.shape[1] if x.ndim == 3 else 1, x.shape[-1]


@jit.device_function
def _sum(a, E):
    """Return the sum of the vector at `a`: four times 16 lanes, then the ragged end."""
    s0 = s1 = s2 = s3 = simd.splat(0.0)
    body = E - E % 64
    for i in range(a, a + body * 4, 256):
        s0 = simd.add(s0, simd.load_f32(i))
        s1 = simd.add(s1, simd.load_f32(i + 64))
        s2 = simd.add(s2, simd.load_f32(i + 128))
        s3 = simd.add(s3, simd.load_f32(i + 192))
    total = simd.sum(simd.add(simd.add(s0, s1), simd.add(s2, s3)))
    for i in range(body, E):
        total += read_f32(a + i * 4)
    return total


@jit.device_function
def sum_of_squares(a, E, mean):
    """Return the sum of (x - mean)**2 in the order of `_sum`."""
    m = simd.splat(mean)
    s0 = s1 = s2 = s3 = simd.splat(0.0)
    body = E - E % 64
    for i in range(a, a + body * 4, 256):
        v0 = simd.sub(simd.load_f32(i), m)
        v1 = simd.sub(simd.load_f32(i + 64), m)
        v2 = simd.sub(simd.load_f32(i + 128), m)
        v3 = simd.sub(simd.load_f32(i + 192), m)
        s0 = simd.fma(v0, v0, s0)
        s1 = simd.fma(v1, v1, s1)
        s2 = simd.fma(v2, v2, s2)
        s3 = simd.fma(v3, v3, s3)
    total = simd.sum(simd.add(simd.add(s0, s1), simd.add(s2, s3)))
    for i in range(body, E):
        v = read_f32(a + i * 4) - mean
        total += v * v
    return total


@jit.device_function
def _add_to(target, source, E):
    """Add the vector at `source` to the one at `target`."""
    body, rest = E - E % 16, E % 16
    for i in range(0, body * 4, 64):
        v = simd.add(simd.load_f32(target + i), simd.load_f32(source + i))
        simd.store_f32(target + i, v)
    if rest > 0:
        target, source = target + body * 4, source + body * 4
        v = simd.add(load_first(target, rest, 0.0), load_first(source, rest, 0.0))
        store_first(target, rest, v)


@jit.kernel(unroll=False)
def _rmsnorm(
    x, x_bytes, residual, residual_bytes, weight, weight_head_bytes, weight_bytes, out, out_bytes,
    H, E, divisor, eps, offset, start, stop
):  # fmt: skip
    """Normalize rows [start, stop) of `x`, or of `residual` after adding `x` to it, into `out`."""
    body, rest = E - E % 16, E % 16
    shift = np.float32(offset)
    for t in range(start, stop):
        for h in range(H):
            a = x + t * x_bytes + h * E * 4
            y = out + t * out_bytes + h * E * 4
            w = weight + h * weight_head_bytes
            if residual != 0:
                r = residual + t * residual_bytes + h * E * 4
                _add_to(r, a, E)
                a = r
            mean_square = sum_of_squares(a, E, np.float32(0.0)) / np.float32(divisor)
            scale = np.float32(1.0) / np.sqrt(mean_square + np.float32(eps))
            for i in range(0, body, 16):
                factor = simd.add(simd.load_f32(w + i * weight_bytes), simd.splat(shift))
                v = simd.mul(simd.load_f32(a + i * 4), simd.splat(scale))
                simd.store_f32(y + i * 4, simd.mul(v, factor))
            if rest > 0:
                factor = load_first(w + body * weight_bytes, rest, 0.0)
                v = simd.mul(load_first(a + body * 4, rest, 0.0), simd.splat(scale))
                v = simd.mul(v, simd.add(factor, simd.splat(shift)))
                store_first(y + body * 4, rest, v)


@jit.kernel
def _layernorm(
    x, x_bytes, residual, residual_bytes, weight, weight_head_bytes, weight_bytes, bias,
    bias_head_bytes, bias_bytes, out, out_bytes, H, E, eps, start, stop
):  # fmt: skip
    """Normalize rows [start, stop): mean first, then the mean square of the differences."""
    body, rest = E - E % 16, E % 16
    for t in range(start, stop):
        for h in range(H):
            a = x + t * x_bytes + h * E * 4
            y = out + t * out_bytes + h * E * 4
            w = weight + h * weight_head_bytes
            b = bias + h * bias_head_bytes
            if residual != 0:
                r = residual + t * residual_bytes + h * E * 4
                _add_to(r, a, E)
                a = r
            mean = _sum(a, E) / np.float32(E)
            variance = sum_of_squares(a, E, mean) / np.float32(E)
            scale = np.float32(1.0) / np.sqrt(variance + np.float32(eps))
            m = simd.splat(mean)
            s = simd.splat(scale)
            for i in range(0, body, 16):
                v = simd.mul(simd.sub(simd.load_f32(a + i * 4), m), s)
                f = simd.load_f32(w + i * weight_bytes)
                v = simd.fma(v, f, simd.load_f32(b + i * bias_bytes))
                simd.store_f32(y + i * 4, v)
            if rest > 0:
                v = simd.mul(simd.sub(load_first(a + body * 4, rest, 0.0), m), s)
                f = load_first(w + body * weight_bytes, rest, 0.0)
                v = simd.fma(v, f, load_first(b + body * bias_bytes, rest, 0.0))
                store_first(y + body * 4, rest, v)


@jit.kernel
def _rmsnorm_float8(
    x, x_bytes, residual, residual_bytes, weight, weight_head_bytes, weight_bytes, out, out_bytes,
    H, E, divisor, eps, offset, codec, start, stop
):  # fmt: skip
    """Encode rows [start, stop) of `_rmsnorm` in float8."""
    mantissa, bias, largest, factor = codec
    normed = np.empty(H * E, np.float32)
    row = simd.address(normed)
    for t in range(start, stop):
        _rmsnorm(
            x + t * x_bytes, x_bytes, residual + t * residual_bytes, residual_bytes, weight,
            weight_head_bytes, weight_bytes, row, 0, H, E, divisor, eps, offset, 0, 1,
        )  # fmt: skip
        encode_float8_row(mantissa, bias, largest, row, H * E, factor, out + t * out_bytes)


@jit.kernel
def _layernorm_float8(
    x, x_bytes, residual, residual_bytes, weight, weight_head_bytes, weight_bytes, bias,
    bias_head_bytes, bias_bytes, out, out_bytes, H, E, eps, codec, start, stop
):  # fmt: skip
    """Encode rows [start, stop) of `_layernorm` in float8."""
    mantissa, exponent_bias, largest, factor = codec
    normed = np.empty(H * E, np.float32)
    row = simd.address(normed)
    for t in range(start, stop):
        _layernorm(
            x + t * x_bytes, x_bytes, residual + t * residual_bytes, residual_bytes, weight,
            weight_head_bytes, weight_bytes, bias, bias_head_bytes, bias_bytes, row, 0, H, E, eps,
            0, 1,
        )  # fmt: skip
        encode_float8_row(mantissa, exponent_bias, largest, row, H * E, factor, out + t * out_bytes)
