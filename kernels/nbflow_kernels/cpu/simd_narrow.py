"""Loads and stores of small integers packed in bytes and of 16-bit numbers, and lane masks.

A plane of width `w` holds ``8 // w`` values per byte, the first in the lowest bits (see
`nbflow_kernels.formats.bit_fields`).

====================================  =========================================================
`load_fields4 load_fields2            16 values of a plane of 4, 2 or 1 bits, as int32 lanes; the
load_fields1(addr)`                   plane's part starts at `addr` (8, 4 or 2 bytes)
`load_pairs4 load_pairs2              8 values of such a plane (4, 2 or 1 bytes), each in two
load_pairs1(addr)`                    neighbouring lanes
`store_fields4 ...(addr, v)`          the reverse; each lane must fit in the width
`store_pairs4 ...(addr, v)`           the reverse; the odd lanes are ignored
`store_bf16(addr, v)`                 16 float32 as bfloat16, halves to even, NaN stays NaN
`half_bits(v)`                        16 float32 rounded to float16: the bits, in int32 lanes
`from_half_bits(i)`                   the low 16 bits of int32 lanes as float16, widened to float32
`write_u16 write_u8(addr, i)`         the low 16 or 8 bits of an int
`keep(v, count)`                      lanes from `count` on become 0
`choose_odd(even, odd)`               int32 lanes of `even` and, at the odd places, of `odd`
====================================  =========================================================
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import errors, types

from nbflow_kernels.cpu import interpreter, llvm
from nbflow_kernels.cpu.float16 import emit_narrow, emit_narrow_bf16, emit_widen
from nbflow_kernels.cpu.llvm import I8, I16, I32, I64, LANES, constant
from nbflow_kernels.cpu.simd import f32x16, i32x16
from nbflow_kernels.cpu.simd_memory import first_lanes

intrinsic = functools.partial(interpreter.intrinsic, fallback="simd_narrow")


# ---- planes ---------------------------------------------------------------------------------


def _make_fields(width: int, lanes_per_value: int) -> tuple[Any, Any]:
    """Return the load and the store of the values of a plane that fill 16 lanes."""
    places = [lane // lanes_per_value * width for lane in range(LANES)]  # in bits
    n_bytes = LANES // lanes_per_value * width // 8
    kind = f"{'fields' if lanes_per_value == 1 else 'pairs'}{width}"

    def load(typing_context, addr):
        def codegen(context, builder, signature, args):
            address = llvm.int64(context, builder, signature, args)
            data = llvm.load(builder, address, llvm.vector(I8, n_bytes))
            spread = llvm.shuffle(builder, data, data, [place // 8 for place in places])
            lanes = builder.zext(spread, i32x16.llvm)
            lanes = builder.lshr(lanes, constant(I32, [place % 8 for place in places]))
            return builder.and_(lanes, constant(I32, [2**width - 1] * LANES))

        return i32x16(addr), codegen

    def store(typing_context, addr, v):
        def codegen(context, builder, signature, args):
            wide = builder.zext(args[1], ir.VectorType(I64, LANES))
            if lanes_per_value > 1:
                used = [-1 if lane % lanes_per_value == 0 else 0 for lane in range(LANES)]
                wide = builder.and_(wide, constant(I64, used))
            wide = builder.shl(wide, constant(I64, places))
            value = llvm.call(builder, f"llvm.vector.reduce.or.v{LANES}i64", I64, [wide])
            if n_bytes < 8:
                value = builder.trunc(value, ir.IntType(8 * n_bytes))
            llvm.store(builder, value, llvm.int64(context, builder, signature, args))
            return context.get_dummy_value()

        return types.none(addr, v), codegen

    load.__name__, store.__name__ = f"load_{kind}", f"store_{kind}"
    return intrinsic(load), intrinsic(store)


load_fields4, store_fields4 = _make_fields(4, 1)
load_fields2, store_fields2 = _make_fields(2, 1)
load_fields1, store_fields1 = _make_fields(1, 1)
load_pairs4, store_pairs4 = _make_fields(4, 2)
load_pairs2, store_pairs2 = _make_fields(2, 2)
load_pairs1, store_pairs1 = _make_fields(1, 2)


@intrinsic
def choose_odd(typing_context, even, odd):
    """Return the even lanes of the one vector of int32 and the odd lanes of the other."""

    def codegen(context, builder, signature, args):
        order = [lane + LANES * (lane % 2) for lane in range(LANES)]
        return llvm.shuffle(builder, args[0], args[1], order)

    return i32x16(even, odd), codegen


# ---- 16-bit numbers -------------------------------------------------------------------------


@intrinsic
def store_bf16(typing_context, addr, v):
    """Write 16 float32 as bfloat16, rounded to nearest, halves to even; NaN stays NaN."""

    def codegen(context, builder, signature, args):
        value = emit_narrow_bf16(builder, args[1])
        llvm.store(builder, value, llvm.int64(context, builder, signature, args))
        return context.get_dummy_value()

    return types.none(addr, v), codegen


@intrinsic
def half_bits(typing_context, v):
    """Return the bits of 16 float32 rounded to float16, halves to even, in int32 lanes."""
    if v != f32x16:
        raise errors.TypingError(f"simd_narrow.half_bits: wanted a vector of float32, got {v}")

    def codegen(context, builder, signature, args):
        return builder.zext(emit_narrow(builder, args[0]), i32x16.llvm)

    return i32x16(v), codegen


@intrinsic
def from_half_bits(typing_context, bits):
    """Return the low 16 bits of int32 lanes as float16, widened to float32."""
    if bits != i32x16:
        raise errors.TypingError(f"simd_narrow.from_half_bits: wanted int32 lanes, got {bits}")

    def codegen(context, builder, signature, args):
        return emit_widen(builder, builder.trunc(args[0], llvm.vector(I16)), "f16")

    return f32x16(bits), codegen


def _make_write(name: str, element: Any) -> Any:
    def write(typing_context, addr, value):
        def codegen(context, builder, signature, args):
            address, bits = (llvm.int64(context, builder, signature, args, i) for i in range(2))
            llvm.store(builder, builder.trunc(bits, element), address)
            return context.get_dummy_value()

        return types.none(addr, value), codegen

    write.__name__ = name
    return intrinsic(write)


write_u16, write_u8 = _make_write("write_u16", I16), _make_write("write_u8", I8)


@intrinsic
def keep(typing_context, v, count):
    """Return the vector with zeros in the lanes from `count` on."""

    def codegen(context, builder, signature, args):
        mask = first_lanes(context, builder, args[1], signature.args[1])
        return builder.select(mask, args[0], ir.Constant(f32x16.llvm, [0.0] * LANES))

    return f32x16(v, count), codegen
