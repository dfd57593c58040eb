"""Lane shuffles of vectors of 16 lanes.

====================================  =========================================================
`evens(a, b)` / `odds(a, b)`          lanes 0, 2, 4... (1, 3, 5...) of `a`, then of `b`
`twice_low(v)` / `twice_high(v)`      lanes 0, 0, 1, 1 ... 7, 7 (8, 8 ... 15, 15)
`swap_pairs(v)`                       lanes 1, 0, 3, 2 ... 15, 14; float32 or int32
`negate_evens(v)`                     lanes 0, 2, 4... with the other sign
`split_columns(rows, k, to)`          copy 16 rows of `k` float32, a constant, column by column
`join_columns(columns, k, to)`        the reverse
`lookup(table, index)`                table[index] of int32, index below 16
`emit_lookup16_f32(...)`              code of a lookup in 16 constants, for other intrinsics
====================================  =========================================================
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import errors, types

from nbflow_kernels.cpu import interpreter, isa, llvm
from nbflow_kernels.cpu.llvm import F32, I32, LANES
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


def _make_columns(name: str, joins: bool) -> Any:
    def copy(typing_context, source, k, to):
        if not isinstance(k, types.IntegerLiteral):
            raise errors.TypingError(f"simd_shuffle.{name}: k must be a constant")
        n = k.literal_value

        def codegen(context, builder, signature, args):
            source, target = (llvm.int64(context, builder, signature, args, i) for i in (0, 2))
            wide = llvm.load(builder, source, llvm.vector(F32, n * LANES))
            for first in range(0, n * LANES, LANES):
                lanes = range(first, first + LANES)
                if joins:  # number i of the rows is in row i // n, column i % n
                    order = [i % n * LANES + i // n for i in lanes]
                else:
                    order = [i % LANES * n + i // LANES for i in lanes]
                part = llvm.shuffle(builder, wide, wide, order)
                llvm.store(builder, part, llvm.offset(builder, target, 4 * first))
            return context.get_dummy_value()

        return types.none(source, k, to), codegen

    copy.__name__ = name
    return intrinsic(copy)


split_columns = _make_columns("split_columns", False)
join_columns = _make_columns("join_columns", True)


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


def emit_lookup16_f32(
    builder: Any, values: Sequence[float], index: Any, features: frozenset[str]
) -> Any:
    """Return ``values[index]`` for 16 indices 0..15 (int32); `values` are 16 constants."""
    table = llvm.constant(F32, [float(value) for value in values])
    if "avx512bw" in features:
        name = "llvm.x86.avx512.permvar.sf.512"
        return llvm.call(builder, name, table.type, [table, index])
    if "avx2" in features:
        halves = [llvm.shuffle(builder, index, index, range(n, n + 8)) for n in (0, 8)]
        found = [_lookup_of_8(builder, values, half) for half in halves]
        return llvm.shuffle(builder, found[0], found[1], range(LANES))
    found = [llvm.splat(builder, ir.Constant(F32, float(value)), LANES) for value in values]
    for bit in range(4):  # a tree: bit 0 chooses between neighbours, bit 3 between the last two
        mask = builder.and_(index, llvm.constant(I32, [1 << bit] * LANES))
        is_set = builder.icmp_unsigned("!=", mask, llvm.constant(I32, [0] * LANES))
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [builder.select(is_set, odd, even) for even, odd in pairs]
    return found[0]


def _lookup_of_8(builder: Any, values: Sequence[float], index: Any) -> Any:
    """Look up 8 indices in both halves of the table, and take the half that bit 3 says."""
    name, found = "llvm.x86.avx2.permps", []
    for first in (0, 8):
        table = llvm.constant(F32, [float(value) for value in values[first : first + 8]])
        found.append(llvm.call(builder, name, table.type, [table, index]))
    upper = builder.icmp_unsigned(">", index, llvm.constant(I32, [7] * 8))
    return builder.select(upper, found[1], found[0])
