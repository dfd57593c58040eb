"""Vectors of 16 lanes as values in Numba CPU kernels; `simd_int8` adds vectors of 64 bytes.

Each function is an `@intrinsic` that emits one or two generic LLVM instructions, so the machine
code does not depend on the auto-vectorizer, and the order of additions is the written one.  The IR
names no instruction set: LLVM splits the 16 lanes into the processor's registers (one of AVX-512,
two of AVX2, four of NEON).

Addresses are integers, ``array.ctypes.data`` (inside a kernel too) plus a byte offset, without a
bounds check: the public functions check shapes before a kernel runs.

==================================  ===============================================================
`load_f32(addr)`                    16 float32
`load_f16(addr)`                    16 float16, widened to float32
`load_bf16(addr)`                   16 bfloat16, widened to float32
`load_u8(addr)` / `load_i8(addr)`   16 bytes, zero- or sign-extended to int32
`load_i32(addr)`                    16 int32
`store_f32(addr, v)`                write 16 float32
`store_i32(addr, v)`                write 16 int32
`splat(x)` / `splat_i32(i)`         one scalar in all lanes
`splat_f16(addr)`                   one float16 in memory in all lanes, widened to float32
`add sub mul div`                   lane by lane, float32 or integers (no `div` for these)
`and_ or_ shl shr`                  integers; `shr` is a logical shift, shift counts are vectors
`fma(a, b, c)`                      a * b + c with one rounding, float32
`maximum minimum`                   float32; a NaN lane gives the other operand
`rint(v)`                           nearest integer, halves to even, float32
`to_f32(v)` / `to_i32(v)`           int32 to float32, float32 to int32 (toward zero)
`as_i32(v)` / `as_f32(v)`           the same bits under the other type
`sum(v)` / `max(v)`                 horizontal; the sum is a fixed tree: lanes i and i+8, i+4, ...
`exp(v)`                            float32, relative error below 2e-7 on [-87, 88]
`half_to_float(u16)` (scalar)       the float16 with those bits, as float32
`float_to_half(f32)` (scalar)       the bits of the nearest float16
`bits_to_float(bits)` (scalar)      the float32 with those bits
`address(array)` (scalar)           the address of the first element
==================================  ===============================================================
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import errors, extending, types
from numba.core.datamodel import models

from nbflow_kernels.cpu import interpreter, jit, llvm
from nbflow_kernels.cpu.float16 import emit_narrow, emit_widen
from nbflow_kernels.cpu.llvm import F32, I8, I16, I32, I64

intrinsic = functools.partial(interpreter.intrinsic, fallback="simd")

LANES = llvm.LANES
_ELEMENT = {"f32": F32, "i32": I32, "i8": I8}


class Vector(types.Type):
    """The Numba type of 512 bits of one element type."""

    def __init__(self, element: str) -> None:
        self.element = element
        self.lanes = 4 * LANES if element == "i8" else LANES
        super().__init__(name=f"simd.{element}x{self.lanes}")

    @property
    def llvm(self) -> Any:
        """Return the LLVM type."""
        return ir.VectorType(_ELEMENT[self.element], self.lanes)


@extending.register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Vector) -> None:
        super().__init__(manager, fe_type, fe_type.llvm)


f32x16 = Vector("f32")
i32x16 = Vector("i32")
i8x64 = Vector("i8")  # signed or unsigned, as the operation says


def _want(name: str, value: Any, *allowed: Vector) -> None:
    if value not in allowed:
        raise errors.TypingError(f"simd.{name}: wanted {allowed}, got {value}")


# ---- loads and stores: unaligned ------------------------------------------------------------


def _make_load(name: str, stored: Any, result: Vector, widen: str | None) -> Any:
    def load(typing_context, addr):
        def codegen(context, builder, signature, args):
            address = llvm.int64(context, builder, signature, args)
            value = llvm.load(builder, address, llvm.vector(stored))
            if widen in ("zext", "sext"):
                return getattr(builder, widen)(value, result.llvm)
            return emit_widen(builder, value, widen)

        return result(addr), codegen

    load.__name__ = name
    return intrinsic(load)


load_f32 = _make_load("load_f32", F32, f32x16, None)
load_f16 = _make_load("load_f16", I16, f32x16, "f16")
load_bf16 = _make_load("load_bf16", I16, f32x16, "bf16")
load_i32 = _make_load("load_i32", I32, i32x16, None)
load_u8 = _make_load("load_u8", I8, i32x16, "zext")
load_i8 = _make_load("load_i8", I8, i32x16, "sext")


def _make_store(name: str, vector: Vector) -> Any:
    def store(typing_context, addr, value):
        _want(name, value, vector)

        def codegen(context, builder, signature, args):
            llvm.store(builder, args[1], llvm.int64(context, builder, signature, args))
            return context.get_dummy_value()

        return types.none(addr, value), codegen

    store.__name__ = name
    return intrinsic(store)


store_f32 = _make_store("store_f32", f32x16)
store_i32 = _make_store("store_i32", i32x16)


def _make_splat(name: str, vector: Vector, scalar: Any) -> Any:
    def make(typing_context, x):
        def codegen(context, builder, signature, args):
            value = context.cast(builder, args[0], signature.args[0], scalar)
            return llvm.splat(builder, value)

        return vector(x), codegen

    make.__name__ = name
    return intrinsic(make)


splat = _make_splat("splat", f32x16, types.float32)
splat_i32 = _make_splat("splat_i32", i32x16, types.int32)


@intrinsic
def splat_f16(typing_context, addr):
    """Load one float16, widened to float32, in all lanes.

    x86 loads a scalar of 16 bits into a register that it keeps otherwise, so it waits for the
    register's last use: a loop over blocks would not overlap.  A broadcast load does not wait.
    """

    def codegen(context, builder, signature, args):
        bits = llvm.load(builder, llvm.int64(context, builder, signature, args), I16)
        return emit_widen(builder, llvm.splat(builder, bits))

    return f32x16(addr), codegen


# ---- lane by lane ---------------------------------------------------------------------------


def _make_binary(name: str, float_op: str | None, int_op: str | None) -> Any:
    allowed = ((f32x16,) if float_op else ()) + ((i32x16, i8x64) if int_op else ())

    def binary(typing_context, a, b):
        _want(name, a, *allowed)
        _want(name, b, a)

        def codegen(context, builder, signature, args):
            if a == f32x16:
                return getattr(builder, str(float_op))(args[0], args[1])
            return getattr(builder, str(int_op))(args[0], args[1])

        return a(a, b), codegen

    binary.__name__ = name
    return intrinsic(binary)


add = _make_binary("add", "fadd", "add")
sub = _make_binary("sub", "fsub", "sub")
mul = _make_binary("mul", "fmul", "mul")
div = _make_binary("div", "fdiv", None)
and_ = _make_binary("and_", None, "and_")
or_ = _make_binary("or_", None, "or_")
shl = _make_binary("shl", None, "shl")
shr = _make_binary("shr", None, "lshr")


def _make_call(name: str, llvm_name: str, n_args: int) -> Any:
    def emit(builder, args):
        return llvm.call(builder, f"llvm.{llvm_name}.v{LANES}f32", f32x16.llvm, args)

    def call1(typing_context, a):
        _want(name, a, f32x16)
        return f32x16(a), lambda context, builder, signature, args: emit(builder, args)

    def call2(typing_context, a, b):
        _want(name, a, f32x16)
        _want(name, b, f32x16)
        return f32x16(a, b), lambda context, builder, signature, args: emit(builder, args)

    def call3(typing_context, a, b, c):
        for value in (a, b, c):
            _want(name, value, f32x16)
        return f32x16(a, b, c), lambda context, builder, signature, args: emit(builder, args)

    chosen = (call1, call2, call3)[n_args - 1]
    chosen.__name__ = name
    return intrinsic(chosen)


fma = _make_call("fma", "fma", 3)
maximum = _make_call("maximum", "maxnum", 2)
minimum = _make_call("minimum", "minnum", 2)
rint = _make_call("rint", "rint", 1)


def _make_conversion(name: str, source: Vector, result: Vector, op: str) -> Any:
    def convert(typing_context, v):
        _want(name, v, source)

        def codegen(context, builder, signature, args):
            return getattr(builder, op)(args[0], result.llvm)

        return result(v), codegen

    convert.__name__ = name
    return intrinsic(convert)


to_f32 = _make_conversion("to_f32", i32x16, f32x16, "sitofp")
to_i32 = _make_conversion("to_i32", f32x16, i32x16, "fptosi")
as_i32 = _make_conversion("as_i32", f32x16, i32x16, "bitcast")
as_f32 = _make_conversion("as_f32", i32x16, f32x16, "bitcast")


# ---- across lanes ---------------------------------------------------------------------------


def _make_reduction(name: str, op: str) -> Any:
    def reduce(typing_context, v):
        _want(name, v, f32x16)

        def codegen(context, builder, signature, args):
            def largest(low, high):
                name = f"llvm.maxnum.v{low.type.count}f32"
                return llvm.call(builder, name, low.type, [low, high])

            join = builder.fadd if op == "fadd" else largest
            return llvm.tree_reduce(builder, args[0], join)

        return types.float32(v), codegen

    reduce.__name__ = name
    return intrinsic(reduce)


sum = _make_reduction("sum", "fadd")
max = _make_reduction("max", "fmax")


# ---- scalars --------------------------------------------------------------------------------


@intrinsic
def half_to_float(typing_context, bits):
    """Return the float16 with these bits (uint16 or int16) as float32."""

    def codegen(context, builder, signature, args):
        value = context.cast(builder, args[0], signature.args[0], types.uint16)
        return emit_widen(builder, value)

    return types.float32(bits), codegen


@intrinsic
def float_to_half(typing_context, x):
    """Return the bits (uint16) of the float16 nearest to `x`, halves to even."""

    def codegen(context, builder, signature, args):
        value = context.cast(builder, args[0], signature.args[0], types.float32)
        return emit_narrow(builder, value)

    return types.uint16(x), codegen


@intrinsic
def bits_to_float(typing_context, bits):
    """Return the float32 with these bits (the lowest 32 of an integer)."""

    def codegen(context, builder, signature, args):
        value = context.cast(builder, args[0], signature.args[0], types.int64)
        return builder.bitcast(builder.trunc(value, I32), F32)

    return types.float32(bits), codegen


@intrinsic
def address(typing_context, array):
    """Return the address of an array's first element as int64 (cheaper than ``.ctypes.data``).

    An array made in the kernel lives until its name is used last: take its address inside the loop
    that works on it, not before.
    """
    if not isinstance(array, types.Array):
        raise errors.TypingError(f"simd.address: wanted an array, got {array}")

    def codegen(context, builder, signature, args):
        structure = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(structure.data, I64)

    return types.int64(array), codegen


@jit.device_function(inline="llvm")
def exp(v):
    """Return e**v lane by lane: range reduction by ln 2 and a polynomial of degree 6.

    The argument is clamped to [-87, 88], so -inf gives 1.6e-38, not 0, and NaN is lost: callers
    that mask must multiply by zero.
    """
    low = splat(-87.0)
    x = minimum(maximum(v, low), splat(88.0))
    n = rint(mul(x, splat(1.4426950408889634)))  # 1 / ln 2
    # ln 2 in two parts, so that n * high is exact in float32
    r = fma(n, splat(-0.693145751953125), x)
    r = fma(n, splat(-1.4286068203094172e-06), r)
    p = splat(1.0 / 720.0)
    p = fma(p, r, splat(1.0 / 120.0))
    p = fma(p, r, splat(1.0 / 24.0))
    p = fma(p, r, splat(1.0 / 6.0))
    p = fma(p, r, splat(0.5))
    p = fma(p, r, splat(1.0))
    p = fma(p, r, splat(1.0))
    scale = as_f32(shl(add(to_i32(n), splat_i32(127)), splat_i32(23)))
    return mul(p, scale)
