"""Sixteen blocks in lockstep: what block encoders need beside `nbflow_kernels.cpu.simd`.

An encoder adds up the weights of a block in a published order, so it cannot be vectorized inside
of a block.  Here a lane is a block: a *panel* holds 16 blocks side by side, weight i of all of them
in vector i, and each step of an encoder is one instruction for 16 blocks.

A *mask* is an int32 vector whose lanes are -1 (true) or 0; `simd.and_` and `simd.or_` join masks.

================================  =================================================================
`less(a, b)`                      mask of a < b; false where one is not a number
`differs(a, b)`                   mask of a != b; true where one is not a number
`choose(mask, yes, no)`           lane by lane, float32 or int32
`absolute(v)` / `sqrt(v)`         float32
`nearest(v)`                      nearest integer as int32, halves to even; see there
`clamp(i, low, high)`             int32
`any_lane(mask)` (scalar)         whether the mask is true anywhere
`fill_panel`, `fill_importance`   blocks to a panel
`empty_panel`                     and back
================================  =================================================================
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, errors, types

from nbflow_kernels.cpu import interpreter, jit, simd
from nbflow_kernels.cpu.simd import LANES, f32x16, i32x16

intrinsic = functools.partial(interpreter.intrinsic, fallback="quantizers_simd_panel")

VECTOR = 64  # bytes
ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits


def _make_comparison(name: str, emit: Any) -> Any:
    def compare(typing_context, a, b):
        if a != f32x16 or b != f32x16:
            raise errors.TypingError(f"lockstep.{name}: wanted two vectors of float32")

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
        raise errors.TypingError(f"lockstep.choose: wanted a mask and two vectors, got {yes}, {no}")

    def codegen(context, builder, signature, args):
        zeros = ir.Constant(i32x16.llvm, [0] * LANES)
        return builder.select(builder.icmp_signed("!=", args[0], zeros), args[1], args[2])

    return yes(mask, yes, no), codegen


@intrinsic
def any_lane(typing_context, mask):
    """Return whether the mask is true in any lane."""
    if mask != i32x16:
        raise errors.TypingError(f"lockstep.any_lane: wanted a mask, got {mask}")

    def codegen(context, builder, signature, args):
        zeros = ir.Constant(i32x16.llvm, [0] * LANES)
        bits = builder.bitcast(builder.icmp_signed("!=", args[0], zeros), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))

    return types.boolean(mask), codegen


def _make_unary(name: str, llvm_name: str) -> Any:
    def unary(typing_context, v):
        if v != f32x16:
            raise errors.TypingError(f"lockstep.{name}: wanted a vector of float32, got {v}")

        def codegen(context, builder, signature, args):
            function_type = ir.FunctionType(f32x16.llvm, [f32x16.llvm])
            function = cgutils.get_or_insert_function(builder.module, function_type, llvm_name)
            return builder.call(function, args)

        return f32x16(v), codegen

    unary.__name__ = name
    return intrinsic(unary)


absolute = _make_unary("absolute", "llvm.fabs.v16f32")
sqrt = _make_unary("sqrt", "llvm.sqrt.v16f32")


@jit.kernel(strict=True)
def nearest(v):
    """Return the nearest integers of |v| <= 2**22 as int32, halves to even.

    This is GGML's rounding, also in what it makes of other numbers: NaN gives 0, infinities give
    -2**22.
    """
    bits = simd.as_i32(simd.add(v, simd.splat(ROUND)))
    return simd.sub(simd.and_(bits, simd.splat_i32(0x7FFFFF)), simd.splat_i32(0x400000))


def _make_extreme(name: str, op: str) -> Any:
    def extreme(typing_context, a, b):
        if a != i32x16 or b != i32x16:
            raise errors.TypingError(f"lockstep.{name}: wanted two vectors of int32")

        def codegen(context, builder, signature, args):
            return builder.select(builder.icmp_signed(op, args[0], args[1]), args[0], args[1])

        return i32x16(a, b), codegen

    extreme.__name__ = name
    return intrinsic(extreme)


smaller = _make_extreme("smaller", "<")
larger = _make_extreme("larger", ">")


@jit.kernel(strict=True)
def clamp(v, low, high):
    """Return the int32 lanes cut off at the scalars `low` and `high`."""
    return smaller(larger(v, simd.splat_i32(low)), simd.splat_i32(high))


# ---- panels -------------------------------------------------------------------------------------


@jit.kernel(strict=True)
def fill_panel(source, first, panel):
    """Write blocks `first`.. of `source` (blocks, size) side by side to `panel` (size, 16).

    After the last block come copies of it, which nobody reads back.
    """
    for lane in range(LANES):
        block = source[min(first + lane, len(source) - 1)]
        for i in range(panel.shape[0]):
            panel[i, lane] = block[i]


@jit.kernel(strict=True)
def fill_importance(importance, blocks, first, panel):
    """Do as `fill_panel` with importances (1 or rows, columns) of rows of `blocks` blocks."""
    size = panel.shape[0]
    for lane in range(LANES):
        block = first + lane
        row, column = block // blocks % len(importance), block % blocks * size
        for i in range(size):
            panel[i, lane] = importance[row, column + i]


@jit.kernel(strict=True)
def empty_panel(panel, first, target):
    """Write a panel (size, 16) of small whole numbers back to blocks of `target`."""
    for lane in range(min(LANES, len(target) - first)):
        block = target[first + lane]
        for i in range(panel.shape[0]):
            block[i] = np.int32(panel[i, lane])
