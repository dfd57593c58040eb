"""Operations on 16 lanes for sampling: comparisons, float64 accumulators, logarithms.

==============================  =================================================================
`any_ge(a, b)`                  whether a lane of `a` is at least that of `b` (NaN: no)
`where_ge(a, b, x, y)`          lane by lane `x` where a >= b, else `y`
`wide_zero()`                   16 float64 zeros
`wide_add(total, v)`            `total` plus 16 float32, added in float64
`wide_sum(total)`               the sum of the lanes: a fixed tree, lanes i and i+8, i+4, ...
`log(v)`                        natural logarithm of normal positive float32, error below 2e-7
                                plus half a unit of the result
`bits_of(x)` / `float_of(i)`    the bits of a scalar float32 as int64, and back
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
from nbflow_kernels.cpu.simd import f32x16

intrinsic = functools.partial(interpreter.intrinsic, fallback="simd_compare")

_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)


class Float64Accumulator(types.Type):
    """The Numba type of 16 lanes of float64."""

    def __init__(self) -> None:
        super().__init__(name=f"sampling.f64x{LANES}")


@extending.register_model(Float64Accumulator)
class _WideModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Float64Accumulator) -> None:
        super().__init__(manager, fe_type, _DOUBLES)


f64x16 = Float64Accumulator()


def _want_floats(name: str, *values: Any) -> None:
    if any(value != f32x16 for value in values):
        raise errors.TypingError(f"vectors.{name}: wanted vectors of float32, got {values}")


def _any_ge(typing_context, a, b):
    _want_floats("any_ge", a, b)

    def codegen(context, builder, signature, args):
        lanes = builder.fcmp_ordered(">=", args[0], args[1])
        bits = builder.bitcast(lanes, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))

    return types.boolean(a, b), codegen


def _where_ge(typing_context, a, b, x, y):
    _want_floats("where_ge", a, b, x, y)

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">=", args[0], args[1]), args[2], args[3])

    return f32x16(a, b, x, y), codegen


def _wide_zero(typing_context):
    def codegen(context, builder, signature, args):
        return ir.Constant(_DOUBLES, [0.0] * LANES)

    return f64x16(), codegen


def _wide_add(typing_context, total, v):
    _want_floats("wide_add", v)

    def codegen(context, builder, signature, args):
        return builder.fadd(args[0], builder.fpext(args[1], _DOUBLES))

    return f64x16(total, v), codegen


def _wide_sum(typing_context, total):
    def codegen(context, builder, signature, args):
        return llvm.tree_reduce(builder, args[0], builder.fadd)

    return types.float64(total), codegen


def _bits_of(typing_context, x):
    def codegen(context, builder, signature, args):
        value = context.cast(builder, args[0], signature.args[0], types.float32)
        return builder.sext(builder.bitcast(value, ir.IntType(32)), ir.IntType(64))

    return types.int64(x), codegen


def _float_of(typing_context, bits):
    def codegen(context, builder, signature, args):
        value = context.cast(builder, args[0], signature.args[0], types.int64)
        return builder.bitcast(builder.trunc(value, ir.IntType(32)), ir.FloatType())

    return types.float32(bits), codegen


any_ge: Any = intrinsic(_any_ge)
where_ge: Any = intrinsic(_where_ge)
wide_zero: Any = intrinsic(_wide_zero)
wide_add: Any = intrinsic(_wide_add)
wide_sum: Any = intrinsic(_wide_sum)
bits_of: Any = intrinsic(_bits_of)
float_of: Any = intrinsic(_float_of)


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
