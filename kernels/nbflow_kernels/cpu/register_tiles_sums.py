"""Sums over the lanes of register tiles with several tokens, as matrices of dot products.

========================  ======================================================================
`fold_lanes(tile, half)`  two partial sums of each vector instead of sixteen: those of two groups
                          and four tokens in one vector
`half_lanes()`            8, for `fold_lanes`
`store_sums(at, token,    the sums of four groups, from two folded tiles of two groups each, as
first, second)`           four float32 at ``at + token * t``
========================  ======================================================================

The lanes of a vector are added in the order of `simd.sum`, with blends and the shuffles that take a
cycle: on a Zen 4 a permutation of any lanes of two vectors takes the time of a multiply-add.
Without wide registers a folded tile is the tile itself: there halves are registers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import errors, types

from nbflow_kernels.cpu import interpreter, llvm
from nbflow_kernels.cpu.llvm import I64, LANES
from nbflow_kernels.cpu.register_tiles import FloatTile, has_wide_registers
from nbflow_kernels.cpu.simd_memory import emit_sums, first_lanes

intrinsic = functools.partial(interpreter.intrinsic, fallback="register_tiles_sums")


def _emit_added(builder: Any, a: Any, b: Any, lanes: Sequence[int], apart: int) -> Any:
    """Emit the sums of lanes of two vectors with those `apart` behind them."""
    behind = [lane + apart for lane in lanes]
    return builder.fadd(llvm.shuffle(builder, a, b, lanes), llvm.shuffle(builder, a, b, behind))


def _emit_halves(builder: Any, lower: Any, a: Any, b: Any) -> Any:
    """Emit the sums of the halves of two vectors, of `a`, then of `b`: a blend and one shuffle."""
    swapped = llvm.shuffle(builder, a, b, range(LANES // 2, 3 * LANES // 2))
    return builder.fadd(builder.select(lower, a, b), swapped)


# Lanes of two vectors that are added to those 4, 2 and 1 behind them.
_FOURS = [8 * segment + i for segment in range(4) for i in range(4)]
_TWOS = [4 * quarter + v + i for quarter in range(4) for v in (0, LANES) for i in (0, 1)]
_ONES = [4 * quarter + v + i for quarter in range(4) for v in (0, LANES) for i in (0, 2)]


@intrinsic
def half_lanes(typing_context):
    """Return 8, a number that LLVM does not know.

    By a mask that it knows LLVM would make shuffles of blends, which compete with multiply-adds.
    """

    def codegen(context, builder, signature, args):
        unchanged = ir.InlineAsm(ir.FunctionType(I64, [I64]), "", "=r,0")
        return builder.call(unchanged, [ir.Constant(I64, LANES // 2)])

    return types.int64(), codegen


@intrinsic
def fold_lanes(typing_context, tile, half):
    """Return two partial sums of each vector of a tile of two groups.

    Quarter t of vector q of the result has those of token 4 q + t: of the first group, then of
    the second.  `half` is `half_lanes()`, called before the loop over tiles.
    """
    if tile.groups != 2 or tile.tokens % 4:
        raise errors.TypingError(f"register_tiles_sums: wanted 2 groups, 4 n tokens, got {tile}")
    if not has_wide_registers():
        return tile(tile, half), lambda context, builder, signature, args: args[0]
    folded = FloatTile(1, tile.tokens // 4)

    def codegen(context, builder, signature, args):
        value = ir.Constant(context.get_value_type(folded), ir.Undefined)
        lower = first_lanes(context, builder, args[1], signature.args[1])
        for quad in range(folded.tokens):
            groups = []
            for g in range(2):
                first = 8 * quad + g
                vectors = [builder.extract_value(args[0], first + 2 * t) for t in range(4)]
                ab, cd = (_emit_halves(builder, lower, *vectors[i : i + 2]) for i in (0, 2))
                groups.append(_emit_added(builder, ab, cd, _FOURS, 4))
            vector = _emit_added(builder, *groups, _TWOS, 2)
            value = builder.insert_value(value, vector, quad)
        return value

    return folded(tile, half), codegen


@intrinsic
def store_sums(typing_context, at, token, first, second):
    """Write the sums of four groups, two folded in each tile, to ``at + token * t``."""
    is_folded = first.groups == 1

    def sums_of(builder, quad, tiles):
        if is_folded:
            return _emit_added(builder, *(builder.extract_value(x, quad) for x in tiles), _ONES, 1)
        at = [(x, 2 * t + g) for t in range(4 * quad, 4 * quad + 4) for x in tiles for g in (0, 1)]
        return emit_sums(builder, [builder.extract_value(x, i) for x, i in at])

    def codegen(context, builder, signature, args):
        at, token = (llvm.int64(context, builder, signature, args, i) for i in range(2))
        for quad in range(first.tokens if is_folded else first.tokens // 4):
            sums = sums_of(builder, quad, args[2:])
            for t in range(4):
                quarter = llvm.shuffle(builder, sums, sums, range(4 * t, 4 * t + 4))
                llvm.store(builder, quarter, llvm.element(builder, at, token, 4 * quad + t))
        return context.get_dummy_value()

    return types.none(at, token, first, second), codegen
