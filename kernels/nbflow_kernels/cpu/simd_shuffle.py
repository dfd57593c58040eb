"""Lane shuffles of vectors of 16 lanes.

====================================  =========================================================
`evens(a, b)` / `odds(a, b)`          lanes 0, 2, 4... (1, 3, 5...) of `a`, then of `b`
`twice_low(v)` / `twice_high(v)`      lanes 0, 0, 1, 1 ... 7, 7 (8, 8 ... 15, 15)
`swap_pairs(v)`                       lanes 1, 0, 3, 2 ... 15, 14; float32 or int32
`negate_evens(v)`                     lanes 0, 2, 4... with the other sign
`lookup(table, index)`                table[index] of int32, index below 16
====================================  =========================================================
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import errors

from nbflow_kernels.cpu import interpreter, isa, llvm
from nbflow_kernels.cpu.llvm import I32, LANES
from nbflow_kernels.cpu.simd import f32x16, i32x16

intrinsic = functools.partial(interpreter.intrinsic, fallback="simd_shuffle")


def _want(name: str, *vectors: Any) -> None:
    if any(vector != f32x16 for vector in vectors):
        raise errors.TypingError(f"simd_shuffle.{name}: wanted float32 vectors, got {vectors}")


def _make_shuffle1(name: str, lanes: list[int]) -> Any:
    def shuffle(typing_context, v):
        if v not in (f32x16, i32x16):
            raise errors.TypingError(f"simd_shuffle.{name}: wanted a vector of 16 lanes, got {v}")

        def codegen(context, builder, signature, args):
            return llvm.shuffle(builder, args[0], args[0], lanes)

        return v(v), codegen

    shuffle.__name__ = name
    return intrinsic(shuffle)


def _make_shuffle2(name: str, lanes: list[int]) -> Any:
    def shuffle(typing_context, a, b):
        _want(name, a, b)

        def codegen(context, builder, signature, args):
            return llvm.shuffle(builder, args[0], args[1], lanes)

        return f32x16(a, b), codegen

    shuffle.__name__ = name
    return intrinsic(shuffle)


evens = _make_shuffle2("evens", list(range(0, 2 * LANES, 2)))
odds = _make_shuffle2("odds", list(range(1, 2 * LANES, 2)))
twice_low = _make_shuffle1("twice_low", [i // 2 for i in range(LANES)])
twice_high = _make_shuffle1("twice_high", [LANES // 2 + i // 2 for i in range(LANES)])
swap_pairs = _make_shuffle1("swap_pairs", [i ^ 1 for i in range(LANES)])


@intrinsic
def negate_evens(typing_context, v):
    """Return `v` with the sign of its even lanes flipped."""
    _want("negate_evens", v)

    def codegen(context, builder, signature, args):
        signs = llvm.constant(I32, [0x80000000, 0] * (LANES // 2))
        bits = builder.bitcast(args[0], signs.type)
        return builder.bitcast(builder.xor(bits, signs), f32x16.llvm)

    return f32x16(v), codegen


def emit_lookup(builder: Any, table: Any, index: Any, features: frozenset[str]) -> Any:
    """Look each int32 lane up in a table of 16."""
    if "avx512f" in features:
        name = "llvm.x86.avx512.permvar.si.512"
        return llvm.call(builder, name, table.type, [table, index])
    result = ir.Constant(table.type, ir.Undefined)
    for lane in range(LANES):
        place = ir.Constant(I32, lane)
        entry = builder.extract_element(table, builder.extract_element(index, place))
        result = builder.insert_element(result, entry, place)
    return result


def make_lookup(features: frozenset[str]) -> Any:
    """Return `lookup` for a processor."""

    def lookup(typing_context, table, index):
        if table != i32x16 or index != i32x16:
            raise errors.TypingError(f"simd_shuffle.lookup: wanted int32, got {table}, {index}")

        def codegen(context, builder, signature, args):
            return emit_lookup(builder, args[0], args[1], features)

        return i32x16(table, index), codegen

    return intrinsic(lookup)


lookup = make_lookup(isa.features())
