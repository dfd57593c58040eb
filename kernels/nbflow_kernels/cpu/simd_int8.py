"""Vectors of 64 bytes as values in kernels: bit moves, int8 dot products.

A byte vector has one type, `simd.i8x64`; the operation decides whether bytes are signed.  It is
also 16 lanes of 4 bytes: `dot_u8_i8` multiplies byte by byte and adds the four products of a lane.

==============================  ===================================================================
`load_bytes(addr)`              64 bytes
`store_bytes(addr, v)`          write 64 bytes
`splat_bytes(n)`                one byte in all places
`broadcast4(addr)`              4 bytes in all lanes
`broadcast_f32(addr)`           a float32 in all 16 lanes
`as_bytes(v)`                   int32 lanes as bytes: the same bits
`move(v, a, b, n)`              n bits of each byte from bit a on moved to bit b on, the others 0;
                                a, b and n are constants
`dot_u8_i8(acc, u, s)`          acc + the sums of 4 products, u unsigned and s signed, exact int32
`dot_u7_i8(acc, u, s)`          the same where all of `u` is below 128: cheaper without VNNI
`pair_first(c)` `pair_second`   x and y of c = x + 11 * y, x < 11, in the low 7 bits of each byte
`store_narrow(addr, v)`         write the low bytes of 16 int32
`store_halves(addr, v)`         write their low 16 bits
==============================  ===================================================================

All give the same bits on every processor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba.core import errors, types

from nbflow_kernels.cpu import interpreter, isa
from nbflow_kernels.cpu.llvm import (
    F32,
    I8,
    I16,
    I32,
    call,
    constant,
    load,
    shuffle,
    splat,
    store,
    vector,
)
from nbflow_kernels.cpu.simd import f32x16, i8x64, i32x16

intrinsic = functools.partial(interpreter.intrinsic, fallback="simd_int8")

PAIR_FACTOR, PAIR_SHIFT = 373, 12  # c * 373 >> 12 == c // 11 for c in 0..120


def _takes_bytes() -> bool:
    """Return whether LLVM's byte dot product takes byte vectors (from LLVM 22), not int32 lanes."""
    words, wide = "<16 x i32>", "<64 x i8>"
    name = "@llvm.x86.avx512.vpdpbusd.512"
    call = f"%r = call {words} {name}({words} %a, {wide} %b, {wide} %b)"
    module = (
        f"declare {words} {name}({words}, {wide}, {wide})\n"
        f"define {words} @f({words} %a, {wide} %b) {{\n{call}\nret {words} %r\n}}"
    )
    try:
        binding.parse_assembly(module).verify()
    except RuntimeError:
        return False
    return True


_BYTE_OPERANDS = _takes_bytes()


def _in_parts(builder: Any, n_parts: int, operation: Callable[..., Any], *vectors: Any) -> Any:
    """Apply an operation to each of `n_parts` parts of vectors and concatenate the results."""
    parts = []
    for part in range(n_parts):
        sizes = [v.type.count // n_parts for v in vectors]
        ranges = [range(part * size, (part + 1) * size) for size in sizes]
        cut = [shuffle(builder, v, v, r) for v, r in zip(vectors, ranges, strict=True)]
        parts.append(operation(*cut))
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [shuffle(builder, a, b, range(count)) for a, b in pairs]
    return parts[0]


def _make(name: str, result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    """Make an intrinsic; `arguments` are vector types, or Numba types to convert scalars to."""

    def check(given: tuple[Any, ...]) -> None:
        for wanted, found in zip(arguments, given, strict=True):
            is_vector = isinstance(wanted, type(i8x64))
            if wanted != found if is_vector else isinstance(found, type(i8x64)):
                raise errors.TypingError(f"simd_int8.{name}: wanted {arguments}, got {given}")

    def generate(context, builder, signature, args):
        values = [
            value if wanted == found else context.cast(builder, value, found, wanted)
            for value, found, wanted in zip(args, signature.args, arguments, strict=True)
        ]
        value = emit(builder, *values)
        return context.get_dummy_value() if result is types.none else value

    def one(typing_context, a):
        check((a,))
        return result(a), generate

    def two(typing_context, a, b):
        check((a, b))
        return result(a, b), generate

    def three(typing_context, a, b, c):
        check((a, b, c))
        return result(a, b, c), generate

    chosen = (one, two, three)[len(arguments) - 1]
    chosen.__name__ = name
    return intrinsic(chosen)


# ---- loads, stores, broadcasts ------------------------------------------------------------------


def _emit_broadcast(builder, addr, element, target):
    return builder.bitcast(splat(builder, load(builder, addr, element)), target)


_ADDRESS = types.int64

load_bytes = _make("load_bytes", i8x64, (_ADDRESS,), lambda b, a: load(b, a, i8x64.llvm))
store_bytes = _make("store_bytes", types.none, (_ADDRESS, i8x64), lambda b, a, v: store(b, v, a))
splat_bytes = _make("splat_bytes", i8x64, (types.uint8,), lambda b, n: splat(b, n, 64))
broadcast4 = _make(
    "broadcast4", i8x64, (_ADDRESS,), lambda b, a: _emit_broadcast(b, a, I32, i8x64.llvm)
)
broadcast_f32 = _make(
    "broadcast_f32", f32x16, (_ADDRESS,), lambda b, a: _emit_broadcast(b, a, F32, f32x16.llvm)
)
as_bytes = _make("as_bytes", i8x64, (i32x16,), lambda b, v: b.bitcast(v, i8x64.llvm))
store_narrow = _make(
    "store_narrow",
    types.none,
    (_ADDRESS, i32x16),
    lambda b, a, v: store(b, b.trunc(v, vector(I8)), a),
)
store_halves = _make(
    "store_halves",
    types.none,
    (_ADDRESS, i32x16),
    lambda b, a, v: store(b, b.trunc(v, vector(I16)), a),
)


# ---- parts of bytes -----------------------------------------------------------------------------


def emit_move(
    builder: Any, v: Any, source: int, target: int, width: int, features: frozenset[str]
) -> Any:
    """Move `width` bits of each byte from bit `source` to bit `target`; the others become 0."""
    if features >= {"gfni", "avx512bw"}:
        # bit t of the result is the parity of the byte and row 7 - t of the matrix
        moved_bits = range(target, target + width)
        rows = [1 << (source + t - target) if t in moved_bits else 0 for t in range(7, -1, -1)]
        matrix = constant(I8, rows * 8)
        arguments = [v, matrix, ir.Constant(I8, 0)]
        return call(builder, "llvm.x86.vgf2p8affineqb.512", i8x64.llvm, arguments)
    # no instruction shifts single bytes: pairs are shifted, and the mask drops what crosses over
    pairs = builder.bitcast(v, vector(I16, 32))
    shift = constant(I16, [abs(source - target)] * 32)
    moved = builder.lshr(pairs, shift) if source >= target else builder.shl(pairs, shift)
    mask = constant(I8, [((1 << width) - 1) << target] * 64)
    return builder.and_(builder.bitcast(moved, i8x64.llvm), mask)


def make_move(features: frozenset[str]) -> Any:
    """Return `move` for a processor."""

    def move(typing_context, v, source, target, width):
        numbers = (source, target, width)
        if v != i8x64 or not all(isinstance(n, types.IntegerLiteral) for n in numbers):
            raise errors.TypingError("simd_int8.move: wanted bytes and three constants")
        a, b, n = (number.literal_value for number in numbers)

        def codegen(context, builder, signature, args):
            return emit_move(builder, args[0], a, b, n, features)

        return i8x64(v, source, target, width), codegen

    return intrinsic(prefer_literal=True)(move)


move = make_move(isa.features())


def emit_pair(builder: Any, c: Any, second: bool, features: frozenset[str]) -> Any:
    """Split pair codes: by a table of 128 entries where there is one, else by multiplication."""
    if "avx512vbmi" in features:
        ys = [(code * PAIR_FACTOR) >> PAIR_SHIFT for code in range(128)]
        table = ys if second else [code - 11 * y for code, y in enumerate(ys)]
        low, high = constant(I8, table[:64]), constant(I8, table[64:])
        return call(builder, "llvm.x86.avx512.vpermi2var.qi.512", i8x64.llvm, [low, c, high])
    words = vector(I16, 32)
    c = builder.and_(c, constant(I8, [127] * 64))
    both = builder.bitcast(c, words)
    byte, factor, shift = (constant(I16, [n] * 32) for n in (255, PAIR_FACTOR, PAIR_SHIFT))
    eight = constant(I16, [8] * 32)
    low, high = builder.and_(both, byte), builder.lshr(both, eight)
    low, high = (builder.lshr(builder.mul(v, factor), shift) for v in (low, high))
    y = builder.or_(low, builder.shl(high, eight))
    if second:
        return builder.bitcast(y, i8x64.llvm)
    x = builder.sub(both, builder.mul(y, constant(I16, [11] * 32)))  # no byte borrows
    return builder.bitcast(x, i8x64.llvm)


def make_pair(name: str, second: bool, features: frozenset[str]) -> Any:
    """Return `pair_first` or `pair_second` for a processor."""
    return _make(name, i8x64, (i8x64,), lambda b, c: emit_pair(b, c, second, features))


pair_first = make_pair("pair_first", second=False, features=isa.features())
pair_second = make_pair("pair_second", second=True, features=isa.features())


def emit_lookup16(builder: Any, table: Any, index: Any, features: frozenset[str]) -> Any:
    """Look each byte up among the 16 that every quarter of `table` holds."""

    def shuffle(name: str) -> Callable[..., Any]:
        return lambda t, i: call(builder, name, t.type, [t, i])

    if "avx512bw" in features:
        return shuffle("llvm.x86.avx512.pshuf.b.512")(table, index)
    if "avx2" in features:
        return _in_parts(builder, 2, shuffle("llvm.x86.avx2.pshuf.b"), table, index)
    if "ssse3" in features:
        return _in_parts(builder, 4, shuffle("llvm.x86.ssse3.pshuf.b.128"), table, index)
    if "aarch64" in features:
        return _in_parts(builder, 4, shuffle("llvm.aarch64.neon.tbl1.v16i8"), table, index)
    result = ir.Constant(i8x64.llvm, [0] * 64)
    for i in range(16):
        entry = splat(builder, builder.extract_element(table, ir.Constant(I32, i)), 64)
        hit = builder.icmp_unsigned("==", index, constant(I8, [i] * 64))
        result = builder.select(hit, entry, result)
    return result


# ---- dot products -------------------------------------------------------------------------------


def _emit_maddubs(builder, acc, u, s, seven, wide):
    """Add products of byte pairs in 16 bits, which does not overflow if u is below 128."""
    names = ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")
    if wide:
        names = ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")
    n = acc.type.count
    ones = constant(I16, [1] * (2 * n))
    masks = (None,) if seven else (127, 128)  # -128 * 128 * 2 just fits
    for mask in masks:
        part = u if mask is None else builder.and_(u, constant(I8, [mask] * (4 * n)))
        pairs = call(builder, names[0], vector(I16, 2 * n), [part, s])
        acc = builder.add(acc, call(builder, names[1], vector(I32, n), [pairs, ones]))
    return acc


def _emit_arm(builder, acc, u, s, seven, i8mm):
    """Use the dot products of Arm: mixed signs, or both signed with 128 put back."""
    name = "llvm.aarch64.neon.{}.v4i32.v16i8"
    if i8mm:
        return call(builder, name.format("usdot"), acc.type, [acc, u, s])
    if not seven:
        u = builder.xor(u, constant(I8, [128] * 16))
        half = constant(I8, [64] * 16)
        for _ in range(2):
            acc = call(builder, name.format("sdot"), acc.type, [acc, half, s])
    return call(builder, name.format("sdot"), acc.type, [acc, u, s])


def _emit_generic_dot(builder, acc, u, s):
    products = vector(I16, 64)  # 255 * -128 fits
    both = builder.mul(builder.zext(u, products), builder.sext(s, products))
    pairs = builder.bitcast(both, vector(I32, 32))
    sixteen = constant(I32, [16] * 32)
    low = builder.ashr(builder.shl(pairs, sixteen), sixteen)
    sums = builder.add(low, builder.ashr(pairs, sixteen))
    even, odd = (shuffle(builder, sums, sums, range(i, 32, 2)) for i in (0, 1))
    return builder.add(acc, builder.add(even, odd))


def emit_dot(builder: Any, acc: Any, u: Any, s: Any, seven: bool, features: frozenset[str]) -> Any:
    """Emit acc + the sums of 4 products for a processor; `seven`: u is below 128."""

    def vnni(width: int) -> Callable[..., Any]:
        def emit(acc, u, s):
            if not _BYTE_OPERANDS:
                u, s = (builder.bitcast(v, acc.type) for v in (u, s))
            return call(builder, f"llvm.x86.avx512.vpdpbusd.{width}", acc.type, [acc, u, s])

        return emit

    def maddubs(wide: bool) -> Callable[..., Any]:
        return lambda acc, u, s: _emit_maddubs(builder, acc, u, s, seven, wide)

    if "avx512vnni" in features:
        return vnni(512)(acc, u, s)
    if "avxvnni" in features:
        return _in_parts(builder, 2, vnni(256), acc, u, s)
    if "avx512bw" in features:
        return maddubs(wide=True)(acc, u, s)
    if "avx2" in features:
        return _in_parts(builder, 2, maddubs(wide=False), acc, u, s)
    if features >= {"aarch64", "i8mm"} or features >= {"aarch64", "dotprod"}:
        i8mm = "i8mm" in features
        return _in_parts(
            builder, 4, lambda a, u, s: _emit_arm(builder, a, u, s, seven, i8mm), acc, u, s
        )
    return _emit_generic_dot(builder, acc, u, s)


def make_dot(name: str, seven: bool, features: frozenset[str]) -> Any:
    """Return `dot_u8_i8` or `dot_u7_i8` for a processor."""
    return _make(
        name,
        i32x16,
        (i32x16, i8x64, i8x64),
        lambda b, acc, u, s: emit_dot(b, acc, u, s, seven, features),
    )


dot_u8_i8 = make_dot("dot_u8_i8", seven=False, features=isa.features())
dot_u7_i8 = make_dot("dot_u7_i8", seven=True, features=isa.features())
