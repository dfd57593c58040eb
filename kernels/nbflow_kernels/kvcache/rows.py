"""One head vector of the cache: decoded to float32, and encoded when it is written.

A cache row is the key or the value of one token and one head: D numbers.  In a float format it is D
floats; in a block format it is ``ceil(D / block)`` blocks, the last one padded with copies of the
last number: the bytes of ``nk.quantize(row, format, encoder="plain")``.

`KINDS` numbers the formats.  The kernels take a format as such a number at run time, so that they
are compiled once for all of them.  Where a block's fields lie is in `LAYOUTS`; the tables are
those of the format's file in `nbflow_kernels.formats`, and `tests/kernels/test_kvcache_rows.py`
compares every byte.

A number that is NaN or infinite makes its block all NaN: a block format has no place for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import simd
from nbflow_kernels._jit import njit, part, strict_njit, strict_part
from nbflow_kernels.kvcache.vectors import (
    choose_odd,
    keep,
    load_fields1,
    load_fields2,
    load_fields4,
    load_pairs1,
    load_pairs2,
    load_pairs4,
    load_part,
    read_bf16,
    store_bf16,
    store_bytes,
    store_fields1,
    store_fields2,
    store_fields4,
    store_pairs1,
    store_pairs2,
    store_pairs4,
    store_part,
    swap_pairs,
    write_u16,
)
from nbflow_kernels.lanes import read_f16, read_f32, store_f16, write_f16, write_f32

F32, F16, BF16 = 0, 1, 2
FIRST_BLOCK_KIND = 3

# How the low bits of 32 codes lie in the block.
SIGNED, BYTES, NIBBLES, HALVES, CRUMBS, PAIRS = range(6)
# How base and scale are found; see `nbflow_kernels.formats`.
FAMILY, MIDRISE, SYMMETRIC, EXTREME, RANGE, ABSMAX = range(6)

# Columns of LAYOUTS.  Offsets are in bytes from the block; BASE_AT is -1 where there is no base.
BLOCK, BLOCK_BYTES, SCALE_AT, BASE_AT, MODE, LOW_AT, HIGH_BITS, HIGH_AT, LOW_BITS = range(9)
ZERO, N_CODES, ENCODER, DIVISOR = range(9, 13)

_BLOCK_LAYOUTS = {
    #              size bytes  s   b   low bits        high      low zero codes encoder  divisor
    "q8_b32t1": (32, 36, 2, 0, BYTES, 4, 0, 0, 8, 0, 256, FAMILY, 255),
    "q8_b32t2": (32, 34, 0, -1, SIGNED, 2, 0, 0, 8, 0, 256, SYMMETRIC, 127),
    "q6_b64t1": (64, 52, 2, 0, NIBBLES, 20, 2, 4, 4, 0, 64, FAMILY, 62),
    "q5_b32t1": (32, 24, 0, 2, HALVES, 8, 1, 4, 4, 0, 32, FAMILY, 31),
    "q5_b64t1": (64, 44, 2, 0, NIBBLES, 12, 1, 4, 4, 0, 32, FAMILY, 30),
    "q4_b32t1a": (32, 20, 2, 0, NIBBLES, 4, 0, 0, 4, 0, 16, FAMILY, 15),
    "q4_b32t1b": (32, 20, 2, 0, NIBBLES, 4, 0, 0, 4, 0, 16, MIDRISE, 16),
    "q4_b64t1": (64, 36, 2, 0, NIBBLES, 4, 0, 0, 4, 0, 16, FAMILY, 14),
    "q3h_b64t1": (64, 32, 2, 0, PAIRS, 4, 0, 0, 0, 0, 11, FAMILY, 10),
    "q3_b32t1a": (32, 16, 2, 0, CRUMBS, 8, 1, 4, 2, 0, 8, FAMILY, 7),
    "q3_b32t1b": (32, 16, 2, 0, CRUMBS, 8, 1, 4, 2, 0, 8, MIDRISE, 8),
    "q2_b32t1a": (32, 12, 2, 0, CRUMBS, 4, 0, 0, 2, 0, 4, FAMILY, 3),
    "q2_b32t1b": (32, 12, 2, 0, CRUMBS, 4, 0, 0, 2, 0, 4, MIDRISE, 4),
    "q8_0": (32, 34, 0, -1, SIGNED, 2, 0, 0, 8, 0, 256, ABSMAX, 127),
    "q5_1": (32, 24, 0, 2, HALVES, 8, 1, 4, 4, 0, 32, RANGE, 31),
    "q5_0": (32, 22, 0, -1, HALVES, 6, 1, 2, 4, 16, 32, EXTREME, 16),
    "q4_1": (32, 20, 0, 2, HALVES, 4, 0, 0, 4, 0, 16, RANGE, 15),
    "q4_0": (32, 18, 0, -1, HALVES, 2, 0, 0, 4, 8, 16, EXTREME, 8),
}
_FLOATS = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2)}

KINDS: dict[str, int] = {name: i for i, name in enumerate([*_FLOATS, *_BLOCK_LAYOUTS])}
"""Format name to the number the kernels know it by: floats first, then the block formats."""

LAYOUTS = np.array(
    [sizes + (0,) * 11 for sizes in _FLOATS.values()] + list(_BLOCK_LAYOUTS.values()), np.int64
)
"""A row for each kind; see the columns above."""

_CUTOFF = np.float32(1e-5)  # Inferflow's encoders: a smaller scale counts as zero
_NAN_HALF = 0x7E00


# ---- decode ---------------------------------------------------------------------------------


@njit
def copy_row(kind: Any, source: Any, n: Any, factor: Any, target: Any, padded: Any) -> None:
    """Write one head vector as float32.

    `source` is the address of the row in format `kind`, `target` that of `padded` floats: n
    decoded numbers times `factor`, then zeros.  `padded` is at least `n`, any number.
    """
    if kind < FIRST_BLOCK_KIND:
        _copy_floats(kind, source, n, factor, target)
        d = n
    else:
        _copy_blocks(kind, source, n, factor, target, padded)
        d = min((n + 15) // 16 * 16, padded)
    while d < padded:
        count = padded - d
        if count >= 16:
            simd.store_f32(target + 4 * d, simd.splat(0.0))
        else:
            store_part(target + 4 * d, count, simd.splat(0.0))
        d += 16


@part
def _copy_floats(kind: Any, source: Any, n: Any, factor: Any, target: Any) -> None:
    f = simd.splat(factor)
    d = 0
    while d + 16 <= n:
        if kind == F32:
            v = simd.load_f32(source + 4 * d)
        elif kind == F16:
            v = simd.load_f16(source + 2 * d)
        else:
            v = simd.load_bf16(source + 2 * d)
        simd.store_f32(target + 4 * d, simd.mul(v, f))
        d += 16
    scalar = np.float32(factor)
    while d < n:
        if kind == F32:
            x = read_f32(source + 4 * d)
        elif kind == F16:
            x = read_f16(source + 2 * d)
        else:
            x = read_bf16(source + 2 * d)
        write_f32(target + 4 * d, x * scalar)
        d += 1


@part
def _copy_blocks(kind: Any, source: Any, n: Any, factor: Any, target: Any, padded: Any) -> None:
    mode, high_bits = LAYOUTS[kind, MODE], LAYOUTS[kind, HIGH_BITS]
    n_full = n // LAYOUTS[kind, BLOCK]
    # The 8-bit and 4-bit formats have loops of their own, without a choice in them.  More of them
    # gain less (a third) than they cost to compile.
    if mode == SIGNED:
        _copy_signed(source, n_full, factor, target)
    elif mode == HALVES and high_bits == 0:
        _copy_4_bits(kind, source, n_full, True, factor, target)
    elif mode == NIBBLES and high_bits == 0 and LAYOUTS[kind, BLOCK] == 32:
        _copy_4_bits(kind, source, n_full, False, factor, target)
    else:
        n_full = 0
    first = n_full * LAYOUTS[kind, BLOCK]
    if first < n:
        at = source + n_full * LAYOUTS[kind, BLOCK_BYTES]
        _copy_any(kind, at, n - first, factor, target + 4 * first, padded - first)


@part
def _copy_signed(source: Any, n_blocks: Any, factor: Any, target: Any) -> None:
    """Decode whole blocks of a scale and 32 int8."""
    f = simd.splat(factor)
    for b in range(n_blocks):
        at, to = source + 34 * b, target + 128 * b
        scale = simd.splat(read_f16(at))
        for i in range(2):
            v = simd.mul(scale, simd.to_f32(simd.load_i8(at + 2 + 16 * i)))
            simd.store_f32(to + 64 * i, simd.mul(v, f))


@part
def _copy_4_bits(
    kind: Any, source: Any, n_blocks: Any, halves: Any, factor: Any, target: Any
) -> None:
    """Decode whole blocks of a scale, perhaps a base, and 32 codes in 16 bytes."""
    block_bytes, low_at = LAYOUTS[kind, BLOCK_BYTES], LAYOUTS[kind, LOW_AT]
    scale_at, base_at = LAYOUTS[kind, SCALE_AT], LAYOUTS[kind, BASE_AT]
    f, zero = simd.splat(factor), simd.splat_i32(LAYOUTS[kind, ZERO])
    for b in range(n_blocks):
        at, to = source + block_bytes * b, target + 128 * b
        scale = simd.splat(read_f16(at + scale_at))
        base = simd.splat(read_f16(at + base_at) if base_at >= 0 else np.float32(-0.0))
        if halves:
            byte = simd.load_u8(at + low_at)
            first, second = simd.and_(byte, simd.splat_i32(15)), simd.shr(byte, simd.splat_i32(4))
        else:
            first, second = load_fields4(at + low_at), load_fields4(at + low_at + 8)
        v = simd.fma(scale, simd.to_f32(simd.sub(first, zero)), base)
        w = simd.fma(scale, simd.to_f32(simd.sub(second, zero)), base)
        simd.store_f32(to, simd.mul(v, f))
        simd.store_f32(to + 64, simd.mul(w, f))


@part
def _copy_any(kind: Any, source: Any, n: Any, factor: Any, target: Any, padded: Any) -> None:
    block, block_bytes = LAYOUTS[kind, BLOCK], LAYOUTS[kind, BLOCK_BYTES]
    scale_at, base_at = LAYOUTS[kind, SCALE_AT], LAYOUTS[kind, BASE_AT]
    mode, low_at, low_bits = LAYOUTS[kind, MODE], LAYOUTS[kind, LOW_AT], LAYOUTS[kind, LOW_BITS]
    high_bits, high_at = LAYOUTS[kind, HIGH_BITS], LAYOUTS[kind, HIGH_AT]
    zero, f = simd.splat_i32(LAYOUTS[kind, ZERO]), simd.splat(factor)
    at = source
    for first in range(0, n, block):
        scale = simd.splat(read_f16(at + scale_at))
        base = simd.splat(read_f16(at + base_at) if base_at >= 0 else np.float32(-0.0))
        for d in range(first, min(first + block, n), 16):
            code = _load_codes(mode, at + low_at, at + high_at, d - first, high_bits, low_bits)
            # one rounding: the product of a float16 and a code has at most 19 bits
            v = simd.fma(scale, simd.to_f32(simd.sub(code, zero)), base)
            v = simd.mul(v, f)
            if d + 16 > n:
                v = keep(v, n - d)
            if d + 16 <= padded:
                simd.store_f32(target + 4 * d, v)
            else:
                store_part(target + 4 * d, padded - d, v)
        at += block_bytes


@part
def _load_codes(mode: Any, low: Any, high: Any, i: Any, high_bits: Any, low_bits: Any) -> Any:
    """Return codes i .. i + 15 of a block; `low` and `high` are the addresses of its planes."""
    if mode == SIGNED:
        return simd.load_i8(low + i)
    if mode == BYTES:
        return simd.load_u8(low + i)
    if mode == PAIRS:
        return _load_pair_codes(low, i)
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
    return code


@part
def _load_pair_codes(at: Any, i: Any) -> Any:
    """Return 16 codes of q3h, whose planes of pair codes x + 11 * y start at `at`."""
    c = simd.or_(
        load_pairs4(at + 12 + (i >> 2)), simd.shl(load_pairs2(at + 4 + (i >> 3)), simd.splat_i32(4))
    )
    c = simd.or_(c, simd.shl(load_pairs1(at + (i >> 4)), simd.splat_i32(6)))
    y = simd.shr(simd.mul(c, simd.splat_i32(373)), simd.splat_i32(12))  # c // 11 for c <= 120
    return choose_odd(simd.sub(c, simd.mul(y, simd.splat_i32(11))), y)


# ---- encode ---------------------------------------------------------------------------------


@strict_njit
def write_row(kind: Any, source: Any, n: Any, target: Any) -> None:
    """Encode n float32 at the address `source` as one row of format `kind` at `target`."""
    if kind < FIRST_BLOCK_KIND:
        write_floats(kind, source, n, target)
        return
    block, block_bytes = LAYOUTS[kind, BLOCK], LAYOUTS[kind, BLOCK_BYTES]
    at = target
    for first in range(0, n, block):
        _write_block(kind, source + 4 * first, n - first, at)
        at += block_bytes


@strict_part
def write_floats(kind: Any, source: Any, n: Any, target: Any) -> None:
    """Do as `write_row` for the float kinds alone: little to compile."""
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


@strict_part
def _bf16_bits(x: Any) -> Any:
    """Return the bits of the bfloat16 nearest to x, halves to even; NaN stays NaN."""
    bits = np.int64(np.float32(x).view(np.uint32))
    if x != x:
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@strict_part
def _write_block(kind: Any, x: Any, count: Any, at: Any) -> None:
    """Encode `count` numbers (at most a block of them counts) as the block at `at`."""
    block, encoder = LAYOUTS[kind, BLOCK], LAYOUTS[kind, ENCODER]
    scale_at, base_at = LAYOUTS[kind, SCALE_AT], LAYOUTS[kind, BASE_AT]
    count = min(count, block)
    last = read_f32(x + 4 * (count - 1))
    base, scale, inverse, finite = _parameters(
        encoder, x, count, block, last, np.float32(LAYOUTS[kind, DIVISOR])
    )
    shown = base
    if encoder == MIDRISE:
        shown = base + scale / np.float32(2)
    half = np.float32(0.5)
    if encoder == MIDRISE:
        half = np.float32(1e-4)
    elif encoder == EXTREME:
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
        v = load_part(x + 4 * i, count - i, last)
        w = load_part(x + 4 * (i + 16), count - i - 16, last)
        if encoder in (SYMMETRIC, ABSMAX):
            a = _signed_codes(v, inverse, encoder == ABSMAX)
            b = _signed_codes(w, inverse, encoder == ABSMAX)
        else:
            a, b = _codes(v, base, inverse, half, top), _codes(w, base, inverse, half, top)
        _store_codes(kind, at, i, a, b)


@strict_part
def _parameters(encoder: Any, x: Any, count: Any, block: Any, last: Any, divisor: Any) -> Any:
    """Return base, scale, 1 / scale (0 for a scale that counts as 0) and whether all is finite."""
    low = high = simd.splat(last)
    bad = simd.splat(0.0)
    for i in range(0, block, 16):
        v = load_part(x + 4 * i, count - i, last)
        low, high = simd.minimum(low, v), simd.maximum(high, v)
        bad = simd.add(bad, simd.sub(v, v))  # 0, or NaN from a NaN or an infinity
    largest = simd.max(high)
    smallest = -simd.max(simd.mul(simd.splat(-1.0), low))
    magnitude = max(abs(largest), abs(smallest))
    finite = simd.sum(bad) == 0
    base = np.float32(0)
    if encoder == EXTREME:
        extreme = _first_extreme(x, count, magnitude)
        scale = extreme / -divisor
    elif encoder in (SYMMETRIC, ABSMAX):
        scale = magnitude / divisor
    else:
        base = smallest
        scale = (largest - smallest) / divisor
    cut = scale == 0
    if encoder in (FAMILY, MIDRISE, SYMMETRIC):
        cut = scale < _CUTOFF
    inverse = np.float32(0)
    if not cut:
        inverse = np.float32(1) / scale
    return base, scale, inverse, finite


@strict_part
def _first_extreme(x: Any, count: Any, magnitude: Any) -> Any:
    """Return the first of the numbers whose magnitude is the largest."""
    for i in range(count):
        value = read_f32(x + 4 * i)
        if abs(value) == magnitude:
            return value
    return np.float32(0)


@strict_part
def _codes(x: Any, base: Any, inverse: Any, half: Any, top: Any) -> Any:
    """Return ``floor((x - base) * inverse + half)`` within 0 .. top; NaN gives 0."""
    steps = simd.mul(simd.sub(x, simd.splat(base)), simd.splat(inverse))
    steps = simd.add(steps, simd.splat(half))
    steps = simd.minimum(simd.maximum(steps, simd.splat(0.0)), simd.splat(top))
    return simd.to_i32(steps)


@strict_part
def _signed_codes(x: Any, inverse: Any, exact: Any) -> Any:
    """Return ``x * inverse`` as -128 .. 127, halves away from zero; NaN gives 0."""
    steps = simd.mul(x, simd.splat(inverse))
    zero = simd.splat(0.0)
    positive = _half_up(simd.minimum(simd.maximum(steps, zero), simd.splat(127.0)), exact)
    steps = simd.sub(zero, steps)
    negative = _half_up(simd.minimum(simd.maximum(steps, zero), simd.splat(128.0)), exact)
    return simd.sub(positive, negative)


@strict_part
def _half_up(x: Any, exact: Any) -> Any:
    """Return x >= 0 rounded, halves up; not `exact`: after adding 0.5, which rounds itself."""
    if not exact:
        return simd.to_i32(simd.add(x, simd.splat(0.5)))
    whole = simd.to_i32(x)
    twice = simd.sub(x, simd.to_f32(whole))
    return simd.add(whole, simd.to_i32(simd.add(twice, twice)))  # 1 from 0.5 on, exactly


@strict_part
def _store_codes(kind: Any, at: Any, i: Any, a: Any, b: Any) -> None:
    """Write codes i .. i + 31 of the block at `at`."""
    mode, low_bits = LAYOUTS[kind, MODE], LAYOUTS[kind, LOW_BITS]
    high_bits, high = LAYOUTS[kind, HIGH_BITS], at + LAYOUTS[kind, HIGH_AT]
    low = at + LAYOUTS[kind, LOW_AT]
    if mode in (SIGNED, BYTES):
        store_bytes(low + i, a)
        store_bytes(low + i + 16, b)
        return
    if mode == PAIRS:
        _store_pair_codes(low, i, a)
        _store_pair_codes(low, i + 16, b)
        return
    mask = simd.splat_i32((1 << low_bits) - 1)
    low_a, low_b = simd.and_(a, mask), simd.and_(b, mask)
    if mode == HALVES:
        store_bytes(low, simd.or_(low_a, simd.shl(low_b, simd.splat_i32(4))))
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


@strict_part
def _store_pair_codes(at: Any, i: Any, code: Any) -> None:
    """Write 16 codes of q3h as 8 pair codes x + 11 * y."""
    # the even lanes hold x, the odd ones y; only the even lanes of c count
    c = simd.add(code, simd.mul(swap_pairs(code), simd.splat_i32(11)))
    store_pairs4(at + 12 + (i >> 2), simd.and_(c, simd.splat_i32(15)))
    store_pairs2(at + 4 + (i >> 3), simd.and_(simd.shr(c, simd.splat_i32(4)), simd.splat_i32(3)))
    store_pairs1(at + (i >> 4), simd.and_(simd.shr(c, simd.splat_i32(6)), simd.splat_i32(1)))
