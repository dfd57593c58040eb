"""Comparisons, masks, selection, extremes, float64 accumulators and log on 16 lanes.

A *mask* is an int32 vector whose lanes are -1 (true) or 0; `simd.and_` and `simd.or_` join masks.

==============================  =================================================================
`any_ge(a, b)` (scalar)         whether any lane of `a` is at least that of `b` (NaN: no)
`where_ge(a, b, x, y)`          lane by lane `x` where a >= b, else `y`
`less(a, b)`                    mask of a < b; false for NaN
`differs(a, b)`                 mask of a != b; true for NaN
`choose(mask, yes, no)`         lane by lane, float32 or int32
`any_lane(mask)` (scalar)       whether the mask is true in any lane
`absolute(v)` / `sqrt(v)`       float32
`nearest(v)`                    nearest integer as int32, ties to even; see there
`smaller larger`                of two int32, lane by lane
`clamp(i, low, high)`           int32
`wide_zero()`                   16 float64 zeros
`wide_add(total, v)`            `total` plus 16 float32, added in float64
`wide_sum(total)`               the sum of the lanes: a fixed tree, lanes i and i+8, i+4, ...
`log(v)`                        natural logarithm of normal positive float32, error below 2e-7
                                plus half a unit of the result
`bits_of(x)` (scalar)           the bits of a float32 as int64; back: `simd.bits_to_float`
==============================  =================================================================
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import errors, extending, types
from numba.core.datamodel import models

from nbflow_kernels.cpu import interpreter, jit, llvm, simd
from nbflow_kernels.cpu.llvm import LANES
from nbflow_kernels.cpu.simd import f32x16, i32x16

intrinsic = functools.partial(interpreter.intrinsic, fallback="simd_compare")

_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)
ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits


class Float64Accumulator(types.Type):
    """The Numba type of 16 lanes of float64."""

    def __init__(self) -> None:
        super().__init__(name=f"simd.f64x{LANES}")


@extending.register_model(Float64Accumulator)
class _AccumulatorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Float64Accumulator) -> None:
        super().__init__(manager, fe_type, _DOUBLES)


f64x16 = Float64Accumulator()


def _want_floats(name: str, *values: Any) -> None:
    if any(value != f32x16 for value in values):
        raise errors.TypingError(f"simd_compare.{name}: wanted vectors of float32, got {values}")


@intrinsic
def any_ge(typing_context, a, b):
    """Return whether any lane of `a` is at least that of `b`."""
    _want_floats("any_ge", a, b)

    def codegen(context, builder, signature, args):
        lanes = builder.fcmp_ordered(">=", args[0], args[1])
        bits = builder.bitcast(lanes, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))

    return types.boolean(a, b), codegen


@intrinsic
def where_ge(typing_context, a, b, x, y):
    """Return `x` where a >= b, else `y`."""
    _want_floats("where_ge", a, b, x, y)

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">=", args[0], args[1]), args[2], args[3])

    return f32x16(a, b, x, y), codegen


@intrinsic
def wide_zero(typing_context):
    """Return 16 float64 zeros."""

    def codegen(context, builder, signature, args):
        return ir.Constant(_DOUBLES, [0.0] * LANES)

    return f64x16(), codegen


@intrinsic
def wide_add(typing_context, total, v):
    """Return `total` plus 16 float32, added in float64."""
    _want_floats("wide_add", v)

    def codegen(context, builder, signature, args):
        return builder.fadd(args[0], builder.fpext(args[1], _DOUBLES))

    return f64x16(total, v), codegen


@intrinsic
def wide_sum(typing_context, total):
    """Return the sum of the float64 lanes by a fixed tree."""

    def codegen(context, builder, signature, args):
        return llvm.tree_reduce(builder, args[0], builder.fadd)

    return types.float64(total), codegen


@intrinsic
def bits_of(typing_context, x):
    """Return the bits of a float32 as int64."""

    def codegen(context, builder, signature, args):
        value = context.cast(builder, args[0], signature.args[0], types.float32)
        return builder.sext(builder.bitcast(value, ir.IntType(32)), ir.IntType(64))

    return types.int64(x), codegen


def _make_comparison(name: str, emit: Any) -> Any:
    def compare(typing_context, a, b):
        if a != f32x16 or b != f32x16:
            raise errors.TypingError(f"simd_compare.{name}: wanted two vectors of float32")

        def codegen(context, builder, signature, args):
            return builder.sext(emit(builder, args[0], args[1]), i32x16.llvm)

        return i32x16(a, b), codegen

    compare.__name__ = name
    return intrinsic(compare)


less = _make_comparison("less", lambda builder, a, b: builder.fcmp_ordered("<", a, b))
differs = _make_comparison("differs", lambda builder, a, b: builder.fcmp_unordered("!=", a, b))


@intrinsic
def choose(typing_context, mask, yes, no):
    """Return `yes` where the mask is true, else `no`."""
    if mask != i32x16 or yes not in (f32x16, i32x16) or no != yes:
        raise errors.TypingError(f"simd_compare.choose: wanted a mask and vectors, got {yes}, {no}")

    def codegen(context, builder, signature, args):
        zeros = ir.Constant(i32x16.llvm, [0] * LANES)
        return builder.select(builder.icmp_signed("!=", args[0], zeros), args[1], args[2])

    return yes(mask, yes, no), codegen


@intrinsic
def any_lane(typing_context, mask):
    """Return whether the mask is true in any lane."""
    if mask != i32x16:
        raise errors.TypingError(f"simd_compare.any_lane: wanted a mask, got {mask}")

    def codegen(context, builder, signature, args):
        zeros = ir.Constant(i32x16.llvm, [0] * LANES)
        bits = builder.bitcast(builder.icmp_signed("!=", args[0], zeros), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))

    return types.boolean(mask), codegen


def _make_unary(name: str, llvm_name: str) -> Any:
    def unary(typing_context, v):
        if v != f32x16:
            raise errors.TypingError(f"simd_compare.{name}: wanted a vector of float32, got {v}")

        def codegen(context, builder, signature, args):
            return llvm.call(builder, llvm_name, f32x16.llvm, args)

        return f32x16(v), codegen

    unary.__name__ = name
    return intrinsic(unary)


absolute = _make_unary("absolute", "llvm.fabs.v16f32")
sqrt = _make_unary("sqrt", "llvm.sqrt.v16f32")


@jit.device_function(strict=True)
def nearest(v):
    """Return the nearest integers of |v| <= 2**22 as int32, halves to even.

    This is GGML's rounding, also of other numbers: NaN gives 0, infinities give -2**22.
    """
    bits = simd.as_i32(simd.add(v, simd.splat(ROUND)))
    return simd.sub(simd.and_(bits, simd.splat_i32(0x7FFFFF)), simd.splat_i32(0x400000))


def _make_extreme(name: str, op: str) -> Any:
    def extreme(typing_context, a, b):
        if a != i32x16 or b != i32x16:
            raise errors.TypingError(f"simd_compare.{name}: wanted two vectors of int32")

        def codegen(context, builder, signature, args):
            return builder.select(builder.icmp_signed(op, args[0], args[1]), args[0], args[1])

        return i32x16(a, b), codegen

    extreme.__name__ = name
    return intrinsic(extreme)


smaller = _make_extreme("smaller", "<")
larger = _make_extreme("larger", ">")


@jit.device_function(strict=True)
def clamp(v, low, high):
    """Return the int32 lanes clamped to the scalars `low` and `high`."""
    return smaller(larger(v, simd.splat_i32(low)), simd.splat_i32(high))


@jit.device_function(inline="always")
def log(v):
    """Return ln v = e ln 2 + 2 artanh(s), v = 2**e m, s = (m - 1) / (m + 1), m around 1.

    |s| is at most 0.172, so the first term left out of artanh is below 2 s**11 / 11 = 7e-10.
    """
    bits = simd.as_i32(v)
    # 0x3F3504F3 are the bits of sqrt(1/2), the least m
    shifted = simd.shr(simd.add(bits, simd.splat_i32(0x3F800000 - 0x3F3504F3)), simd.splat_i32(23))
    exponent = simd.sub(shifted, simd.splat_i32(127))
    m = simd.as_f32(simd.sub(bits, simd.shl(exponent, simd.splat_i32(23))))
    one = simd.splat(1.0)
    s = simd.div(simd.sub(m, one), simd.add(m, one))
    s2 = simd.mul(s, s)
    p = simd.splat(2.0 / 9.0)
    p = simd.fma(p, s2, simd.splat(2.0 / 7.0))
    p = simd.fma(p, s2, simd.splat(2.0 / 5.0))
    p = simd.fma(p, s2, simd.splat(2.0 / 3.0))
    p = simd.fma(p, s2, simd.splat(2.0))
    return simd.fma(simd.to_f32(exponent), simd.splat(0.6931471805599453), simd.mul(p, s))
