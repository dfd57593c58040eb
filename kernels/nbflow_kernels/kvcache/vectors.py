"""Small integers in bytes to and from the lanes of a `simd` vector, and parts of vectors.

A plane of width `w` holds ``8 // w`` values per byte, the first in the lowest bits (see
`nbflow_kernels.formats.bit_fields`).

====================================  =========================================================
`load_fields4 load_fields2            16 values of a plane of 4, 2 or 1 bits, as int32 lanes; the
load_fields1(addr)`                   plane's part starts at `addr` (8, 4 or 2 bytes)
`load_pairs4 load_pairs2              8 values of such a plane (4, 2 or 1 bytes), each in two
load_pairs1(addr)`                    neighbouring lanes
`store_fields4 ...(addr, v)`          the reverse; each lane must fit in the width
`store_pairs4 ...(addr, v)`           the reverse; the odd lanes are not looked at
`store_bytes(addr, v)`                the low bytes of 16 int32
`store_bf16(addr, v)`                 16 float32 as bfloat16, halves to even, NaN stays NaN
`read_bf16(addr)`                     one bfloat16 as float32
`write_u16(addr, i)`                  the low 16 bits of an int
`load_part(addr, count, fill)`        lanes below `count` from float32, the others `fill`
`store_part(addr, count, v)`          write the lanes below `count` only
`keep(v, count)`                      lanes from `count` on become 0
`swap_pairs(v)`                       int32 lanes 1, 0, 3, 2, ...
`choose_odd(even, odd)`               int32 lanes of `even` and, at the odd places, of `odd`
====================================  =========================================================
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from nbflow_kernels.simd import LANES, f32x16, i32x16
from nbflow_kernels.stepping import intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_F32 = ir.FloatType()


def _pointer(context: Any, builder: Any, address: Any, address_type: Any, target: Any) -> Any:
    as_int = context.cast(builder, address, address_type, types.int64)
    return builder.inttoptr(as_int, ir.PointerType(target))


def _constant(element: Any, values: list[int]) -> Any:
    return ir.Constant(ir.VectorType(element, len(values)), values)


# ---- planes ---------------------------------------------------------------------------------


def _make_fields(width: int, lanes_per_value: int) -> tuple[Any, Any]:
    """Return the load and the store of the values of a plane that fill 16 lanes."""
    places = [lane // lanes_per_value * width for lane in range(LANES)]  # in bits
    n_bytes = LANES // lanes_per_value * width // 8
    kind = f"{'fields' if lanes_per_value == 1 else 'pairs'}{width}"

    def load(typing_context: Any, addr: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            stored = ir.VectorType(_I8, n_bytes)
            data = builder.load(_pointer(context, builder, args[0], signature.args[0], stored))
            data.align = 1
            spread = _constant(_I32, [place // 8 for place in places])
            lanes = builder.zext(builder.shuffle_vector(data, data, spread), i32x16.llvm)
            lanes = builder.lshr(lanes, _constant(_I32, [place % 8 for place in places]))
            return builder.and_(lanes, _constant(_I32, [2**width - 1] * LANES))

        return i32x16(addr), codegen

    def store(typing_context: Any, addr: Any, v: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            wide = builder.zext(args[1], ir.VectorType(_I64, LANES))
            if lanes_per_value > 1:
                used = [-1 if lane % lanes_per_value == 0 else 0 for lane in range(LANES)]
                wide = builder.and_(wide, _constant(_I64, used))
            wide = builder.shl(wide, _constant(_I64, places))
            reduce = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(_I64, [wide.type]),
                f"llvm.vector.reduce.or.v{LANES}i64",
            )
            value = builder.call(reduce, [wide])
            if n_bytes < 8:
                value = builder.trunc(value, ir.IntType(8 * n_bytes))
            pointer = _pointer(context, builder, args[0], signature.args[0], value.type)
            builder.store(value, pointer).align = 1
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
def store_bytes(typing_context: Any, addr: Any, v: Any) -> Any:
    """Write the low bytes of 16 int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.trunc(args[1], ir.VectorType(_I8, LANES))
        pointer = _pointer(context, builder, args[0], signature.args[0], value.type)
        builder.store(value, pointer).align = 1
        return context.get_dummy_value()

    return types.none(addr, v), codegen


@intrinsic
def swap_pairs(typing_context: Any, v: Any) -> Any:
    """Exchange each even lane of int32 with the odd one after it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        order = _constant(_I32, [lane ^ 1 for lane in range(LANES)])
        return builder.shuffle_vector(args[0], args[0], order)

    return i32x16(v), codegen


@intrinsic
def choose_odd(typing_context: Any, even: Any, odd: Any) -> Any:
    """Return the even lanes of the one vector of int32 and the odd lanes of the other."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        order = _constant(_I32, [lane + LANES * (lane % 2) for lane in range(LANES)])
        return builder.shuffle_vector(args[0], args[1], order)

    return i32x16(even, odd), codegen


# ---- 16-bit numbers -------------------------------------------------------------------------


@intrinsic
def store_bf16(typing_context: Any, addr: Any, v: Any) -> Any:
    """Write 16 float32 as bfloat16, rounded to nearest, halves to even; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def splat(value: int) -> Any:
            return _constant(_I32, [value] * LANES)

        bits = builder.bitcast(args[1], i32x16.llvm)
        high = builder.lshr(bits, splat(16))
        odd = builder.and_(high, splat(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, splat(0x7FFF))), splat(16))
        is_nan = builder.fcmp_unordered("uno", args[1], args[1])
        value = builder.select(is_nan, builder.or_(high, splat(0x40)), rounded)
        value = builder.trunc(value, ir.VectorType(_I16, LANES))
        pointer = _pointer(context, builder, args[0], signature.args[0], value.type)
        builder.store(value, pointer).align = 1
        return context.get_dummy_value()

    return types.none(addr, v), codegen


@intrinsic
def read_bf16(typing_context: Any, addr: Any) -> Any:
    """Return the bfloat16 at an address as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_pointer(context, builder, args[0], signature.args[0], _I16))
        value.align = 1
        bits = builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16))
        return builder.bitcast(bits, _F32)

    return types.float32(addr), codegen


@intrinsic
def write_u16(typing_context: Any, addr: Any, value: Any) -> Any:
    """Write the low 16 bits of an int."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = context.cast(builder, args[1], signature.args[1], types.int64)
        bits = builder.trunc(bits, _I16)
        pointer = _pointer(context, builder, args[0], signature.args[0], _I16)
        builder.store(bits, pointer).align = 1
        return context.get_dummy_value()

    return types.none(addr, value), codegen


# ---- parts of vectors -----------------------------------------------------------------------


def _below(context: Any, builder: Any, count: Any, count_type: Any) -> Any:
    """Return the mask of the lanes whose number is below `count`."""
    wide = context.cast(builder, count, count_type, types.int64)
    undefined = ir.Constant(ir.VectorType(_I64, LANES), ir.Undefined)
    first = builder.insert_element(undefined, wide, ir.Constant(_I32, 0))
    limit = builder.shuffle_vector(first, undefined, _constant(_I32, [0] * LANES))
    return builder.icmp_signed("<", _constant(_I64, list(range(LANES))), limit)


@intrinsic
def load_part(typing_context: Any, addr: Any, count: Any, fill: Any) -> Any:
    """Return float32 lanes below `count` from memory, the others `fill`; reads no other bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = f32x16.llvm
        mask = _below(context, builder, args[1], signature.args[1])
        value = context.cast(builder, args[2], signature.args[2], types.float32)
        undefined = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
        others = builder.shuffle_vector(first, undefined, _constant(_I32, [0] * LANES))
        pointer = _pointer(context, builder, args[0], signature.args[0], vector)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(vector, [pointer.type, _I32, mask.type, vector]),
            f"llvm.masked.load.v{LANES}f32.p0",
        )
        return builder.call(function, [pointer, ir.Constant(_I32, 1), mask, others])

    return f32x16(addr, count, fill), codegen


@intrinsic
def store_part(typing_context: Any, addr: Any, count: Any, v: Any) -> Any:
    """Write the float32 lanes below `count`; touches no other bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = f32x16.llvm
        mask = _below(context, builder, args[1], signature.args[1])
        pointer = _pointer(context, builder, args[0], signature.args[0], vector)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [vector, pointer.type, _I32, mask.type]),
            f"llvm.masked.store.v{LANES}f32.p0",
        )
        builder.call(function, [args[2], pointer, ir.Constant(_I32, 1), mask])
        return context.get_dummy_value()

    return types.none(addr, count, v), codegen


@intrinsic
def keep(typing_context: Any, v: Any, count: Any) -> Any:
    """Return the vector with zeros in the lanes from `count` on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask = _below(context, builder, args[1], signature.args[1])
        return builder.select(mask, args[0], ir.Constant(f32x16.llvm, [0.0] * LANES))

    return f32x16(v, count), codegen
