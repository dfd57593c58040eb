"""Two columns of 16 rows at a time out of each packed layout; see `nbflow_kernels.quants.packed`.

Each layout has two functions.  ``words_*(at, v)`` loads what columns ``v * n .. v * n + n - 1`` of
the unit at address `at` need, with n columns per low vector; ``pair_*(low, high, j, base, scale)``
gives columns 2j and 2j + 1 of them as weights.  A lane is a row.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from nbflow_kernels import simd
from nbflow_kernels._jit import inline


def _broadcast_f32(typing_context: Any, addr: Any) -> Any:
    """Return the float32 at an address in all 16 lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = simd.f32x16.llvm
        as_int = context.cast(builder, args[0], signature.args[0], types.int64)
        scalar = builder.load(builder.inttoptr(as_int, ir.PointerType(ir.FloatType())))
        undefined = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), simd.LANES), [0] * simd.LANES)
        return builder.shuffle_vector(first, undefined, zeros)

    return simd.f32x16(addr), codegen


broadcast_f32: Any = intrinsic(_broadcast_f32)


@inline
def field(word: Any, shift: Any, mask: Any) -> Any:
    """Return the bits of `mask` after a shift to the right."""
    return simd.and_(simd.shr(word, simd.splat_i32(shift)), simd.splat_i32(mask))


@inline
def linear(code: Any, base: Any, scale: Any) -> Any:
    """Return base + scale * code, rounded once."""
    return simd.fma(scale, simd.to_f32(code), base)


# ---- one plane: the high vector is the low one and not used ------------------------------------


@inline
def words_plane(at: Any, v: Any) -> Any:
    """Return the vector of a unit that is one vector."""
    word = simd.load_i32(at)
    return word, word


@inline
def pair_bits8(low: Any, high: Any, j: Any, base: Any, scale: Any) -> Any:
    """Return columns 2j and 2j + 1 of 4."""
    first, second = field(low, 16 * j, 255), field(low, 16 * j + 8, 255)
    return linear(first, base, scale), linear(second, base, scale)


@inline
def pair_bits4(low: Any, high: Any, j: Any, base: Any, scale: Any) -> Any:
    """Return columns 2j and 2j + 1 of 8."""
    first, second = field(low, 8 * j, 15), field(low, 8 * j + 4, 15)
    return linear(first, base, scale), linear(second, base, scale)


@inline
def pair_bits2(low: Any, high: Any, j: Any, base: Any, scale: Any) -> Any:
    """Return columns 2j and 2j + 1 of 16."""
    first, second = field(low, 4 * j, 3), field(low, 4 * j + 2, 3)
    return linear(first, base, scale), linear(second, base, scale)


# ---- two planes ---------------------------------------------------------------------------------


@inline
def words_bits6(at: Any, v: Any) -> Any:
    """Return nibbles of 8 columns, and their high bits from bit 0 on."""
    return simd.load_i32(at + 64 * v), simd.shr(simd.load_i32(at + 128), simd.splat_i32(16 * v))


@inline
def pair_bits6(low: Any, high: Any, j: Any, base: Any, scale: Any) -> Any:
    """Return columns 2j and 2j + 1 of 8."""
    four = simd.splat_i32(4)
    first = simd.or_(field(low, 8 * j, 15), simd.shl(field(high, 4 * j, 3), four))
    second = simd.or_(field(low, 8 * j + 4, 15), simd.shl(field(high, 4 * j + 2, 3), four))
    return linear(first, base, scale), linear(second, base, scale)


@inline
def words_bits5(at: Any, v: Any) -> Any:
    """Return nibbles of 8 columns, and their high bits from bit 0 on."""
    return simd.load_i32(at + 64 * v), simd.shr(simd.load_i32(at + 256), simd.splat_i32(8 * v))


@inline
def pair_bits5(low: Any, high: Any, j: Any, base: Any, scale: Any) -> Any:
    """Return columns 2j and 2j + 1 of 8."""
    four = simd.splat_i32(4)
    first = simd.or_(field(low, 8 * j, 15), simd.shl(field(high, 2 * j, 1), four))
    second = simd.or_(field(low, 8 * j + 4, 15), simd.shl(field(high, 2 * j + 1, 1), four))
    return linear(first, base, scale), linear(second, base, scale)


@inline
def words_bits3(at: Any, v: Any) -> Any:
    """Return 2-bit fields of 16 columns, and their high bits from bit 0 on."""
    return simd.load_i32(at + 64 * v), simd.shr(simd.load_i32(at + 128), simd.splat_i32(16 * v))


@inline
def pair_bits3(low: Any, high: Any, j: Any, base: Any, scale: Any) -> Any:
    """Return columns 2j and 2j + 1 of 16."""
    two = simd.splat_i32(2)
    first = simd.or_(field(low, 4 * j, 3), simd.shl(field(high, 2 * j, 1), two))
    second = simd.or_(field(low, 4 * j + 2, 3), simd.shl(field(high, 2 * j + 1, 1), two))
    return linear(first, base, scale), linear(second, base, scale)


# ---- pairs c = x + 11 * y -----------------------------------------------------------------------


@inline
def words_pairs(at: Any, v: Any) -> Any:
    """Return pair codes 4v .. 4v + 3 in the bytes; those of v = 7 lie in the top bits."""
    if v < 7:
        word = simd.load_i32(at + 64 * v)
    else:
        word = simd.splat_i32(0)
        for i in range(7):
            top = simd.and_(simd.load_i32(at + 64 * i), simd.splat_i32(-0x7F7F7F80))
            word = simd.or_(word, simd.shr(top, simd.splat_i32(7 - i)))
    return word, word


@inline
def split_pair(c: Any) -> Any:
    """Return x and y of c = x + 11 * y as float32: c / 11 - 5 / 11 lies within 5 / 11 of y."""
    both = simd.to_f32(c)
    y = simd.rint(simd.fma(both, simd.splat(1.0 / 11.0), simd.splat(-5.0 / 11.0)))
    return simd.fma(y, simd.splat(-11.0), both), y


@inline
def pair_pairs(low: Any, high: Any, j: Any, base: Any, scale: Any) -> Any:
    """Return columns 2j and 2j + 1 of 8."""
    x, y = split_pair(field(low, 8 * j, 127))
    return simd.fma(scale, x, base), simd.fma(scale, y, base)
