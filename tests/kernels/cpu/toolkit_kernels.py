"""Kernels that use every vector function once, compiled and in Python with the fallbacks.

Each writes its results to `out`, 64 bytes each, and reads `f` (float32), `i` (int32), `b` (bytes);
all have 4096 bytes.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import numpy as np

from nbflow_kernels.cpu import (
    atomics,
    jit,
    register_tiles,
    register_tiles_columns,
    register_tiles_int8,
    register_tiles_lower,
    register_tiles_sums,
    simd,
    simd_compare,
    simd_double,
    simd_int8,
    simd_memory,
    simd_narrow,
    simd_shuffle,
)
from nbflow_kernels.cpu.interpreter import FALLBACKS
from nbflow_kernels.cpu.interpreter import kernel as python_kernel
from nbflow_kernels.formats import decode_cpu
from nbflow_kernels.formats.layout_cpu import CpuLayout


def stepped(kernel: Any) -> Any:
    """Return a compiled kernel as Python, its vector functions replaced by their fallbacks."""
    function = kernel.py_func
    names = dict(function.__globals__)
    for name, value in function.__globals__.items():
        if isinstance(value, types.ModuleType) and value.__name__ in FALLBACKS:
            names[name] = importlib.import_module(FALLBACKS[value.__name__])
    code, closure = function.__code__, function.__closure__
    return python_kernel(types.FunctionType(code, names, closure=closure))


@jit.kernel
def use_simd(f, i, b, out):  # type: ignore[no-untyped-def]
    x, y, z = simd.load_f32(f), simd.load_f32(f + 64), simd.load_f32(f + 128)
    n, m = simd.load_i32(i), simd.load_i32(i + 64)
    few = simd.and_(n, simd.splat_i32(31))
    simd.store_f32(out, simd.add(x, y))
    simd.store_f32(out + 64, simd.sub(x, y))
    simd.store_f32(out + 128, simd.mul(x, y))
    simd.store_f32(out + 192, simd.div(x, y))
    simd.store_f32(out + 256, simd.fma(x, y, z))
    simd.store_f32(out + 320, simd.maximum(x, y))
    simd.store_f32(out + 384, simd.minimum(x, y))
    simd.store_f32(out + 448, simd.rint(x))
    simd.store_i32(out + 512, simd.add(n, m))
    simd.store_i32(out + 576, simd.sub(n, m))
    simd.store_i32(out + 640, simd.mul(n, m))
    simd.store_i32(out + 704, simd.and_(n, m))
    simd.store_i32(out + 768, simd.or_(n, m))
    simd.store_i32(out + 832, simd.shl(n, few))
    simd.store_i32(out + 896, simd.shr(n, few))
    simd.store_f32(out + 960, simd.to_f32(n))
    simd.store_i32(out + 1024, simd.to_i32(simd.load_f32(f + 192)))
    simd.store_i32(out + 1088, simd.as_i32(x))
    simd.store_f32(out + 1152, simd.as_f32(n))
    simd.store_f32(out + 1216, simd.load_f16(b))
    simd.store_f32(out + 1280, simd.load_bf16(b))
    simd.store_i32(out + 1344, simd.load_u8(b + 3))
    simd.store_i32(out + 1408, simd.load_i8(b + 3))
    simd.store_f32(out + 1472, simd.splat(simd.sum(simd.load_f32(f + 192))))
    simd.store_f32(out + 1536, simd.splat(simd.max(x)))
    simd.store_f32(out + 1600, simd.splat(simd.half_to_float(simd_memory.read_u16(b))))
    simd.store_i32(out + 1664, simd.splat_i32(simd.float_to_half(simd_memory.read_f32(f + 192))))
    simd.store_f32(out + 1728, simd.splat(simd.bits_to_float(simd_memory.read_i64(i))))
    simd.store_f32(out + 1792, simd.fma(z, z, simd.splat(simd_memory.read_f32(f + 200))))
    simd.store_f32(out + 1856, simd.splat_f16(b + 2))


@jit.kernel
def use_blocks(blocks, halves, f, b, out):  # type: ignore[no-untyped-def]
    unit = register_tiles.unit_bytes(blocks)
    columns = simd.splat(register_tiles.unit_columns(blocks) + register_tiles.unit_columns(halves))
    simd.store_f32(out, columns)
    simd.store_f32(out + 64, simd.splat(unit + register_tiles.unit_bytes(halves)))
    tile = register_tiles.step(register_tiles.zero(2, 4), blocks, b + 192, unit, f + 640, 4)
    tile = register_tiles.step_lanes(tile, blocks, b + 192, 40, f + 640, 128)
    register_tiles.store(out + 128, tile)


@jit.kernel
def use_address(array, out):  # type: ignore[no-untyped-def]
    simd.store_f32(out, simd.load_f32(simd.address(array)))


@jit.kernel
def use_memory(f, i, b, out):  # type: ignore[no-untyped-def]
    simd_memory.prefetch(f)
    simd_memory.prefetch_write(out)
    simd_memory.prefetch_lines(f, 2)
    simd_memory.write_f32(out, simd_memory.read_f32(f + 4))
    simd_memory.write_f32(out + 4, simd_memory.read_f16(b + 2))
    simd_memory.write_f32(out + 8, simd_memory.read_u8(b + 5) + simd_memory.read_u16(b + 7))
    simd_memory.write_f16(out + 12, simd_memory.read_f32(f + 192))
    simd.store_i32(
        out + 64, simd.splat_i32(simd_memory.read_word(i, 2) + simd_memory.read_i64(i) >> 32)
    )
    simd_memory.store_f16(out + 128, simd.load_f32(f + 192))
    a, c = simd.load_f32(f + 192), simd.load_f32(f + 256)
    simd_memory.write_f32(out + 16, simd_memory.read_bf16(b + 192))
    simd_memory.write_i64(out + 24, simd_memory.read_i32(i + 8))
    simd_memory.store_quarters(out + 400, 24, simd.load_f32(f + 64))
    simd.store_f32(out + 320, simd_memory.sum16(a, c, a, a, c, c, a, a, c, a, c, a, a, a, c, c))
    room = simd_memory.allocate(64)
    simd.store_f32(room, a)
    simd.store_f32(out + 3200, simd.load_f32(room))
    simd_memory.release(room)
    for n in range(-1, 18):
        at = out + 512 + 64 * (n + 1)
        first = simd_memory.load_first(f, n, -1.5)
        rest = simd.add(
            simd_memory.load_first_f16(b + 192, n), simd_memory.load_first_bf16(b + 192, 16 - n)
        )
        simd.store_f32(at, simd.add(first, rest))
        simd_memory.store_first(at + 1280, n, a)


@jit.kernel
def use_atomics(f, i, b, out):  # type: ignore[no-untyped-def]
    atomics.pause()
    simd.store_i32(out, simd.splat_i32(atomics.exchange(out + 64, 11)))
    simd.store_i32(out, simd.splat_i32(atomics.add(out + 64, 7)))
    atomics.store(out + 72, atomics.load(out + 64))
    atomics.store(out + 80, atomics.load_in_order(out + 72))
    if atomics.cycles() < 0:
        atomics.store(out + 80, 1)


@jit.kernel
def use_calls(function, trampoline, out):  # type: ignore[no-untyped-def]
    simd_memory.write_f32(out, atomics.call_int(function, -7))
    simd_memory.write_f32(out + 4, atomics.call_row_range(trampoline, 40, 2, -1))


@jit.kernel
def use_hook(hook, out):  # type: ignore[no-untyped-def]
    atomics.call_hook(hook, out, 1, 2, 3, 4, 5, 6, 7, 8)


@jit.kernel
def use_int8(f, i, b, out):  # type: ignore[no-untyped-def]
    u, s = simd_int8.load_bytes(b), simd_int8.load_bytes(b + 64)
    seven = simd.and_(u, simd_int8.splat_bytes(127))
    acc = simd.load_i32(i)
    simd_int8.store_bytes(out, simd_int8.broadcast4(b + 1))
    simd_int8.store_bytes(out + 64, simd_int8.move(u, 3, 1, 4))
    simd_int8.store_bytes(out + 640, simd_int8.move(u, 0, 6, 2))
    simd_int8.store_bytes(out + 128, simd_int8.pair_first(u))
    simd_int8.store_bytes(out + 192, simd_int8.pair_second(u))
    simd_int8.store_bytes(out + 256, simd_int8.as_bytes(acc))
    simd.store_i32(out + 320, simd_int8.dot_u8_i8(acc, u, s))
    simd.store_i32(out + 384, simd_int8.dot_u7_i8(acc, seven, s))
    simd.store_f32(out + 448, simd_int8.broadcast_f32(f + 4))
    simd_int8.store_narrow(out + 576, acc)
    simd_int8.store_bytes(out + 704, simd.or_(simd.add(u, s), simd.sub(u, s)))


@jit.kernel
def use_tiles_int8(f, i, b, out):  # type: ignore[no-untyped-def]
    sums = register_tiles_int8.outer(register_tiles_int8.zeros(2, 3), f + 192, 64, f + 320, 4)
    register_tiles_int8.store(out, register_tiles_int8.outer(sums, f + 256, 64, f + 384, 8))
    ints = register_tiles_int8.starts(2, 3, i, 4, -8)
    ints = register_tiles_int8.dots(ints, b, 64, b + 256, 8, 8)
    scaled = register_tiles_int8.scaled(sums, ints, f + 192, 64, f + 320, 4)
    whole = register_tiles_int8.floats(ints)
    based = register_tiles_int8.add_by_row(scaled, whole, f + 256, 64)
    based = register_tiles_int8.add_by_token(based, sums, f + 320, 4)
    register_tiles_int8.store(out + 384, scaled)
    register_tiles_int8.store(out + 768, register_tiles_int8.add(based, scaled))
    one = register_tiles_int8.outer(
        register_tiles_int8.zeros(1, 2), simd.load_f32(f + 192), 0, f + 320, 4
    )
    single = register_tiles_int8.starts(1, 2, i, 4, 1)
    single = register_tiles_int8.dots(single, simd_int8.load_bytes(b), 0, b + 256, 8, 8)
    one = register_tiles_int8.scaled(one, single, simd.load_f32(f + 256), 0, f + 320, 4)
    register_tiles_int8.store(out + 1152, one)
    moved = register_tiles_int8.load_strided(2, 3, f + 192, 64, 128)
    register_tiles_int8.store_strided(out + 1280, 192, 64, moved)


@jit.kernel
def use_tiles(f, i, b, out, singles, halves, brains, pairs):  # type: ignore[no-untyped-def]
    tile = register_tiles.load(2, 3, f + 192)
    tile = register_tiles.add(
        tile, register_tiles.step(register_tiles.zero(2, 3), singles, f + 192, 64, f + 640, 4)
    )
    tile = register_tiles.step(tile, halves, b + 192, 32, f + 648, 8)
    tile = register_tiles.step(tile, brains, b + 192, 32, f + 648, 8)
    register_tiles.store(out, register_tiles.step(tile, pairs, b + 192, 64, b + 320, 4))
    simd.store_f32(out + 384, register_tiles.load_widened(halves, b))
    simd.store_f32(out + 448, register_tiles.load_widened(brains, b))
    simd.store_i32(
        out + 512, register_tiles.to_bf16(simd.load_f32(f + 4032), simd.load_f32(f + 192))
    )
    simd.store_i32(
        out + 576, register_tiles.to_pairs(simd.load_f32(f + 4032), simd.load_f32(f + 192))
    )
    register_tiles.transpose(brains, b, 48, out + 640)
    register_tiles.transpose_f32(halves, b, 48, out + 1152, 256)
    register_tiles.transpose(singles, f, 72, out + 2176)
    rows = register_tiles.step_lanes(register_tiles.zero(4, 4), halves, b + 192, 32, f + 640, 64)
    rows = register_tiles.step_first(rows, singles, f + 400, 68, f + 644, 64, 11)
    rows = register_tiles.step_first(rows, brains, b + 192, 34, f + 652, 64, 5)
    simd.store_f32(out + 3200, register_tiles.lane_sums(rows))
    simd.store_f32(out + 4032, register_tiles.lane_magnitudes(rows))
    both = simd.load_i32(b + 192), simd.load_i32(b + 256)
    simd.store_f32(out + 3264, register_tiles.add_pairs(simd.load_f32(f + 640), both[0], both[1]))
    left = register_tiles.scale(register_tiles.load_strided(2, 2, f + 640, 128), f + 1000, 4)
    left = register_tiles.step_chains(left, halves, b + 192, f + 648, 8)
    two = register_tiles.step_chains(left, brains, b + 192, f + 648, 8)
    two = register_tiles.step_chains(two, pairs, b + 192, b + 320, 4)
    register_tiles.store_strided(
        out + 3328, 192, register_tiles.step_chains(two, singles, f + 192, f + 700, 8)
    )


@jit.kernel
def use_tiles_lower(f, i, b, out):  # type: ignore[no-untyped-def]
    tile = register_tiles_lower.substitute(register_tiles.load(2, 3, f + 192), f + 640, 20)
    register_tiles.store(out, tile)
    tile = register_tiles_lower.add_lower(register_tiles.load(2, 3, f + 192), f + 640, 20, f + 704)
    register_tiles.store(out + 384, tile)


@jit.kernel
def use_columns(f, i, b, out):  # type: ignore[no-untyped-def]
    for j in range(16):
        simd_memory.write_i64(out + 8 * j, b + 34 * j)
    tile = register_tiles_columns.load_columns(out, 5)
    for j in range(16):  # addresses differ between runs
        simd_memory.write_i64(out + 8 * j, j)
    register_tiles.store(out + 128, tile)
    simd.store_i32(out + 640, register_tiles_columns.dot_columns(tile, i, b + 1024))


@jit.kernel
def use_tiles_sums(f, i, b, out):  # type: ignore[no-untyped-def]
    half = register_tiles_sums.half_lanes()
    first = register_tiles_sums.fold_lanes(register_tiles.load(2, 8, f), half)
    second = register_tiles_sums.fold_lanes(register_tiles.load(2, 8, f + 1024), half)
    register_tiles_sums.store_sums(out, 20, first, second)


@jit.kernel
def use_shuffle(f, i, b, out):  # type: ignore[no-untyped-def]
    x, y = simd.load_f32(f), simd.load_f32(f + 64)
    simd.store_f32(out, simd_shuffle.evens(x, y))
    simd.store_f32(out + 64, simd_shuffle.odds(x, y))
    simd.store_f32(out + 128, simd_shuffle.twice_low(x))
    simd.store_f32(out + 192, simd_shuffle.twice_high(x))
    simd.store_f32(out + 256, simd_shuffle.swap_pairs(x))
    simd.store_f32(out + 320, simd_shuffle.negate_evens(x))
    index = simd.and_(simd.load_i32(i), simd.splat_i32(15))
    simd.store_i32(out + 384, simd_shuffle.lookup(simd.load_i32(i + 64), index))
    simd_shuffle.split_columns(f, 3, out + 448)
    simd_shuffle.join_columns(f, 3, out + 640)
    simd_shuffle.split_columns(out + 640, 3, out + 832)


@jit.kernel
def use_compare(f, i, b, out):  # type: ignore[no-untyped-def]
    x, y, n, m = simd.load_f32(f), simd.load_f32(f + 64), simd.load_i32(i), simd.load_i32(i + 64)
    mask = simd_compare.less(x, y)
    simd.store_i32(out, mask)
    simd.store_i32(out + 64, simd_compare.differs(x, y))
    simd.store_f32(out + 128, simd_compare.choose(mask, x, y))
    simd.store_i32(out + 192, simd_compare.choose(mask, n, m))
    simd.store_f32(out + 256, simd_compare.absolute(x))
    simd.store_f32(out + 320, simd_compare.sqrt(simd_compare.absolute(x)))
    simd.store_i32(out + 384, simd_compare.smaller(n, m))
    simd.store_i32(out + 448, simd_compare.larger(n, m))
    yes = simd_compare.any_lane(mask) and not simd_compare.any_lane(simd.splat_i32(0))
    simd.store_i32(out + 512, simd.splat_i32(1 if yes else 0))


@jit.kernel
def use_double(f, i, b, out):  # type: ignore[no-untyped-def]
    x, y = simd_double.widen(simd.load_f32(f)), simd_double.widen(simd.load_f32(f + 64))
    third = simd_double.div(x, simd_double.splat(3.0))
    product = simd_double.mul(third, y)
    rest = simd_double.sub(simd_double.splat(0.0), product)
    simd.store_f32(out, simd_double.narrow(simd_double.fma(third, y, rest)))  # the rounding error
    simd.store_f32(out + 64, simd_double.narrow(simd_double.add(product, x)))
    simd.store_f32(out + 128, simd_double.narrow(simd_double.rint(third)))
    simd.store_f32(out + 192, simd_double.narrow(simd_double.where_less(x, y, third, y)))


@jit.kernel
def use_narrow(f, i, b, out):  # type: ignore[no-untyped-def]
    simd.store_i32(out, simd_narrow.load_fields4(b + 1))
    simd.store_i32(out + 64, simd_narrow.load_fields2(b + 1))
    simd.store_i32(out + 128, simd_narrow.load_fields1(b + 1))
    simd.store_i32(out + 192, simd_narrow.load_pairs4(b + 1))
    simd.store_i32(out + 256, simd_narrow.load_pairs2(b + 1))
    simd.store_i32(out + 320, simd_narrow.load_pairs1(b + 1))
    simd_narrow.store_fields4(out + 384, simd_narrow.load_fields4(b + 2))
    simd_narrow.store_fields2(out + 392, simd_narrow.load_fields2(b + 2))
    simd_narrow.store_fields1(out + 396, simd_narrow.load_fields1(b + 2))
    simd_narrow.store_pairs4(out + 400, simd_narrow.load_pairs4(b + 2))
    simd_narrow.store_pairs2(out + 404, simd_narrow.load_pairs2(b + 2))
    simd_narrow.store_pairs1(out + 406, simd_narrow.load_pairs1(b + 2))
    n, m, x = simd.load_i32(i), simd.load_i32(i + 64), simd.load_f32(f)
    simd.store_i32(out + 512, simd_shuffle.swap_pairs(n))
    simd.store_i32(out + 576, simd_narrow.choose_odd(n, m))
    simd_narrow.store_bf16(out + 640, x)
    simd.store_i32(out + 1280, simd_narrow.half_bits(x))
    simd.store_f32(out + 1344, simd_narrow.from_half_bits(n))
    simd_narrow.write_u16(out + 700, simd_memory.read_i32(i))
    simd_narrow.write_u8(out + 702, simd_memory.read_i32(i + 4))
    for count in range(3):
        simd.store_f32(out + 1088 + 64 * count, simd_narrow.keep(x, 5 * count))


@jit.kernel
def use_accumulators(f, i, b, out):  # type: ignore[no-untyped-def]
    x, y, z = simd.load_f32(f), simd.load_f32(f + 64), simd.load_f32(f + 192)
    simd.store_f32(out, simd_compare.where_ge(x, y, y, z))
    yes = simd_compare.any_ge(x, y) and not simd_compare.any_ge(z, simd.splat(1e9))
    simd.store_i32(out + 64, simd.splat_i32(7 if yes else 0))
    total = simd_compare.wide_add(simd_compare.wide_zero(), z)
    total = simd_compare.wide_add(total, simd.load_f32(f + 256))
    simd.store_f32(out + 128, simd.splat(simd_compare.wide_sum(total)))
    bits = simd_compare.bits_of(simd_memory.read_f32(f + 192))
    simd.store_i32(out + 192, simd.splat_i32(bits))
    simd.store_f32(out + 256, simd.splat(simd.bits_to_float(bits + 1)))


def use_form(form: CpuLayout) -> Any:
    """Return a kernel that uses all functions that read packed weights of a form."""
    vectors, per_scale = form.unit // 4, form.sub_block // 4
    units, folds = form.block // form.unit, form.folded_zero is not None
    trellis = form.trellis

    @jit.kernel
    def kernel(packed, out):  # type: ignore[no-untyped-def]
        for unit in range(units):
            if trellis:  # any bytes are activations
                ints = register_tiles_int8.starts(1, 2, packed, 4, 1)
                ints = decode_cpu.dots_of_unit(form, ints, packed, unit, packed, 32)
                register_tiles_int8.store(out, register_tiles_int8.floats(ints))
                out += 128
            for v in range(vectors):
                s = (unit * vectors + v) // per_scale
                u = decode_cpu.codes(form, packed, unit, v)
                d, m = decode_cpu.d_of(form, packed, s), decode_cpu.m_of(form, packed, s)
                simd_int8.store_bytes(out, u)
                simd.store_f32(out + 64, decode_cpu.scale_of(form, packed, s, d))
                simd.store_f32(out + 128, decode_cpu.base_of(form, packed, s, m))
                if folds:
                    simd_int8.store_bytes(out + 64, decode_cpu.folded(form, packed, s, u))
                scale, base = decode_cpu.parameters(form, packed, s)
                simd.store_f32(out + 192, decode_cpu.weight(form, u, v % 4, scale, base))
                out += 256

    return kernel


def operands(seed: int, brains: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `f`, with special values in its first 192 bytes, `i` and `b`."""
    rng = np.random.default_rng(seed)
    f = rng.standard_normal(1024).astype(np.float32)
    odd = np.array([np.nan, np.inf, -np.inf, 1e-40, -1e-45, 2.5, -3.5, 1e38], np.float32)
    f[:48] = np.where(rng.random(48) < 0.4, rng.choice(odd, 48), f[:48] * 100)
    f[:48] = np.where(rng.random(48) < 0.2, f[rng.permutation(48)], f[:48])
    f[1008:1011] = np.nan, np.inf, 3.4e38  # but no denormal numbers, which some processors drop
    i = rng.integers(-(2**31), 2**31, 1024).astype(np.int32)
    b = rng.integers(0, 256, 4096).astype(np.uint8)
    b[192:1024].view(np.uint16)[:] = brains(rng.standard_normal(416).astype(np.float32))
    return f, i, b
