"""SIMD across blocks: panels of 16 blocks, one per lane, and operations on their vectors.

A quantizer sums over the weights of a block in the published order, so it cannot be vectorized
within a block.  Here each lane holds a block: vector i of a *panel* has weight i of 16 blocks, and
each step of a quantizer is one instruction for 16 blocks.

A *mask* is an int32 vector of lanes -1 (true) or 0; `simd.and_` and `simd.or_` combine masks.

================================  =================================================================
`less(a, b)`                      mask of a < b; false for NaN
`differs(a, b)`                   mask of a != b; true for NaN
`choose(mask, yes, no)`           lane-wise select, float32 or int32
`absolute(v)` / `sqrt(v)`         float32
`nearest(v)`                      nearest integer as int32, halves to even
`clamp(i, low, high)`             int32
`any_lane(mask)` (scalar)         true if the mask is true in any lane
`load_panel`, `load_importance`   blocks to a panel
`store_panel`                     panel to blocks
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


def _make_binary(name: str, vector: Any, emit: Any) -> Any:
    def binary(typing_context, a, b):
        if a != vector or b != vector:
            raise errors.TypingError(f"simd_panel.{name} takes two {vector}, got {a} and {b}")

        def codegen(context, builder, signature, args):
            return emit(builder, args[0], args[1])

        return i32x16(a, b), codegen

    binary.__name__ = name
    return intrinsic(binary)


def _emit_less(builder, a, b):
    return builder.sext(builder.fcmp_ordered("<", a, b), i32x16.llvm)


def _emit_differs(builder, a, b):
    return builder.sext(builder.fcmp_unordered("!=", a, b), i32x16.llvm)


def _emit_smaller(builder, a, b):
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _emit_larger(builder, a, b):
    return builder.select(builder.icmp_signed(">", a, b), a, b)


less = _make_binary("less", f32x16, _emit_less)
differs = _make_binary("differs", f32x16, _emit_differs)
smaller = _make_binary("smaller", i32x16, _emit_smaller)
larger = _make_binary("larger", i32x16, _emit_larger)


@intrinsic
def choose(typing_context, mask, yes, no):
    """Return `yes` where the mask is true, else `no`."""
    if mask != i32x16 or yes not in (f32x16, i32x16) or no != yes:
        raise errors.TypingError(f"simd_panel.choose takes a mask and two vectors, got {yes}, {no}")

    def codegen(context, builder, signature, args):
        zeros = ir.Constant(i32x16.llvm, [0] * LANES)
        return builder.select(builder.icmp_signed("!=", args[0], zeros), args[1], args[2])

    return yes(mask, yes, no), codegen


@intrinsic
def any_lane(typing_context, mask):
    """Return True if the mask is true in any lane."""
    if mask != i32x16:
        raise errors.TypingError(f"simd_panel.any_lane takes a mask, got {mask}")

    def codegen(context, builder, signature, args):
        zeros = ir.Constant(i32x16.llvm, [0] * LANES)
        bits = builder.bitcast(builder.icmp_signed("!=", args[0], zeros), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))

    return types.boolean(mask), codegen


def _make_unary(name: str, llvm_name: str) -> Any:
    def unary(typing_context, v):
        if v != f32x16:
            raise errors.TypingError(f"simd_panel.{name} takes a vector of float32, got {v}")

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

    GGML's rounding, including its results for other numbers: 0 for NaN, -2**22 for infinities.
    """
    bits = simd.as_i32(simd.add(v, simd.splat(ROUND)))
    return simd.sub(simd.and_(bits, simd.splat_i32(0x7FFFFF)), simd.splat_i32(0x400000))


@jit.kernel(strict=True)
def clamp(v, low, high):
    """Clamp int32 lanes to the scalars `low` and `high`."""
    return smaller(larger(v, simd.splat_i32(low)), simd.splat_i32(high))


# ---- panels -------------------------------------------------------------------------------------


@jit.kernel(strict=True)
def load_panel(source, first, panel):
    """Write 16 blocks of `source` (blocks, size) from `first` on to `panel` (size, 16).

    Lanes behind the last block hold copies of it.
    """
    for lane in range(LANES):
        block = source[min(first + lane, len(source) - 1)]
        for i in range(panel.shape[0]):
            panel[i, lane] = block[i]


@jit.kernel(strict=True)
def load_importance(importance, blocks, first, panel):
    """Write importance (1 or rows, columns) of 16 blocks to a panel; a row has `blocks` blocks."""
    size = panel.shape[0]
    for lane in range(LANES):
        block = first + lane
        row, column = block // blocks % len(importance), block % blocks * size
        for i in range(size):
            panel[i, lane] = importance[row, column + i]


@jit.kernel(strict=True)
def store_panel(panel, first, target):
    """Write a panel (size, 16) of small integers to blocks of `target`."""
    for lane in range(min(LANES, len(target) - first)):
        block = target[first + lane]
        for i in range(panel.shape[0]):
            block[i] = np.int32(panel[i, lane])
