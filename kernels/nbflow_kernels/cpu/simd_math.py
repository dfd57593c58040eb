"""Elementwise math on 16 float32: `expm1`, `tanh`, logistic functions, selection, NaN propagation.

====================================  =========================================================
`keep_nan(y, v)`                      `y`, but NaN where `v` is one
`select(mask, v, other)`              `v` where the int32 `mask` is 1, `other` where it is 0
`expm1(v)`                            e**v - 1, relative error below 3e-7 on [-87, 88]
`tanh(v)`                             relative error below 5e-7; NaN stays
`one_plus_exp(v)`                     1 + e**v, infinite from v = 89 on; NaN is lost
`sigmoid(v)` / `silu(v)`              1 / (1 + e**-v), and v times it; NaN stays
`softplus(v)`                         log(1 + e**v), relative error below 5e-7; NaN stays
====================================  =========================================================
"""

from __future__ import annotations

from nbflow_kernels.cpu import jit, simd


@jit.device_function(inline="llvm")
def keep_nan(y, v):
    """Return `y`, or NaN where `v` is one: minimum and maximum of NaN give the other operand."""
    magnitude = simd.and_(simd.as_i32(v), simd.splat_i32(0x7FFFFFFF))
    # negative exactly if the magnitude's bits are above those of infinity
    is_nan = simd.shr(simd.sub(simd.splat_i32(0x7F800000), magnitude), simd.splat_i32(31))
    bits = simd.and_(simd.sub(simd.splat_i32(0), is_nan), simd.splat_i32(0x7FC00000))
    return simd.as_f32(simd.or_(simd.as_i32(y), bits))


@jit.device_function(inline="llvm")
def select(mask, v, other):
    """Return `v` where the int32 `mask` is 1 and `other` where it is 0."""
    chosen = simd.and_(simd.as_i32(v), simd.sub(simd.splat_i32(0), mask))
    rest = simd.and_(simd.as_i32(other), simd.sub(mask, simd.splat_i32(1)))
    return simd.as_f32(simd.or_(chosen, rest))


@jit.device_function(inline="llvm")
def expm1(v):
    """Return e**v - 1 lane by lane, for arguments clamped to [-87, 88]; NaN is lost."""
    x = simd.minimum(simd.maximum(v, simd.splat(-87.0)), simd.splat(88.0))
    n = simd.rint(simd.mul(x, simd.splat(1.4426950408889634)))  # 1 / ln 2
    # ln 2 in two parts, so that n * high is exact in float32
    r = simd.fma(n, simd.splat(-0.693145751953125), x)
    r = simd.fma(n, simd.splat(-1.4286068203094172e-06), r)
    p = simd.splat(1.0 / 5040.0)
    p = simd.fma(p, r, simd.splat(1.0 / 720.0))
    p = simd.fma(p, r, simd.splat(1.0 / 120.0))
    p = simd.fma(p, r, simd.splat(1.0 / 24.0))
    p = simd.fma(p, r, simd.splat(1.0 / 6.0))
    p = simd.fma(p, r, simd.splat(0.5))
    p = simd.fma(simd.mul(r, r), p, r)  # e**r - 1
    bits = simd.shl(simd.add(simd.to_i32(n), simd.splat_i32(127)), simd.splat_i32(23))
    power = simd.as_f32(bits)
    return simd.fma(p, power, simd.sub(power, simd.splat(1.0)))


@jit.device_function(inline="llvm")
def tanh(v):
    """Return the hyperbolic tangent lane by lane."""
    e = expm1(simd.add(v, v))
    return keep_nan(simd.div(e, simd.add(e, simd.splat(2.0))), v)


@jit.device_function(inline="llvm")
def one_plus_exp(v):
    """Return 1 + e**v, infinite from v = 89 on where `simd.exp` stays at e**88; NaN is lost."""
    beyond = simd.maximum(simd.sub(v, simd.splat(88.0)), simd.splat(0.0))
    return simd.add(simd.splat(1.0), simd.fma(beyond, simd.splat(3e38), simd.exp(v)))


@jit.device_function(inline="llvm")
def sigmoid(v):
    """Return the logistic function of v."""
    return keep_nan(simd.div(simd.splat(1.0), one_plus_exp(simd.sub(simd.splat(0.0), v))), v)


@jit.device_function(inline="llvm")
def silu(v):
    """Return v times the logistic function of v; NaN for -infinity, as in PyTorch."""
    return simd.div(v, one_plus_exp(simd.sub(simd.splat(0.0), v)))


@jit.device_function(inline="llvm")
def softplus(v):
    """Return log(1 + e**v) = max(v, 0) + log1p(e**-|v|).

    log1p(u) = 2 * atanh(s) with s = u / (2 + u) <= 1 / 3; the odd series of atanh up to s**15
    leaves out less than s**16 / 8 = 3e-9 of it.
    """
    magnitude = simd.as_f32(simd.and_(simd.as_i32(v), simd.splat_i32(0x7FFFFFFF)))
    u = simd.exp(simd.sub(simd.splat(0.0), magnitude))
    s = simd.div(u, simd.add(u, simd.splat(2.0)))
    square = simd.mul(s, s)
    p = simd.splat(2.0 / 15.0)
    p = simd.fma(p, square, simd.splat(2.0 / 13.0))
    p = simd.fma(p, square, simd.splat(2.0 / 11.0))
    p = simd.fma(p, square, simd.splat(2.0 / 9.0))
    p = simd.fma(p, square, simd.splat(2.0 / 7.0))
    p = simd.fma(p, square, simd.splat(2.0 / 5.0))
    p = simd.fma(p, square, simd.splat(2.0 / 3.0))
    p = simd.fma(p, square, simd.splat(2.0))
    return keep_nan(simd.fma(p, s, simd.maximum(v, simd.splat(0.0))), v)
