"""CPU codec of one head vector of the KV cache: encode on append, decode to float32.

A cache row is the key or the value of one token and head, D numbers: D floats, or ``ceil(D /
block)`` blocks with the last one padded by copies of the last number, or D float8 codes
(`cpu/float8.py`).  Blocks have the bytes of ``nk.quantize(row, format, quantizer="reference")``.

`KINDS` numbers the formats.  Kernels take the number at run time and read the fields of a block
from `LAYOUTS`, which is derived from the formats' field tables: one compilation serves all formats.

NaN and infinity make their whole block NaN, as block formats cannot represent them.
"""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.float8 import decode_float8_row, encode_float8_row
from nbflow_kernels.cpu.simd_int8 import store_narrow
from nbflow_kernels.cpu.simd_memory import (
    load_first,
    load_first_bf16,
    load_first_f16,
    read_f32,
    read_i64,
    store_f16,
    store_first,
    write_f16,
    write_f32,
)
from nbflow_kernels.cpu.simd_narrow import (
    choose_odd,
    keep,
    load_fields1,
    load_fields2,
    load_fields4,
    load_pairs1,
    load_pairs2,
    load_pairs4,
    store_bf16,
    store_fields1,
    store_fields2,
    store_fields4,
    store_pairs1,
    store_pairs2,
    store_pairs4,
    write_u16,
)
from nbflow_kernels.cpu.simd_shuffle import swap_pairs
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats.affine_format import (
    ABSMAX,
    GGML_ABSMAX,
    GGML_EXTREME,
    MIDRISE,
    RANGE,
    U8_PAIR,
    AffineFormat,
)
from nbflow_kernels.formats.bit_fields import reciprocal
from nbflow_kernels.formats.float8 import FLOAT8
from nbflow_kernels.formats.registry import QuantFormat
from nbflow_kernels.kv_cache.codebooks import BLOCK_SIZE as CODEBOOK_BLOCK
from nbflow_kernels.kv_cache.codebooks import CODEBOOKS, SCALE_BYTES, Codebook
from nbflow_kernels.kv_cache.cpu_codebook import codebook_codes, levels_of

F32, F16, BF16 = 0, 1, 2
FIRST_BLOCK_KIND = 3

# Order of the low bits of 32 codes in a block.  MINIFLOAT: single float8 codes without a scale;
# LOW_BITS, ZERO and N_CODES are their mantissa bits, exponent bias and largest finite code.
SIGNED, BYTES, NIBBLES, HALVES, CRUMBS, PAIRS, MINIFLOAT = range(7)

# Columns of LAYOUTS.  Offsets are in bytes from the block; BASE_AT is -1 without a base.
BLOCK, BLOCK_BYTES, SCALE_AT, BASE_AT, MODE, LOW_AT, HIGH_BITS, HIGH_AT, LOW_BITS = range(9)
ZERO, N_CODES, RULE, DIVISOR = range(9, 13)
# Pair codes have a high plane of 2 bits shifted by LOW_BITS, a top plane of single bits, perhaps a
# second plane of 4 bits (-1: none), a radix, and its reciprocal for division.
TOP_AT, TOP_SHIFT, MIDDLE_AT, RADIX, RECIPROCAL = range(13, 18)
CODEBOOK = 18
"""Bits of a codebook that codes index (`codebooks.py`; DIVISOR is its unit), or 0."""
N_COLUMNS = 19
GAUSSIAN = 6
"""Scale rule of codebooks, after those of `formats/affine_format.py`."""


def _layout(format: AffineFormat) -> tuple[int, ...]:
    """Return the LAYOUTS row of a format; raise if the kernels do not support its bit planes."""
    code, fields = format.fields["code"], format.fields
    base_at = fields.at("base") if "base" in fields else -1
    head = (format.block_size, format.block_bytes, fields.at("scale"), base_at)
    planes = sorted(code.planes, key=lambda plane: plane.shift)
    low, rest = planes[0], planes[1:]
    known = all(p.stride == 1 and not p.first and not p.count and not p.bit for p in rest)
    rule = (format.zero if not code.signed else 0, format.n_codes, format.rule, format.divisor)
    if code.radix and known and low.bits == 4 and low.stride == 1:
        middle_at = rest.pop(0).at if rest[0].bits == 4 else -1
        high, top = rest
        if (high.bits, top.bits) == (2, 1):
            mode = (PAIRS, low.at, 0, high.at, high.shift)
            pairs = (top.at, top.shift, middle_at, code.radix, reciprocal(code.radix))
            return *head, *mode, *map(int, rule), *pairs, 0
    modes = {
        (8, 1): SIGNED if code.signed else BYTES,
        (4, 1): NIBBLES,
        (4, 16): HALVES,
        (2, 1): CRUMBS,
    }
    mode_of_low = modes.get((low.bits, low.stride))
    if mode_of_low is None or not known or len(rest) > 1 or code.radix:
        raise ValueError(f"{format.name}: the cache kernels do not support bit planes {planes}")
    high_bits, high_at = (rest[0].bits, rest[0].at) if rest else (0, 0)
    mode = (mode_of_low, low.at, high_bits, high_at, low.bits)
    return *head, *mode, *map(int, rule), 0, 0, -1, 0, 0, 0


def _codebook_layout(book: Codebook) -> tuple[int, ...]:
    """Return the LAYOUTS row of a codebook format."""
    head = (CODEBOOK_BLOCK, book.block_bytes, 0, -1)
    if book.bits == 4:
        mode = (NIBBLES, SCALE_BYTES, 0, 0, 4)
    else:
        high_at = SCALE_BYTES + CODEBOOK_BLOCK // 4
        mode = (CRUMBS, SCALE_BYTES, book.bits - 2, high_at if book.bits > 2 else 0, 2)
    return *head, *mode, 0, 1 << book.bits, GAUSSIAN, book.unit, 0, 0, -1, 0, 0, book.bits


def _can_hold_a_cache(format: QuantFormat) -> TypeGuard[AffineFormat]:
    """Return whether a format has one float16 scale per block of 32 or 64 numbers."""
    fits = isinstance(format, AffineFormat) and format.parameters != U8_PAIR
    return fits and format.block_size in (32, 64)


_BLOCK_LAYOUTS = {
    name: _layout(format) for name, format in FORMATS.built_in.items() if _can_hold_a_cache(format)
}
_FLOATS = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2)}

KINDS: dict[str, int] = {
    name: i for i, name in enumerate([*_FLOATS, *_BLOCK_LAYOUTS, *CODEBOOKS, *FLOAT8])
}
"""Format name to kernel number: floats first, then block formats, codebooks and float8."""
FIRST_CODEBOOK_KIND = FIRST_BLOCK_KIND + len(_BLOCK_LAYOUTS)
FIRST_FLOAT8_KIND = FIRST_CODEBOOK_KIND + len(CODEBOOKS)

LAYOUTS = np.zeros((len(KINDS), N_COLUMNS), np.int64)
"""One row per kind, with the columns above."""
LAYOUTS[:FIRST_BLOCK_KIND, :2] = list(_FLOATS.values())
LAYOUTS[FIRST_BLOCK_KIND:FIRST_CODEBOOK_KIND] = list(_BLOCK_LAYOUTS.values())
LAYOUTS[FIRST_CODEBOOK_KIND:FIRST_FLOAT8_KIND] = list(map(_codebook_layout, CODEBOOKS.values()))
LAYOUTS[FIRST_FLOAT8_KIND:, [BLOCK, BLOCK_BYTES, MODE]] = 1, 1, MINIFLOAT
LAYOUTS[FIRST_FLOAT8_KIND:, [LOW_BITS, ZERO, N_CODES]] = list(FLOAT8.values())

_CUTOFF = np.float32(1e-5)  # Inferflow's quantizers treat smaller scales as zero
_NAN_HALF = 0x7E00


# ---- decode ---------------------------------------------------------------------------------


@jit.kernel
def decode_row(kind, source, n, target, padded):
    """Decode one head vector to float32.

    `source` is the address of a row in format `kind`; `target` receives n numbers, then zeros up to
    `padded` >= n.
    """
    if kind < FIRST_BLOCK_KIND:
        copy_floats(kind, source, n, np.float32(1), target, padded)
        return
    if kind >= FIRST_FLOAT8_KIND:
        mantissa, bias = LAYOUTS[kind, LOW_BITS], LAYOUTS[kind, ZERO]
        decode_float8_row(mantissa, bias, source, n, target, padded)
        return
    _copy_blocks(kind, source, n, target, padded)
    for d in range(min((n + 15) // 16 * 16, padded), padded, 16):
        store_first(target + 4 * d, padded - d, simd.splat(0.0))


@jit.device_function
def decode_rows(kind, table, first, last, n, target, padded, stride):
    """Decode the rows at the addresses [first, last) of a table, `stride` bytes apart.

    Rows of full blocks with a loop of their own choose it once, and follow each other in it where
    they do in memory: to choose a decoder takes as long as to decode 64 numbers.
    """
    mode = _block_loop(kind)
    if mode < 0 or padded != n or n % 32 != 0:
        for j in range(first, last):
            decode_row(kind, read_i64(table + 8 * j), n, target + stride * j, padded)
        return
    row_bytes, j = n // 32 * LAYOUTS[kind, BLOCK_BYTES], first
    while j < last:
        row, end = read_i64(table + 8 * j), j + 1
        if stride == 4 * n:
            while end < last and read_i64(table + 8 * end) == row + (end - j) * row_bytes:
                end += 1
        _copy_full_blocks(kind, mode, row, (end - j) * (n // 32), target + stride * j)
        j = end


@jit.device_function
def copy_float_rows(kind, table, first, last, n, target, padded, stride):
    """Convert the float rows at the addresses [first, last) of a table, `stride` bytes apart."""
    for j in range(first, last):
        copy_floats(kind, read_i64(table + 8 * j), n, np.float32(1), target + stride * j, padded)


@jit.device_function
def copy_floats(kind, source, n, factor, target, padded):
    """Convert n floats of a float kind to float32 times `factor`; zeros up to `padded`."""
    times = simd.splat(factor)
    body = n - n % 16
    for d in range(0, body, 16):
        if kind == F32:
            x = simd.load_f32(source + 4 * d)
        elif kind == F16:
            x = simd.load_f16(source + 2 * d)
        else:
            x = simd.load_bf16(source + 2 * d)
        simd.store_f32(target + 4 * d, simd.mul(x, times))
    for d in range(body, padded, 16):
        if kind == F32:
            x = load_first(source + 4 * d, n - d, 0.0)
        elif kind == F16:
            x = load_first_f16(source + 2 * d, n - d)
        else:
            x = load_first_bf16(source + 2 * d, n - d)
        store_first(target + 4 * d, padded - d, simd.mul(x, times))


@jit.device_function
def _copy_blocks(kind, source, n, target, padded):
    mode, n_full = _block_loop(kind), np.int64(0)
    if mode >= 0:
        n_full = n // 32
        _copy_full_blocks(kind, mode, source, n_full, target)
    first = 32 * n_full
    if first < n:
        at = source + n_full * LAYOUTS[kind, BLOCK_BYTES]
        _copy_any(kind, at, n - first, target + 4 * first, padded - first)


@jit.device_function
def _block_loop(kind):
    """Return the mode of a format whose full blocks have a branch-free loop; -1 for the others.

    Formats of 8, 5 and 4 bits have; others would gain a third, less than the compile time is worth.
    """
    if not FIRST_BLOCK_KIND <= kind < FIRST_FLOAT8_KIND or LAYOUTS[kind, BLOCK] != 32:
        return np.int64(-1)
    mode, high_bits = LAYOUTS[kind, MODE], LAYOUTS[kind, HIGH_BITS]
    if mode == SIGNED or (mode in (HALVES, NIBBLES) and high_bits <= 1):
        return mode
    return np.int64(-1)


@jit.device_function
def _copy_full_blocks(kind, mode, source, n_blocks, target):
    if mode == SIGNED:
        _copy_signed(source, n_blocks, target)
    else:
        _copy_4_bits(kind, source, n_blocks, mode == HALVES, target)


@jit.device_function
def _copy_signed(source, n_blocks, target):
    """Decode full blocks of a scale and 32 int8."""
    at, to = source, target
    while at < source + 34 * n_blocks:
        scale = simd.splat_f16(at)
        for i in range(2):
            v = simd.mul(scale, simd.to_f32(simd.load_i8(at + 2 + 16 * i)))
            simd.store_f32(to + 64 * i, v)
        at, to = at + 34, to + 128


@jit.device_function
def _copy_4_bits(kind, source, n_blocks, halves, target):
    """Decode full blocks of a scale, an optional base, and 32 codes in 16 bytes.

    A fifth bit of the codes, if any, is in 4 bytes of their own.
    """
    block_bytes, low_at = LAYOUTS[kind, BLOCK_BYTES], LAYOUTS[kind, LOW_AT]
    codebook, has_high = LAYOUTS[kind, CODEBOOK], LAYOUTS[kind, HIGH_BITS] == 1
    scale_at, base_at = LAYOUTS[kind, SCALE_AT], LAYOUTS[kind, BASE_AT]
    high_at, zero = LAYOUTS[kind, HIGH_AT], simd.splat_i32(LAYOUTS[kind, ZERO])
    for b in range(n_blocks):
        at, to = source + block_bytes * b, target + 128 * b
        scale = simd.splat_f16(at + scale_at)
        base = simd.splat_f16(at + base_at) if base_at >= 0 else simd.splat(-0.0)
        if halves:
            byte = simd.load_u8(at + low_at)
            first, second = simd.and_(byte, simd.splat_i32(15)), simd.shr(byte, simd.splat_i32(4))
        else:
            first, second = load_fields4(at + low_at), load_fields4(at + low_at + 8)
        if has_high:
            four = simd.splat_i32(4)
            first = simd.or_(first, simd.shl(load_fields1(at + high_at), four))
            second = simd.or_(second, simd.shl(load_fields1(at + high_at + 2), four))
        if codebook != 0:
            first, second = levels_of(codebook, first), levels_of(codebook, second)
        v = simd.fma(scale, simd.to_f32(simd.sub(first, zero)), base)
        w = simd.fma(scale, simd.to_f32(simd.sub(second, zero)), base)
        simd.store_f32(to, v)
        simd.store_f32(to + 64, w)


@jit.device_function
def _copy_any(kind, source, n, target, padded):
    block, block_bytes = LAYOUTS[kind, BLOCK], LAYOUTS[kind, BLOCK_BYTES]
    scale_at, base_at = LAYOUTS[kind, SCALE_AT], LAYOUTS[kind, BASE_AT]
    zero = simd.splat_i32(LAYOUTS[kind, ZERO])
    at = source
    for first in range(0, n, block):
        scale = simd.splat_f16(at + scale_at)
        base = simd.splat_f16(at + base_at) if base_at >= 0 else simd.splat(-0.0)
        for d in range(first, min(first + block, n), 16):
            code = _load_codes(kind, at, d - first)
            # one rounding: float16 times code has at most 19 bits
            v = simd.fma(scale, simd.to_f32(simd.sub(code, zero)), base)
            if d + 16 > n:
                v = keep(v, n - d)
            if d + 16 <= padded:
                simd.store_f32(target + 4 * d, v)
            else:
                store_first(target + 4 * d, padded - d, v)
        at += block_bytes


@jit.device_function
def _load_codes(kind, at, i):
    """Return codes i .. i + 15 of the block at `at`, or the levels that they index."""
    mode, low_bits = LAYOUTS[kind, MODE], LAYOUTS[kind, LOW_BITS]
    high_bits, high = LAYOUTS[kind, HIGH_BITS], at + LAYOUTS[kind, HIGH_AT]
    low = at + LAYOUTS[kind, LOW_AT]
    if mode == SIGNED:
        return simd.load_i8(low + i)
    if mode == BYTES:
        return simd.load_u8(low + i)
    if mode == PAIRS:
        return _load_pair_codes(kind, at, i)
    if mode == HALVES:
        byte = simd.load_u8(low)
        code = simd.and_(simd.shr(byte, simd.splat_i32(i >> 2)), simd.splat_i32(15))
    elif mode == NIBBLES:
        code = load_fields4(low + (i >> 1))
    else:
        code = load_fields2(low + (i >> 2))
    if high_bits == 1:
        code = simd.or_(code, simd.shl(load_fields1(high + (i >> 3)), simd.splat_i32(low_bits)))
    elif high_bits == 2:
        code = simd.or_(code, simd.shl(load_fields2(high + (i >> 2)), simd.splat_i32(low_bits)))
    if LAYOUTS[kind, CODEBOOK] != 0:
        code = levels_of(LAYOUTS[kind, CODEBOOK], code)
    return code


@jit.device_function
def _load_pair_codes(kind, at, i):
    """Return 16 codes from pair codes x + radix * y."""
    c = load_pairs4(at + LAYOUTS[kind, LOW_AT] + (i >> 2))
    if LAYOUTS[kind, MIDDLE_AT] >= 0:
        middle = load_pairs4(at + LAYOUTS[kind, MIDDLE_AT] + (i >> 2))
        c = simd.or_(c, simd.shl(middle, simd.splat_i32(4)))
    high = load_pairs2(at + LAYOUTS[kind, HIGH_AT] + (i >> 3))
    c = simd.or_(c, simd.shl(high, simd.splat_i32(LAYOUTS[kind, LOW_BITS])))
    top = load_pairs1(at + LAYOUTS[kind, TOP_AT] + (i >> 4))
    c = simd.or_(c, simd.shl(top, simd.splat_i32(LAYOUTS[kind, TOP_SHIFT])))
    y = simd.mul(c, simd.splat_i32(LAYOUTS[kind, RECIPROCAL]))
    y = simd.shr(y, simd.splat_i32(16))  # c // radix
    return choose_odd(simd.sub(c, simd.mul(y, simd.splat_i32(LAYOUTS[kind, RADIX]))), y)


# ---- encode ---------------------------------------------------------------------------------


@jit.kernel(strict=True)
def encode_row(kind, source, n, target):
    """Encode n float32 at `source` as one row of format `kind` at `target`."""
    if kind < FIRST_BLOCK_KIND:
        write_floats(kind, source, n, target)
        return
    if kind >= FIRST_FLOAT8_KIND:
        mantissa, bias = LAYOUTS[kind, LOW_BITS], LAYOUTS[kind, ZERO]
        largest = LAYOUTS[kind, N_CODES]
        encode_float8_row(mantissa, bias, largest, source, n, np.float32(1), target)
        return
    block, block_bytes = LAYOUTS[kind, BLOCK], LAYOUTS[kind, BLOCK_BYTES]
    at = target
    for first in range(0, n, block):
        _write_block(kind, source + 4 * first, n - first, at)
        at += block_bytes


@jit.device_function(strict=True)
def write_floats(kind, source, n, target):
    """Encode a row in a float format; compiles faster than `encode_row`."""
    d = 0
    while d + 16 <= n:
        v = simd.load_f32(source + 4 * d)
        if kind == F32:
            simd.store_f32(target + 4 * d, v)
        elif kind == F16:
            store_f16(target + 2 * d, v)
        else:
            store_bf16(target + 2 * d, v)
        d += 16
    while d < n:
        x = read_f32(source + 4 * d)
        if kind == F32:
            write_f32(target + 4 * d, x)
        elif kind == F16:
            write_f16(target + 2 * d, x)
        else:
            write_u16(target + 2 * d, _bf16_bits(x))
        d += 1


@jit.device_function(strict=True)
def _bf16_bits(x):
    """Return the bits of x rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = np.int64(np.float32(x).view(np.uint32))
    if x != x:
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@jit.device_function(strict=True)
def _write_block(kind, x, count, at):
    """Encode up to a block of `count` numbers as the block at `at`."""
    block, rule = LAYOUTS[kind, BLOCK], LAYOUTS[kind, RULE]
    scale_at, base_at = LAYOUTS[kind, SCALE_AT], LAYOUTS[kind, BASE_AT]
    count = min(count, block)
    last = read_f32(x + 4 * (count - 1))
    if rule == GAUSSIAN:
        _write_codebook_block(kind, x, count, last, at)
        return
    base, scale, inverse, finite = _parameters(
        rule, x, count, block, last, np.float32(LAYOUTS[kind, DIVISOR])
    )
    shown = base
    if rule == MIDRISE:
        shown = base + scale / np.float32(2)
    half = np.float32(0.5)
    if rule == MIDRISE:
        half = np.float32(1e-4)
    elif rule == GGML_EXTREME:
        half = np.float32(LAYOUTS[kind, ZERO]) + half
    if finite:
        write_u16(at + scale_at, simd.float_to_half(scale))
        if base_at >= 0:
            write_u16(at + base_at, simd.float_to_half(shown))
    else:
        inverse = base = np.float32(0)
        write_u16(at + scale_at, _NAN_HALF)
        if base_at >= 0:
            write_u16(at + base_at, _NAN_HALF)
    top = np.float32(LAYOUTS[kind, N_CODES] - 1)
    for i in range(0, block, 32):
        v = load_first(x + 4 * i, count - i, last)
        w = load_first(x + 4 * (i + 16), count - i - 16, last)
        if rule in (ABSMAX, GGML_ABSMAX):
            a = _signed_codes(v, inverse, rule == GGML_ABSMAX)
            b = _signed_codes(w, inverse, rule == GGML_ABSMAX)
        else:
            a, b = _codes(v, base, inverse, half, top), _codes(w, base, inverse, half, top)
        _store_codes(kind, at, i, a, b)


@jit.device_function(strict=True)
def _write_codebook_block(kind, x, count, last, at):
    """Encode up to 32 numbers as a block of codes of a codebook."""
    bits, unit = LAYOUTS[kind, CODEBOOK], LAYOUTS[kind, DIVISOR]
    scale, finite, a, b = codebook_codes(bits, unit, x, count, last)
    write_u16(at, simd.float_to_half(scale) if finite else _NAN_HALF)
    _store_codes(kind, at, 0, a, b)


@jit.device_function(strict=True)
def _parameters(rule, x, count, block, last, divisor):
    """Return base, scale, 1 / scale (0 for a zero scale), and whether all numbers are finite."""
    low = high = simd.splat(last)
    bad = simd.splat(0.0)
    for i in range(0, block, 16):
        v = load_first(x + 4 * i, count - i, last)
        low, high = simd.minimum(low, v), simd.maximum(high, v)
        bad = simd.add(bad, simd.sub(v, v))  # NaN if v is NaN or infinite
    largest = simd.max(high)
    smallest = -simd.max(simd.mul(simd.splat(-1.0), low))
    magnitude = max(abs(largest), abs(smallest))
    finite = simd.sum(bad) == 0
    base = np.float32(0)
    if rule == GGML_EXTREME:
        extreme = _first_extreme(x, count, magnitude)
        scale = extreme / -divisor
    elif rule in (ABSMAX, GGML_ABSMAX):
        scale = magnitude / divisor
    else:
        base = smallest
        scale = (largest - smallest) / divisor
    cut = scale == 0
    if rule in (RANGE, MIDRISE, ABSMAX):
        cut = scale < _CUTOFF
    inverse = np.float32(0)
    if not cut:
        inverse = np.float32(1) / scale
    return base, scale, inverse, finite


@jit.device_function(strict=True)
def _first_extreme(x, count, magnitude):
    """Return the first number of the largest magnitude."""
    for i in range(count):
        value = read_f32(x + 4 * i)
        if abs(value) == magnitude:
            return value
    return np.float32(0)


@jit.device_function(strict=True)
def _codes(x, base, inverse, half, top):
    """Return ``floor((x - base) * inverse + half)`` clamped to 0 .. top; NaN gives 0."""
    steps = simd.mul(simd.sub(x, simd.splat(base)), simd.splat(inverse))
    steps = simd.add(steps, simd.splat(half))
    steps = simd.minimum(simd.maximum(steps, simd.splat(0.0)), simd.splat(top))
    return simd.to_i32(steps)


@jit.device_function(strict=True)
def _signed_codes(x, inverse, exact):
    """Return ``x * inverse`` rounded half away from zero to -128 .. 127; NaN gives 0."""
    steps = simd.mul(x, simd.splat(inverse))
    zero = simd.splat(0.0)
    positive = _half_up(simd.minimum(simd.maximum(steps, zero), simd.splat(127.0)), exact)
    steps = simd.sub(zero, steps)
    negative = _half_up(simd.minimum(simd.maximum(steps, zero), simd.splat(128.0)), exact)
    return simd.sub(positive, negative)


@jit.device_function(strict=True)
def _half_up(x, exact):
    """Return x >= 0 rounded half up; without `exact`, the addition of 0.5 may round."""
    if not exact:
        return simd.to_i32(simd.add(x, simd.splat(0.5)))
    whole = simd.to_i32(x)
    twice = simd.sub(x, simd.to_f32(whole))
    return simd.add(whole, simd.to_i32(simd.add(twice, twice)))  # 1 from 0.5 on, exactly


@jit.device_function(strict=True)
def _store_codes(kind, at, i, a, b):
    """Write codes i .. i + 31 of the block at `at`."""
    mode, low_bits = LAYOUTS[kind, MODE], LAYOUTS[kind, LOW_BITS]
    high_bits, high = LAYOUTS[kind, HIGH_BITS], at + LAYOUTS[kind, HIGH_AT]
    low = at + LAYOUTS[kind, LOW_AT]
    if mode in (SIGNED, BYTES):
        store_narrow(low + i, a)
        store_narrow(low + i + 16, b)
        return
    if mode == PAIRS:
        _store_pair_codes(kind, at, i, a)
        _store_pair_codes(kind, at, i + 16, b)
        return
    mask = simd.splat_i32((1 << low_bits) - 1)
    low_a, low_b = simd.and_(a, mask), simd.and_(b, mask)
    if mode == HALVES:
        store_narrow(low, simd.or_(low_a, simd.shl(low_b, simd.splat_i32(4))))
    elif mode == NIBBLES:
        store_fields4(low + (i >> 1), low_a)
        store_fields4(low + (i >> 1) + 8, low_b)
    else:
        store_fields2(low + (i >> 2), low_a)
        store_fields2(low + (i >> 2) + 4, low_b)
    shift = simd.splat_i32(low_bits)
    if high_bits == 1:
        store_fields1(high + (i >> 3), simd.shr(a, shift))
        store_fields1(high + (i >> 3) + 2, simd.shr(b, shift))
    elif high_bits == 2:
        store_fields2(high + (i >> 2), simd.shr(a, shift))
        store_fields2(high + (i >> 2) + 4, simd.shr(b, shift))


@jit.device_function(strict=True)
def _store_pair_codes(kind, at, i, code):
    """Write 16 codes as 8 pair codes x + radix * y."""
    # x in even lanes, y in odd lanes; only even lanes of c are used
    c = simd.add(code, simd.mul(swap_pairs(code), simd.splat_i32(LAYOUTS[kind, RADIX])))
    low, three = simd.splat_i32(15), simd.splat_i32(3)
    store_pairs4(at + LAYOUTS[kind, LOW_AT] + (i >> 2), simd.and_(c, low))
    if LAYOUTS[kind, MIDDLE_AT] >= 0:
        middle = simd.and_(simd.shr(c, simd.splat_i32(4)), low)
        store_pairs4(at + LAYOUTS[kind, MIDDLE_AT] + (i >> 2), middle)
    high = simd.and_(simd.shr(c, simd.splat_i32(LAYOUTS[kind, LOW_BITS])), three)
    store_pairs2(at + LAYOUTS[kind, HIGH_AT] + (i >> 3), high)
    top = simd.and_(simd.shr(c, simd.splat_i32(LAYOUTS[kind, TOP_SHIFT])), simd.splat_i32(1))
    store_pairs1(at + LAYOUTS[kind, TOP_AT] + (i >> 4), top)
