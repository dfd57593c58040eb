"""Int8 register tiles: the sums of R row groups of 16 weights times T tokens as one value.

A matrix product keeps R * T vectors of sums in registers and adds to all of them at each step, for
which it reads R vectors of weights and T activations.  Numba does not unroll loops over tuples of
vectors; a tile is one value whose operations emit the R * T instructions.

====================================================  =============================================
`zeros(R, T)`                                         float32 sums, all 0
`outer(sums, w, w_step, x, x_step)`                   sums[r, t] + w[r] * x[t]: w 16 float32, x one
`starts(R, T, n, n_step, factor)`                     int32 sums: factor * n[t] in all lanes
`dots(ints, w, w_step, x, x_step, bits)`              ints[r, t] + w[r] . x[t]: w 64 bytes, x 4
`scaled(sums, ints, w, w_step, x, x_step)`            sums[r, t] + ints[r, t] * (w[r] * x[t])
`floats(ints)`                                        ints[r, t] as float32
`add_by_row(sums, factors, w, w_step)`                sums[r, t] + factors[r, t] * w[r]
`add_by_token(sums, factors, x, x_step)`              sums[r, t] + factors[r, t] * x[t]
`add(a, b)`                                           lane by lane
`store(addr, sums)`                                   write R * T vectors; r is the slower index
`load_strided(R, T, addr, r_step, t_step)`            the vectors at addr + r_step * r + t_step * t
`store_strided(addr, r_step, t_step, sums)`           write them there
====================================================  =============================================

`w`, `x` and `n` are addresses of the first row group's or token's numbers, each followed by the
distance in bytes to the next one's.  With a single row group, `w` may be the vector itself.
Products and sums are fused, with one rounding; ``w[r] * x[t]`` of `scaled` is rounded.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import datamodel, errors, extending, types

from nbflow_kernels.cpu import interpreter, isa, llvm
from nbflow_kernels.cpu.llvm import F32, I8, I32, LANES
from nbflow_kernels.cpu.simd import Vector, f32x16, i32x16
from nbflow_kernels.cpu.simd_int8 import emit_dot

intrinsic = functools.partial(interpreter.intrinsic, fallback="register_tiles_int8")


class Int8Tile(types.Type):
    """The Numba type of R x T vectors of 16 float32 or int32."""

    def __init__(self, vector: Any, rows: int, tokens: int) -> None:
        self.vector, self.rows, self.tokens = vector, rows, tokens
        super().__init__(name=f"tile.{vector.element}.{rows}x{tokens}")

    @property
    def llvm(self) -> Any:
        """Return the LLVM type."""
        return ir.ArrayType(self.vector.llvm, self.rows * self.tokens)


@extending.register_model(Int8Tile)
class _TileModel(datamodel.models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Int8Tile) -> None:
        super().__init__(manager, fe_type, fe_type.llvm)


class _Emit:
    """Arguments and emitters that the tile operations share."""

    def __init__(self, context, builder, signature, args):
        self.builder = builder
        self.values = [
            value
            if isinstance(kind, Int8Tile | Vector)
            else context.cast(builder, value, kind, types.int64)
            for value, kind in zip(args, signature.args, strict=True)
        ]

    def load(self, addr: Any, step: Any, index: int, kind: Any) -> Any:
        """Load the element `index` steps after an address."""
        return llvm.load(self.builder, llvm.element(self.builder, addr, step, index), kind)

    def weights(self, tile: Int8Tile, w: Any, step: Any, kind: Any) -> list[Any]:
        """Return the vectors of all row groups."""
        if w.type == kind:
            return [w]
        return [self.load(w, step, r, kind) for r in range(tile.rows)]

    def splat(self, scalar: Any) -> Any:
        """Return a scalar in all lanes."""
        return llvm.splat(self.builder, scalar)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c."""
        return llvm.fma(self.builder, a, b, c)

    def each(self, tile: Int8Tile, old: Any, new: Any) -> Any:
        """Return the tile of ``new(r, t, old vector)``."""
        result = ir.Constant(tile.llvm, ir.Undefined)
        for r in range(tile.rows):
            for t in range(tile.tokens):
                i = r * tile.tokens + t
                vector = None if old is None else self.builder.extract_value(old, i)
                result = self.builder.insert_value(result, new(r, t, vector), i)
        return result


def _tile_of(name: str, tile: Any, vector: Any) -> Int8Tile:
    if not isinstance(tile, Int8Tile) or tile.vector != vector:
        raise errors.TypingError(f"register_tiles_int8.{name}: wanted {vector}, got {tile}")
    return tile


def _new(name: str, vector: Any, rows: Any, tokens: Any) -> Int8Tile:
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(tokens, types.IntegerLiteral):
        raise errors.TypingError(f"register_tiles_int8.{name}: R and T must be constants")
    return Int8Tile(vector, rows.literal_value, tokens.literal_value)


@intrinsic(prefer_literal=True)
def zeros(typing_context, rows, tokens):
    """Return a tile of float32 zeros."""
    tile = _new("zeros", f32x16, rows, tokens)

    def codegen(context, builder, signature, args):
        return ir.Constant(tile.llvm, None)

    return tile(rows, tokens), codegen


@intrinsic
def outer(typing_context, sums, w, w_step, x, x_step):
    """Return sums[r, t] + w[r] * x[t]."""
    tile = _tile_of("outer", sums, f32x16)

    def codegen(context, builder, signature, args):
        emit = _Emit(context, builder, signature, args)
        sums, w, w_step, x, x_step = emit.values
        weights = emit.weights(tile, w, w_step, f32x16.llvm)
        xs = [emit.splat(emit.load(x, x_step, t, F32)) for t in range(tile.tokens)]
        return emit.each(tile, sums, lambda r, t, old: emit.fma(weights[r], xs[t], old))

    return tile(sums, w, w_step, x, x_step), codegen


@intrinsic(prefer_literal=True)
def starts(typing_context, rows, tokens, n, n_step, factor):
    """Return int32 sums factor * n[t] in all lanes."""
    tile = _new("starts", i32x16, rows, tokens)

    def codegen(context, builder, signature, args):
        emit = _Emit(context, builder, signature, args)
        _, _, n, n_step, factor = emit.values
        narrow = builder.trunc(factor, I32)
        loaded = [emit.load(n, n_step, t, I32) for t in range(tile.tokens)]
        first = [emit.splat(builder.mul(one, narrow)) for one in loaded]
        return emit.each(tile, None, lambda r, t, old: first[t])

    return tile(rows, tokens, n, n_step, factor), codegen


@intrinsic(prefer_literal=True)
def dots(typing_context, ints, w, w_step, x, x_step, bits):
    """Return ints[r, t] + w[r] . x[t], exact."""
    tile = _tile_of("dots", ints, i32x16)
    seven = isinstance(bits, types.IntegerLiteral) and bits.literal_value < 8
    bytes_ = llvm.vector(I8, 4 * LANES)

    def codegen(context, builder, signature, args):
        emit = _Emit(context, builder, signature, args)
        ints, w, w_step, x, x_step, _ = emit.values
        weights = emit.weights(tile, w, w_step, bytes_)
        fours = [emit.splat(emit.load(x, x_step, t, I32)) for t in range(tile.tokens)]
        xs = [builder.bitcast(four, bytes_) for four in fours]
        features = isa.features()
        return emit.each(
            tile, ints, lambda r, t, old: emit_dot(builder, old, weights[r], xs[t], seven, features)
        )

    return tile(ints, w, w_step, x, x_step, bits), codegen


@intrinsic
def scaled(typing_context, sums, ints, w, w_step, x, x_step):
    """Return sums[r, t] + ints[r, t] * (w[r] * x[t])."""
    tile = _tile_of("scaled", sums, f32x16)
    _tile_of("scaled", ints, i32x16)

    def codegen(context, builder, signature, args):
        emit = _Emit(context, builder, signature, args)
        sums, ints, w, w_step, x, x_step = emit.values
        scales = emit.weights(tile, w, w_step, f32x16.llvm)
        xs = [emit.splat(emit.load(x, x_step, t, F32)) for t in range(tile.tokens)]

        def one(r, t, old):
            whole = builder.sitofp(builder.extract_value(ints, r * tile.tokens + t), f32x16.llvm)
            return emit.fma(whole, builder.fmul(scales[r], xs[t]), old)

        return emit.each(tile, sums, one)

    return tile(sums, ints, w, w_step, x, x_step), codegen


@intrinsic
def floats(typing_context, ints):
    """Return ints[r, t] as float32."""
    tile = _tile_of("floats", ints, i32x16)
    result = Int8Tile(f32x16, tile.rows, tile.tokens)

    def codegen(context, builder, signature, args):
        emit = _Emit(context, builder, signature, args)
        whole = emit.values[0]

        def one(r, t, old):
            lanes = builder.extract_value(whole, r * tile.tokens + t)
            return builder.sitofp(lanes, f32x16.llvm)

        return emit.each(result, None, one)

    return result(ints), codegen


@intrinsic
def add_by_row(typing_context, sums, factors, w, w_step):
    """Return sums[r, t] + factors[r, t] * w[r]."""
    tile = _tile_of("add_by_row", sums, f32x16)
    _tile_of("add_by_row", factors, f32x16)

    def codegen(context, builder, signature, args):
        emit = _Emit(context, builder, signature, args)
        sums, factors, w, w_step = emit.values
        weights = emit.weights(tile, w, w_step, f32x16.llvm)

        def one(r, t, old):
            return emit.fma(builder.extract_value(factors, r * tile.tokens + t), weights[r], old)

        return emit.each(tile, sums, one)

    return tile(sums, factors, w, w_step), codegen


@intrinsic
def add_by_token(typing_context, sums, factors, x, x_step):
    """Return sums[r, t] + factors[r, t] * x[t]."""
    tile = _tile_of("add_by_token", sums, f32x16)
    _tile_of("add_by_token", factors, f32x16)

    def codegen(context, builder, signature, args):
        emit = _Emit(context, builder, signature, args)
        sums, factors, x, x_step = emit.values
        xs = [emit.splat(emit.load(x, x_step, t, F32)) for t in range(tile.tokens)]

        def one(r, t, old):
            return emit.fma(builder.extract_value(factors, r * tile.tokens + t), xs[t], old)

        return emit.each(tile, sums, one)

    return tile(sums, factors, x, x_step), codegen


@intrinsic
def add(typing_context, a, b):
    """Return a + b."""
    tile = _tile_of("add", a, f32x16)
    _tile_of("add", b, f32x16)

    def codegen(context, builder, signature, args):
        emit = _Emit(context, builder, signature, args)
        return emit.each(
            tile,
            args[0],
            lambda r, t, old: builder.fadd(
                old, builder.extract_value(args[1], r * tile.tokens + t)
            ),
        )

    return tile(a, b), codegen


@intrinsic
def store(typing_context, addr, sums):
    """Write the vectors of a tile to an address."""
    tile = _tile_of("store", sums, f32x16)

    def codegen(context, builder, signature, args):
        address = llvm.int64(context, builder, signature, args)
        for i in range(tile.rows * tile.tokens):
            vector = builder.extract_value(args[1], i)
            llvm.store(builder, vector, llvm.offset(builder, address, 4 * LANES * i))
        return context.get_dummy_value()

    return types.none(addr, sums), codegen


def _address(builder: Any, addr: Any, row_step: Any, r: int, token_step: Any, t: int) -> Any:
    return llvm.element(builder, llvm.element(builder, addr, row_step, r), token_step, t)


@intrinsic(prefer_literal=True)
def load_strided(typing_context, rows, tokens, addr, row_step, token_step):
    """Return the tile of vectors at ``addr + row_step * r + token_step * t``."""
    tile = _new("load_strided", f32x16, rows, tokens)

    def codegen(context, builder, signature, args):
        emit = _Emit(context, builder, signature, args)
        _, _, addr, row_step, token_step = emit.values

        def one(r, t, old):
            at = _address(builder, addr, row_step, r, token_step, t)
            return llvm.load(builder, at, f32x16.llvm)

        return emit.each(tile, None, one)

    return tile(rows, tokens, addr, row_step, token_step), codegen


@intrinsic
def store_strided(typing_context, addr, row_step, token_step, sums):
    """Write the vectors of a tile to ``addr + row_step * r + token_step * t``."""
    tile = _tile_of("store_strided", sums, f32x16)

    def codegen(context, builder, signature, args):
        emit = _Emit(context, builder, signature, args)
        addr, row_step, token_step, sums = emit.values
        for r in range(tile.rows):
            for t in range(tile.tokens):
                vector = builder.extract_value(sums, r * tile.tokens + t)
                llvm.store(builder, vector, _address(builder, addr, row_step, r, token_step, t))
        return context.get_dummy_value()

    return types.none(addr, row_step, token_step, sums), codegen
