"""Rows of a recurrent state on the CPU: 16 or 32 numbers between a format and float32.

A row is the last axis of a state, n numbers.  `narrow` are 64 bytes of scratch memory.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd, simd_compare
from nbflow_kernels.cpu.simd_int8 import store_narrow
from nbflow_kernels.cpu.simd_memory import (
    load_first,
    load_first_bf16,
    load_first_f16,
    read_f16,
    read_f32,
    read_u8,
    read_u16,
    store_f16,
    store_first,
    write_f32,
)
from nbflow_kernels.cpu.simd_narrow import (
    from_half_bits,
    half_bits,
    keep,
    store_bf16,
    write_u8,
    write_u16,
)
from nbflow_kernels.state_format import BF16, BLOCK, F16, F32, Q8_0

_NAN_HALF = 0x7E00


@jit.device_function(inline="llvm")
def row_bytes(kind, n):
    """Return the bytes of a row of n numbers."""
    if kind == F32:
        return 4 * n
    return n + 2 * ((n + BLOCK - 1) // BLOCK) if kind == Q8_0 else 2 * n


@jit.device_function(inline="llvm")
def block_offset(i):
    """Return the bytes before number i, a multiple of 32, of a row of q8_0."""
    return i + 2 * (i // BLOCK)


@jit.device_function(inline="llvm")
def load_block(at):
    """Load the 32 numbers of a whole q8_0 block."""
    scale = simd.splat(read_f16(at))
    first, second = simd.load_i8(at + 2), simd.load_i8(at + 18)
    return simd.mul(scale, simd.to_f32(first)), simd.mul(scale, simd.to_f32(second))


@jit.device_function(inline="llvm")
def load(row, kind, i, n, narrow):
    """Load numbers i to i + 15 of a row of n, i a multiple of 16; those from n on are 0."""
    m = n - i
    if kind == F32:
        return simd.load_f32(row + 4 * i) if m >= 16 else load_first(row + 4 * i, m, 0.0)
    if kind == Q8_0:
        block = row + i + 2 * (i // BLOCK) - i % BLOCK
        at, scale = block + 2 + i % BLOCK, simd.splat(read_f16(block))
        if m >= 16:
            return simd.mul(scale, simd.to_f32(simd.load_i8(at)))
        for j in range(m):  # the array may end with the row
            write_u8(narrow + j, read_u8(at + j))
        return keep(simd.mul(scale, simd.to_f32(simd.load_i8(narrow))), m)
    at = row + 2 * i
    if m >= 16:  # masked loads of 16 bits are slow without AVX-512
        return simd.load_f16(at) if kind == F16 else simd.load_bf16(at)
    return load_first_f16(at, m) if kind == F16 else load_first_bf16(at, m)


@jit.device_function(strict=True, inline="llvm")
def _store_block(at, m, v, w, narrow):
    """Store a q8_0 block of m numbers; lanes from m on are 0."""
    # maximum and minimum drop NaN; differences keep it
    zero, minus = simd.splat(0.0), simd.splat(-1.0)
    high = simd.maximum(simd.maximum(v, simd.mul(v, minus)), simd.maximum(w, simd.mul(w, minus)))
    bad = simd.sum(simd.add(simd.sub(v, v), simd.sub(w, w)))
    bits = simd.float_to_half(simd.max(simd.maximum(high, zero)) / np.float32(127.0))
    if bad != 0:  # NaN, or infinity minus itself
        bits = _NAN_HALF
    scale = simd.half_to_float(bits)
    write_u16(at, bits)
    divisor = simd.splat(scale if scale > 0 else np.float32(np.inf))
    _store_codes(at, m, simd.div(v, divisor), simd.div(w, divisor), narrow)


@jit.device_function(strict=True, inline="llvm")
def _store_codes(at, m, v, w, narrow):
    """Round and store the quotients of numbers and scale of a block of m numbers."""
    low, top = simd.splat(-127.0), simd.splat(127.0)
    v = simd.minimum(simd.maximum(simd.rint(v), low), top)
    w = simd.minimum(simd.maximum(simd.rint(w), low), top)
    if m >= BLOCK:
        store_narrow(at + 2, simd.to_i32(v))
        store_narrow(at + 18, simd.to_i32(w))
        return
    store_narrow(narrow, simd.to_i32(v))
    store_narrow(narrow + 16, simd.to_i32(w))
    for j in range(m):
        write_u8(at + 2 + j, read_u8(narrow + j))


@jit.device_function(strict=True, inline="llvm")
def _quotient(v, inverse, minus_scale):
    """Return v / scale, correctly rounded: the product with the inverse, corrected once.

    The remainder of a scale of 11 bits is exact, and no quotient is within 2**-12 units of the
    middle between two float32, so that the error of the correction, 2**-23 units, is too small to
    change the rounding.  A division takes three times as long.
    """
    q = simd.mul(v, inverse)
    return simd.fma(simd.fma(q, minus_scale, v), inverse, q)


@jit.device_function(strict=True)
def store_blocks(at, step, n_rows, m, numbers, scratch):
    """Store a q8_0 block of m numbers of up to 16 rows, `step` bytes apart; bits as of `store`.

    `numbers` are 16 rows of 32 float32, 0 from m on; `scratch` has 1 KB.  The scales of 16 rows are
    computed in the lanes of a vector.
    """
    for r in range(16):
        v, w = simd.load_f32(numbers + 128 * r), simd.load_f32(numbers + 128 * r + 64)
        simd.store_i32(scratch + 64 * r, simd_compare.larger(_magnitude(v), _magnitude(w)))
    largest = register_tiles.lane_magnitudes(register_tiles.load(1, 16, scratch))
    half = half_bits(simd.div(largest, simd.splat(127.0)))
    is_finite = simd_compare.less(largest, simd.splat(np.inf))
    half = simd_compare.choose(is_finite, half, simd.splat_i32(_NAN_HALF))
    simd.store_i32(scratch, half)
    scale, zero = from_half_bits(half), simd.splat(0.0)
    # an infinite divisor gives 0, or NaN; so does a product with 0
    divides = simd.and_(
        simd_compare.less(zero, scale), simd_compare.less(scale, simd.splat(np.inf))
    )
    inverse = simd_compare.choose(divides, simd.div(simd.splat(1.0), scale), zero)
    simd.store_f32(scratch + 64, inverse)
    simd.store_f32(scratch + 128, simd_compare.choose(divides, simd.sub(zero, scale), zero))
    for r in range(n_rows):
        block, source = at + r * step, numbers + 128 * r
        write_u16(block, read_u16(scratch + 4 * r))
        inverse = simd.splat(read_f32(scratch + 64 + 4 * r))
        minus_scale = simd.splat(read_f32(scratch + 128 + 4 * r))
        v = _quotient(simd.load_f32(source), inverse, minus_scale)
        w = _quotient(simd.load_f32(source + 64), inverse, minus_scale)
        _store_codes(block, m, v, w, scratch + 192)


@jit.device_function(inline="llvm")
def _magnitude(v):
    """Return the bits of 16 magnitudes, which are in their order."""
    return simd.and_(simd.as_i32(v), simd.splat_i32(0x7FFFFFFF))


@jit.device_function(inline="llvm")
def _store_16(row, kind, i, n, v, narrow):
    """Store up to 16 numbers in a format without blocks."""
    m = n - i
    if kind == F32:
        store_first(row + 4 * i, m, v)
        return
    at = row + 2 * i
    to = at if m >= 16 else narrow
    if kind == F16:
        store_f16(to, v)
    else:
        store_bf16(to, v)
    if m < 16:
        for j in range(m):
            write_u16(at + 2 * j, read_u16(narrow + 2 * j))


@jit.device_function(inline="llvm")
def store(row, kind, i, n, v, w, narrow):
    """Round and store numbers i to i + 31 of a row of n, i a multiple of 32; 0 from n on."""
    if kind == Q8_0:
        _store_block(row + block_offset(i), n - i, v, w, narrow)
        return
    _store_16(row, kind, i, n, v, narrow)
    if n - i > 16:
        _store_16(row, kind, i + 16, n, w, narrow)


@jit.device_function
def decode_rows(at, kind, n_rows, n, to, narrow):
    """Copy rows of n numbers to float32 rows without gaps."""
    for r in range(n_rows):
        row, target = at + r * row_bytes(kind, n), to + 4 * r * n
        for i in range(0, n, 16):
            store_first(target + 4 * i, n - i, load(row, kind, i, n, narrow))


@jit.device_function
def encode_rows(source, kind, n_rows, n, at, narrow):
    """Round float32 rows without gaps to rows of n numbers in a format."""
    for r in range(n_rows):
        row, values = at + r * row_bytes(kind, n), source + 4 * r * n
        for i in range(0, n, BLOCK):
            w = simd.splat(0.0)
            if n - i > 16:
                w = load_first(values + 4 * i + 64, n - i - 16, 0.0)
            store(row, kind, i, n, load_first(values + 4 * i, n - i, 0.0), w, narrow)


@jit.device_function
def read_number(at, kind):
    """Return the number at an address, in a format without blocks."""
    if kind == F32:
        return read_f32(at)
    return (
        simd.half_to_float(read_u16(at)) if kind == F16 else simd.bits_to_float(read_u16(at) << 16)
    )


@jit.device_function
def write_number(at, kind, x, narrow):
    """Round and write one number, in a format without blocks."""
    if kind == F32:
        write_f32(at, x)
        return
    if kind == BF16:
        store_bf16(narrow, simd.splat(x))
        write_u16(at, read_u16(narrow))
    else:
        write_u16(at, simd.float_to_half(x))
