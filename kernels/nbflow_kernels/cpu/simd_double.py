"""Arithmetic on 16 lanes of float64, for sums and fits that float32 would cancel.

============================  ===================================================================
`widen(v)` / `narrow(v)`      16 float32 to float64 and back, rounded to nearest
`splat(x)`                    one scalar in all lanes
`add sub mul div`             lane by lane
`fma(a, b, c)`                a * b + c with one rounding
`rint(v)`                     nearest integer, halves to even
`where_less(a, b, x, y)`      lane by lane `x` where a < b, else `y`; NaN is not less
============================  ===================================================================

The type is `simd_compare.f64x16`; `simd_compare.wide_add` accumulates in it.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import errors, types

from nbflow_kernels.cpu import interpreter, llvm
from nbflow_kernels.cpu.llvm import LANES
from nbflow_kernels.cpu.simd import f32x16
from nbflow_kernels.cpu.simd_compare import f64x16

intrinsic = functools.partial(interpreter.intrinsic, fallback="simd_double")

_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)


def _want(name: str, wanted: Any, *values: Any) -> None:
    if any(value != wanted for value in values):
        raise errors.TypingError(f"simd_double.{name}: wanted {wanted}, got {values}")


def _make_conversion(name: str, source: Any, result: Any, op: str) -> Any:
    def convert(typing_context, v):
        _want(name, source, v)

        def codegen(context, builder, signature, args):
            return getattr(builder, op)(args[0], context.get_value_type(result))

        return result(v), codegen

    convert.__name__ = name
    return intrinsic(convert)


widen = _make_conversion("widen", f32x16, f64x16, "fpext")
narrow = _make_conversion("narrow", f64x16, f32x16, "fptrunc")


@intrinsic
def splat(typing_context, x):
    """Return one scalar in all lanes."""

    def codegen(context, builder, signature, args):
        return llvm.splat(builder, context.cast(builder, args[0], signature.args[0], types.float64))

    return f64x16(x), codegen


def _make_binary(name: str, op: str) -> Any:
    def binary(typing_context, a, b):
        _want(name, f64x16, a, b)

        def codegen(context, builder, signature, args):
            return getattr(builder, op)(args[0], args[1])

        return f64x16(a, b), codegen

    binary.__name__ = name
    return intrinsic(binary)


add = _make_binary("add", "fadd")
sub = _make_binary("sub", "fsub")
mul = _make_binary("mul", "fmul")
div = _make_binary("div", "fdiv")


@intrinsic
def fma(typing_context, a, b, c):
    """Return a * b + c with one rounding."""
    _want("fma", f64x16, a, b, c)

    def codegen(context, builder, signature, args):
        return llvm.call(builder, f"llvm.fma.v{LANES}f64", _DOUBLES, args)

    return f64x16(a, b, c), codegen


@intrinsic
def rint(typing_context, v):
    """Return the nearest integers, halves to even."""
    _want("rint", f64x16, v)

    def codegen(context, builder, signature, args):
        return llvm.call(builder, f"llvm.rint.v{LANES}f64", _DOUBLES, args)

    return f64x16(v), codegen


@intrinsic
def where_less(typing_context, a, b, x, y):
    """Return `x` where a < b, else `y`."""
    _want("where_less", f64x16, a, b, x, y)

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return f64x16(a, b, x, y), codegen
