"""Products of 16 rows of 32 int8, their columns in registers, with a vector of 32 int8.

The eight vectors of a tile have four columns each, lane i those of row i, so that a dot product of
four bytes adds to the sum of a row in its lane, and no lanes are added.

==================================  ===============================================================
`load_columns(table, offset)`       32 int8 of 16 rows, `offset` bytes behind the addresses of a
                                    table, plus 128: unsigned
`dot_columns(columns, start, x)`    the int32 at `start` plus the dot product of the 32 int8 at `x`
                                    with each row, exact
==================================  ===============================================================
"""

from __future__ import annotations

import functools

from llvmlite import ir

from nbflow_kernels.cpu import interpreter, isa, llvm
from nbflow_kernels.cpu.llvm import I32, I64, LANES
from nbflow_kernels.cpu.register_tiles import FloatTile
from nbflow_kernels.cpu.simd import f32x16, i8x64, i32x16
from nbflow_kernels.cpu.simd_int8 import emit_dot

intrinsic = functools.partial(interpreter.intrinsic, fallback="register_tiles_columns")

N = 8
"""Vectors of a tile; each has four columns."""
_COLUMNS = FloatTile(1, N)


def has_byte_products() -> bool:
    """Return whether Numba's target multiplies 64 bytes in one instruction."""
    return "avx512vnni" in isa.features()


def _joined(builder, parts):
    """Emit the concatenation of vectors."""
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [llvm.shuffle(builder, a, b, range(n)) for a, b in pairs]
    return parts[0]


def _transposed_quarters(builder, rows):
    """Transpose the 4 x 4 words in each quarter of four vectors."""
    quarters = range(0, LANES, 4)
    result = []
    for first in (0, 2):  # two words of each row at a time
        lanes = [q + first + i + v for q in quarters for i in (0, 1) for v in (0, LANES)]
        pairs = [llvm.shuffle(builder, rows[i], rows[i + 1], lanes) for i in (0, 2)]
        for half in (0, 2):
            lanes = [q + half + i + v for q in quarters for v in (0, LANES) for i in (0, 1)]
            result.append(llvm.shuffle(builder, *pairs, lanes))
    return result


@intrinsic
def load_columns(typing_context, table, offset):
    """Return 32 int8 of 16 rows plus 128, `offset` bytes behind the addresses of a table."""

    def codegen(context, builder, signature, args):
        table, offset = (llvm.int64(context, builder, signature, args, i) for i in range(2))
        at = [
            builder.add(llvm.load(builder, llvm.offset(builder, table, 8 * j), I64), offset)
            for j in range(LANES)
        ]
        value = ir.Constant(context.get_value_type(_COLUMNS), ir.Undefined)
        sign = llvm.repeated(i32x16.llvm, -0x7F7F7F80)
        for half in range(2):
            quarter = llvm.vector(I32, 4)
            rows = [
                llvm.load(builder, llvm.offset(builder, row, LANES * half), quarter) for row in at
            ]
            # row i of a group of four is in quarter i / 4 of vector i % 4
            vectors = [_joined(builder, rows[i::4]) for i in range(4)]
            for i, vector in enumerate(_transposed_quarters(builder, vectors)):
                bits = builder.bitcast(builder.xor(vector, sign), f32x16.llvm)
                value = builder.insert_value(value, bits, 4 * half + i)
        return value

    return _COLUMNS(table, offset), codegen


@intrinsic
def dot_columns(typing_context, columns, start, x):
    """Return the int32 at `start` plus the dot product of the 32 int8 at `x` with each row."""

    def codegen(context, builder, signature, args):
        start, x = (llvm.int64(context, builder, signature, args, i) for i in (1, 2))
        sums = [llvm.splat(builder, llvm.load(builder, start, I32)), ir.Constant(i32x16.llvm, None)]
        for i in range(N):  # two chains: a product waits for the one before it
            rows = builder.bitcast(builder.extract_value(args[0], i), i8x64.llvm)
            four = llvm.splat(builder, llvm.load(builder, llvm.offset(builder, x, 4 * i), I32))
            codes = builder.bitcast(four, i8x64.llvm)
            sums[i % 2] = emit_dot(builder, sums[i % 2], rows, codes, False, isa.features())
        return builder.add(*sums)

    return i32x16(columns, start, x), codegen
