"""Float register tiles: the sums of several weight rows times several tokens as one value.

A tile holds ``groups * tokens`` vectors of 16 float32: a group is 16 weight rows, one in each lane.
A step multiplies one *unit* of the inner dimension: of each group the 16 weights of a column, of
each token one activation, broadcast to all lanes.  R groups and T tokens take R * T multiply-adds
and R + T loads, and no shuffle.

Numba does not unroll loops over tuples, and a tile must stay in registers; so each function is an
`@intrinsic` that emits its instructions one after the other, and kernels stay plain loops:

    sums = register_tiles.zero(2, 8)
    for k in range(n_columns):
        sums = register_tiles.step(sums, weights, w + 64 * k, group, x + 4 * k, token)
    register_tiles.store(y, sums)

============================================  ====================================================
`zero(groups, tokens)`                        a tile of zeros; both numbers are literals
`load(groups, tokens, at)`                    a tile from memory: token by token, its groups
`store(at, tile)`                             a tile to memory, in the same order
`load_strided(groups, tokens, at, token)`     the same with tokens `token` bytes apart
`store_strided(at, token, tile)`              the same to memory
`add(a, b)`                                   the sum of two tiles
`scale(tile, at, token)`                      each token times its float32 at ``at + token * t``
`step(tile, like, w, group, x, token)`        add one unit; `group`, `token`: distance in bytes
`step_chains(tile, like, w, x, token)`        add a unit to each token's first group, the next unit
                                              to its second, and so on: consecutive units
                                              of one weight group
`step_lanes(tile, like, w, row, x, token)`    the same as `step` with 16 columns of one row in the
                                              lanes
`step_first(tile, ..., token, n)`             the same with the first `n` of 16 columns
`lane_sums(tile)`                             the sums of the lanes of 16 vectors, as one vector
`lane_magnitudes(tile)`                       the largest magnitudes of 16 vectors, as one vector
`add_pairs(total, a, b)`                      the products of a step on pairs, for vectors
`unit_columns(like)` `unit_bytes(like)`       columns of a row that `step_lanes` adds, their bytes
`load_widened(like, at)`                      16 weights in the lanes of a simd vector, float32
`transpose(like, at, row_bytes, to)`          copy 16 rows x 16 columns, columns first
`transpose_f32(..., to, distance)`            the same, widened, to four addresses
`to_bf16(low, high)`                          32 lanes rounded to bfloat16: first `low`, then `high`
`to_pairs(even, odd)`                         the same, lane by lane: a pair of bfloat16 per lane
============================================  ====================================================

The type of `like`, an array or a scalar, gives the storage of weights and the unit:

=========  =======================================  ================================================
type       weights of a group                       unit
=========  =======================================  ================================================
float32    16 float32                               one column: a fused multiply-add
int16      16 float16, widened                      the same
uint16     16 bfloat16, widened                     the same
int32      16 pairs of bfloat16; activations too    two columns: the product of the odd one is
                                                    added, then that of the even one, both fused
int8       a block of a float16 scale and 32 int8,  `step` and `step_lanes` only.  In `step` a block
           widened to 32 float32                    is two groups, and blocks are `group` bytes
                                                    apart; `step_lanes` adds the 32 columns of a row
=========  =======================================  ================================================

The order of the two products is that of ``vdpbf16ps``, which is used where the processor has it; it
flushes denormal numbers to zero, the generic code does not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import errors, extending, types
from numba.core.datamodel import models

from nbflow_kernels.cpu import interpreter, llvm
from nbflow_kernels.cpu.float16 import emit_narrow_bf16, emit_widen
from nbflow_kernels.cpu.isa import features
from nbflow_kernels.cpu.llvm import F32, I8, I16, I32, I64, LANES
from nbflow_kernels.cpu.simd import f32x16, i32x16
from nbflow_kernels.cpu.simd_memory import (
    emit_reductions,
    emit_sums,
    first_lanes,
    masked_load,
)

intrinsic = functools.partial(interpreter.intrinsic, fallback="register_tiles")

_UNITS = {
    types.float32: (F32, None),
    types.int16: (I16, "f16"),
    types.uint16: (I16, "bf16"),
    types.int32: (I32, None),
}
"""Element type to its LLVM type and how it is widened to float32."""


class _Bfloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not define."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"


_BF16X32 = llvm.vector(_Bfloat(), 2 * LANES)


class FloatTile(types.Type):
    """The Numba type of a register tile."""

    def __init__(self, groups: int, tokens: int) -> None:
        self.groups, self.tokens = groups, tokens
        super().__init__(name=f"register_tiles.tile{groups}x{tokens}")

    @property
    def n(self) -> int:
        """Vectors of the tile."""
        return self.groups * self.tokens


@extending.register_model(FloatTile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: FloatTile) -> None:
        array = ir.ArrayType(f32x16.llvm, fe_type.n)
        super().__init__(manager, fe_type, array)


def has_pair_products() -> bool:
    """Return whether Numba's target multiplies pairs of bfloat16 in one instruction."""
    # before LLVM 16 the instruction's intrinsic function had another type
    return "avx512bf16" in features() and llvmlite.binding.llvm_version_info[0] >= 16


def has_wide_registers() -> bool:
    """Return whether Numba's target has 32 registers of 16 lanes."""
    return "avx512f" in features()


BLOCK_BYTES = 34
"""Bytes of a block of a float16 scale and 32 int8."""


def _tile(groups: Any, tokens: Any) -> FloatTile:
    if not isinstance(groups, types.IntegerLiteral) or not isinstance(tokens, types.IntegerLiteral):
        raise errors.RequireLiteralValue("register_tiles: groups and tokens must be literals")
    return FloatTile(groups.literal_value, tokens.literal_value)


def _element(like: Any) -> Any:
    return like.dtype if isinstance(like, types.Array) else like


def _unit(like: Any) -> tuple[Any, str | None]:
    kind = _element(like)
    if kind not in _UNITS:
        raise errors.TypingError(f"register_tiles: wanted a type of {list(_UNITS)}, got {like}")
    return _UNITS[kind]


def _reader(like: Any) -> Any:
    """Return the emitter of the weights of a unit at an address, as vectors of 16."""
    if _element(like) == types.int8:
        return _emit_block
    stored, how = _unit(like)
    return lambda builder, address: [
        emit_widen(builder, llvm.load(builder, address, llvm.vector(stored)), how)
    ]


def _emit_block(builder: Any, address: Any) -> Iterator[Any]:
    """Emit, one vector after the other, the numbers of a block of a float16 scale and 32 int8.

    The products have 19 bits, which float32 holds.
    """
    # a broadcast load: see `simd.splat_f16`
    scale = emit_widen(builder, llvm.splat(builder, llvm.load(builder, address, I16)))
    for i in range(2):
        at = llvm.offset(builder, address, 2 + LANES * i)
        codes = builder.sext(llvm.load(builder, at, llvm.vector(I8)), i32x16.llvm)
        yield builder.fmul(scale, builder.sitofp(codes, f32x16.llvm))


@intrinsic
def unit_columns(typing_context, like):
    """Return the columns that `step_lanes` adds, a constant of the machine code."""
    n = 2 * LANES if _element(like) == types.int8 else LANES
    return types.int64(like), lambda *_: ir.Constant(I64, n)


@intrinsic
def unit_bytes(typing_context, like):
    """Return the bytes of the columns that `step_lanes` adds, a constant of the machine code."""
    is_block = _element(like) == types.int8
    n = BLOCK_BYTES if is_block else LANES * _element(like).bitwidth // 8
    return types.int64(like), lambda *_: ir.Constant(I64, n)


# ---- tiles ----------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def zero(typing_context, groups, tokens):
    """Return a tile of zeros."""
    tile = _tile(groups, tokens)

    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(tile), None)

    return tile(groups, tokens), codegen


def _emit_load(context: Any, builder: Any, tile: FloatTile, address: Any, distance: Any) -> Any:
    """Emit the loads of a tile whose tokens are `distance` bytes apart."""
    value = ir.Constant(context.get_value_type(tile), ir.Undefined)
    for i in range(tile.n):
        t, g = divmod(i, tile.groups)
        start = llvm.element(builder, address, distance, t)
        vector = llvm.load(builder, llvm.offset(builder, start, 64 * g), f32x16.llvm)
        value = builder.insert_value(value, vector, i)
    return value


def _emit_store(builder: Any, tile: FloatTile, value: Any, address: Any, distance: Any) -> None:
    for i in range(tile.n):
        t, g = divmod(i, tile.groups)
        start = llvm.element(builder, address, distance, t)
        llvm.store(builder, builder.extract_value(value, i), llvm.offset(builder, start, 64 * g))


@intrinsic(prefer_literal=True)
def load(typing_context, groups, tokens, at):
    """Return the tile at an address."""
    tile = _tile(groups, tokens)

    def codegen(context, builder, signature, args):
        address = llvm.int64(context, builder, signature, args, 2)
        return _emit_load(context, builder, tile, address, ir.Constant(I64, 64 * tile.groups))

    return tile(groups, tokens, at), codegen


@intrinsic(prefer_literal=True)
def load_strided(typing_context, groups, tokens, at, token):
    """Return the tile at an address, its tokens `token` bytes apart."""
    tile = _tile(groups, tokens)

    def codegen(context, builder, signature, args):
        address, distance = (llvm.int64(context, builder, signature, args, i) for i in (2, 3))
        return _emit_load(context, builder, tile, address, distance)

    return tile(groups, tokens, at, token), codegen


@intrinsic
def store(typing_context, at, tile):
    """Write a tile to an address."""

    def codegen(context, builder, signature, args):
        address = llvm.int64(context, builder, signature, args, 0)
        _emit_store(builder, tile, args[1], address, ir.Constant(I64, 64 * tile.groups))
        return context.get_dummy_value()

    return types.none(at, tile), codegen


@intrinsic
def store_strided(typing_context, at, token, tile):
    """Write a tile to an address, its tokens `token` bytes apart."""

    def codegen(context, builder, signature, args):
        address, distance = (llvm.int64(context, builder, signature, args, i) for i in (0, 1))
        _emit_store(builder, tile, args[2], address, distance)
        return context.get_dummy_value()

    return types.none(at, token, tile), codegen


@intrinsic
def scale(typing_context, tile, at, token):
    """Return a tile with each token multiplied by the float32 at ``at + token * t``."""

    def codegen(context, builder, signature, args):
        address, distance = (llvm.int64(context, builder, signature, args, i) for i in (1, 2))
        value = args[0]
        for t in range(tile.tokens):
            at = llvm.element(builder, address, distance, t)
            factor = llvm.splat(builder, llvm.load(builder, at, F32))
            for i in range(t * tile.groups, (t + 1) * tile.groups):
                product = builder.fmul(builder.extract_value(value, i), factor)
                value = builder.insert_value(value, product, i)
        return value

    return tile(tile, at, token), codegen


@intrinsic
def add(typing_context, a, b):
    """Return the sum of two tiles."""

    def codegen(context, builder, signature, args):
        value = args[0]
        for i in range(a.n):
            x, y = (builder.extract_value(tile, i) for tile in args)
            value = builder.insert_value(value, builder.fadd(x, y), i)
        return value

    return a(a, b), codegen


@intrinsic
def step(typing_context, tile, like, w, group, x, token):
    """Add the products of one unit: weights at ``w + group * r``, activations at ``x + token * t``.

    See the table of units above for `like`.
    """
    read, multiply = _reader(like), _pair_step if _element(like) == types.int32 else _float_step
    n = 2 if _element(like) == types.int8 else 1
    if tile.groups % n:
        raise errors.TypingError(
            f"register_tiles.step: wanted an even number of groups, got {tile}"
        )

    def codegen(context, builder, signature, args):
        w, group, x, token = (llvm.int64(context, builder, signature, args, i) for i in range(2, 6))
        at = [llvm.element(builder, x, token, t) for t in range(tile.tokens)]
        value = args[0]
        for r in range(tile.groups):
            if r % n == 0:
                vectors = iter(read(builder, llvm.element(builder, w, group, r // n)))
            weights = next(vectors)
            for t in range(tile.tokens):
                i = t * tile.groups + r
                total = multiply(builder, builder.extract_value(value, i), weights, at[t])
                value = builder.insert_value(value, total, i)
        return value

    return tile(tile, like, w, group, x, token), codegen


@intrinsic
def step_chains(typing_context, tile, like, w, x, token):
    """Add one unit to each group of the tile: unit i of one weight group, at `w`, to group i."""
    stored, how = _unit(like)
    multiply = _pair_step if stored is I32 else _float_step
    size = LANES * (stored.width // 8 if stored is not F32 else 4)

    def codegen(context, builder, signature, args):
        w, x, token = (llvm.int64(context, builder, signature, args, i) for i in (2, 3, 4))
        at = [llvm.element(builder, x, token, t) for t in range(tile.tokens)]
        value = args[0]
        for g in range(tile.groups):
            loaded = llvm.load(builder, llvm.offset(builder, w, size * g), llvm.vector(stored))
            weights = emit_widen(builder, loaded, how)
            for t in range(tile.tokens):
                i, address = t * tile.groups + g, llvm.offset(builder, at[t], 4 * g)
                total = multiply(builder, builder.extract_value(value, i), weights, address)
                value = builder.insert_value(value, total, i)
        return value

    return tile(tile, like, w, x, token), codegen


@intrinsic
def load_widened(typing_context, like, at):
    """Return 16 weights as float32."""
    stored, how = _unit(like)

    def codegen(context, builder, signature, args):
        address = llvm.int64(context, builder, signature, args, 1)
        return emit_widen(builder, llvm.load(builder, address, llvm.vector(stored)), how)

    return f32x16(like, at), codegen


@intrinsic
def step_lanes(typing_context, tile, like, w, row, x, token):
    """Add 16 columns, lane by lane: weights at ``w + row * r``, activations at ``x + token * t``.

    A group of the tile is a row here; `like` is not of pairs.  A block adds its 32 columns.
    """
    read = _reader(like)

    def codegen(context, builder, signature, args):
        w, row, x, token = (llvm.int64(context, builder, signature, args, i) for i in range(2, 6))
        rows = [read(builder, llvm.element(builder, w, row, r)) for r in range(tile.groups)]
        value = args[0]
        for i, weights in enumerate(zip(*rows, strict=True)):
            start = llvm.offset(builder, x, 64 * i)
            at = (llvm.element(builder, start, token, t) for t in range(tile.tokens))
            xs = (llvm.load(builder, address, f32x16.llvm) for address in at)
            value = _emit_step_lanes(builder, tile, value, weights, xs)
        return value

    return tile(tile, like, w, row, x, token), codegen


@intrinsic
def step_first(typing_context, tile, like, w, row, x, token, n):
    """Add the first `n` of 16 columns as `step_lanes` does; the others are not read."""
    stored, how = _unit(like)

    def codegen(context, builder, signature, args):
        operands = [llvm.int64(context, builder, signature, args, i) for i in range(2, 6)]
        mask = first_lanes(context, builder, args[6], signature.args[6])

        def read(address, stride, i, element):
            vector = llvm.vector(element, LANES)
            pointer = llvm.pointer(builder, llvm.element(builder, address, stride, i), vector)
            return masked_load(builder, pointer, mask, ir.Constant(vector, None))

        w, row, x, token = operands
        rows = [read(w, row, r, stored) for r in range(tile.groups)]
        weights = [emit_widen(builder, bits, how) for bits in rows]
        xs = (read(x, token, t, F32) for t in range(tile.tokens))
        return _emit_step_lanes(builder, tile, args[0], weights, xs)

    return tile(tile, like, w, row, x, token, n), codegen


def _emit_step_lanes(builder, tile, value, weights, xs):
    """Emit the products of 16 columns of each row with those of each token, added to a tile."""
    for t, lanes in enumerate(xs):
        for r in range(tile.groups):
            i = t * tile.groups + r
            total = llvm.fma(builder, weights[r], lanes, builder.extract_value(value, i))
            value = builder.insert_value(value, total, i)
    return value


@intrinsic
def lane_sums(typing_context, tile):
    """Return the vector whose lane i is `simd.sum` of vector i of a tile of 16 vectors."""
    if tile.n != LANES:
        raise errors.TypingError(f"register_tiles.lane_sums: wanted 16 vectors, got {tile}")

    def codegen(context, builder, signature, args):
        return emit_sums(builder, [builder.extract_value(args[0], i) for i in range(LANES)])

    return f32x16(tile), codegen


@intrinsic
def lane_magnitudes(typing_context, tile):
    """Return the vector whose lane i is the largest magnitude in vector i of a tile of 16 vectors.

    It is infinite or NaN exactly if the vector has such a lane.
    """
    if tile.n != LANES:
        raise errors.TypingError(f"register_tiles.lane_magnitudes: wanted 16 vectors, got {tile}")

    def codegen(context, builder, signature, args):
        def larger(a, b):  # magnitudes have the order of their bits, NaN the last
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        kind, sign = llvm.vector(I32), llvm.constant(I32, [0x7FFFFFFF] * LANES)
        lanes = [builder.extract_value(args[0], i) for i in range(LANES)]
        bits = [builder.and_(builder.bitcast(v, kind), sign) for v in lanes]
        found = emit_reductions(builder, larger, bits)
        return builder.bitcast(found, f32x16.llvm)

    return f32x16(tile), codegen


@intrinsic
def add_pairs(typing_context, total, a, b):
    """Return `total` plus the two products of each lane of pairs of bfloat16, the odd one first."""
    if (total, a, b) != (f32x16, i32x16, i32x16):
        raise errors.TypingError(f"register_tiles.add_pairs: wanted int32 pairs, got {a} and {b}")

    def codegen(context, builder, signature, args):
        return _pair_products(builder, *args)

    return f32x16(total, a, b), codegen


def _float_step(builder, total, weights, address):
    return llvm.fma(builder, weights, llvm.splat(builder, llvm.load(builder, address, F32)), total)


def _pair_step(builder, total, weights, address):
    return _pair_products(
        builder, total, weights, llvm.splat(builder, llvm.load(builder, address, I32))
    )


def _pair_products(builder, total, a, b):
    """Add the two products of each lane, the odd column first."""
    if has_pair_products():
        args = [total, builder.bitcast(a, _BF16X32), builder.bitcast(b, _BF16X32)]
        return llvm.call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.llvm, args)
    mask, shift = llvm.repeated(i32x16.llvm, -0x10000), llvm.repeated(i32x16.llvm, 16)
    odd = [builder.bitcast(builder.and_(v, mask), f32x16.llvm) for v in (a, b)]
    even = [builder.bitcast(builder.shl(v, shift), f32x16.llvm) for v in (a, b)]
    return llvm.fma(builder, even[0], even[1], llvm.fma(builder, odd[0], odd[1], total))


# ---- copies between layouts -----------------------------------------------------------------


def _transposed(builder: Any, vectors: list[Any]) -> list[Any]:
    """Transpose 16 vectors of 16 lanes: four times, interleave vector i with vector i + 8."""
    low = [lane for i in range(8) for lane in (i, 16 + i)]
    high = [lane + 8 for lane in low]
    for _ in range(4):
        pairs = zip(vectors[:8], vectors[8:], strict=True)
        vectors = [llvm.shuffle(builder, a, b, lanes) for a, b in pairs for lanes in (low, high)]
    return vectors


@intrinsic
def transpose(typing_context, like, at, row_bytes, to):
    """Copy 16 rows x 16 columns of weights, rows `row_bytes` apart, column after column."""
    stored, _ = _unit(like)

    def codegen(context, builder, signature, args):
        at, row_bytes, to = (llvm.int64(context, builder, signature, args, i) for i in (1, 2, 3))
        column_bytes = LANES * like.dtype.bitwidth // 8
        for i, column in enumerate(_columns(builder, at, row_bytes, stored)):
            llvm.store(builder, column, llvm.offset(builder, to, column_bytes * i))
        return context.get_dummy_value()

    return types.none(like, at, row_bytes, to), codegen


@intrinsic
def transpose_f32(typing_context, like, at, row_bytes, to, distance):
    """Transpose to float32: columns 0, 4, 8, 12 to `to`, 1, 5, ... `distance` bytes further."""
    stored, how = _unit(like)

    def codegen(context, builder, signature, args):
        at, row_bytes, to, distance = (
            llvm.int64(context, builder, signature, args, i) for i in range(1, 5)
        )
        for i, column in enumerate(_columns(builder, at, row_bytes, stored)):
            start = llvm.element(builder, to, distance, i % 4)
            llvm.store(
                builder, emit_widen(builder, column, how), llvm.offset(builder, start, i // 4 * 64)
            )
        return context.get_dummy_value()

    return types.none(like, at, row_bytes, to, distance), codegen


def _columns(builder: Any, at: Any, row_bytes: Any, stored: Any) -> list[Any]:
    """Return 16 columns of 16 rows."""
    rows = []
    for i in range(LANES):
        address = llvm.element(builder, at, row_bytes, i)
        rows.append(llvm.load(builder, address, llvm.vector(stored)))
    return _transposed(builder, rows)


def _make_to_bf16(name: str, interleave: bool) -> Any:
    order = list(range(2 * LANES))
    if interleave:
        order = [lane for i in range(LANES) for lane in (i, LANES + i)]

    def convert(typing_context, low, high):
        def codegen(context, builder, signature, args):
            halves = _rounded(builder, *args)
            return builder.bitcast(llvm.shuffle(builder, halves, halves, order), i32x16.llvm)

        return i32x16(low, high), codegen

    convert.__name__ = name
    return intrinsic(convert)


def _rounded(builder, low, high):
    """Return 32 bfloat16 as 16-bit integers, rounded to nearest, halves to even; NaN stays NaN."""
    halves = llvm.vector(I16, 2 * LANES)
    if has_pair_products():
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        rounded = llvm.call(builder, name, _BF16X32, [high, low])
        return builder.bitcast(rounded, halves)
    parts = [emit_narrow_bf16(builder, value) for value in (low, high)]
    return llvm.shuffle(builder, parts[0], parts[1], list(range(2 * LANES)))


to_bf16 = _make_to_bf16("to_bf16", interleave=False)
to_pairs = _make_to_bf16("to_pairs", interleave=True)
