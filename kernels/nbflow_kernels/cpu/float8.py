"""Float8 rows on the CPU: decode to float32, encode with saturation.

`mantissa` and `bias` are those of `nbflow_kernels.formats.float8.FLOAT8`.  A code below
``1 << mantissa`` (subnormal) is an integer times the smallest number, so that no subnormal float32
arises, on which processors are slow.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_compare import where_ge
from nbflow_kernels.cpu.simd_int8 import store_narrow
from nbflow_kernels.cpu.simd_memory import read_f32, read_u8, store_first, write_f32
from nbflow_kernels.cpu.simd_narrow import write_u8


@jit.device_function(strict=True)
def decode_float8_row(mantissa, bias, source, n, target, padded):
    """Decode n codes to float32; zeros up to `padded`."""
    d = 0
    while d + 16 <= n:
        simd.store_f32(target + 4 * d, _values(mantissa, bias, simd.load_u8(source + d)))
        d += 16
    while d < n:
        write_f32(target + 4 * d, float8_value(mantissa, bias, read_u8(source + d)))
        d += 1
    while d < padded:
        store_first(target + 4 * d, padded - d, simd.splat(0.0))
        d += 16


@jit.device_function(strict=True)
def _values(mantissa, bias, code):
    """Return the numbers of 16 codes."""
    size = simd.and_(code, simd.splat_i32(127))
    shift, unit = simd.splat_i32(23 - mantissa), (127 - bias) << 23
    # all exponent bits set: NaN, or infinity in e5m2; only code 127 in e4m3
    last = simd.splat_i32(1 if mantissa == 3 else 4)
    special = simd.shr(simd.add(size, last), simd.splat_i32(7))
    bits = simd.add(simd.shl(size, shift), simd.mul(special, simd.splat_i32(unit)))
    normal = simd.as_f32(simd.add(bits, simd.splat_i32(unit)))
    count = simd.to_f32(size)
    smallest = simd.bits_to_float((128 - bias - mantissa) << 23)
    small = simd.mul(count, simd.splat(smallest))
    v = where_ge(count, simd.splat(np.float32(1 << mantissa)), normal, small)
    sign = simd.shl(simd.and_(code, simd.splat_i32(128)), simd.splat_i32(24))
    return simd.as_f32(simd.or_(simd.as_i32(v), sign))


@jit.device_function(strict=True)
def float8_value(mantissa, bias, code):
    """Return the number of a code."""
    size, unit = code & 127, (127 - bias) << 23
    special = (size + (1 if mantissa == 3 else 4)) >> 7
    bits = (size << (23 - mantissa)) + (special + 1) * unit
    x = simd.bits_to_float(bits)
    if size < 1 << mantissa:
        x = np.float32(size) * simd.bits_to_float((128 - bias - mantissa) << 23)
    if code > 127:
        x = -x
    return x


@jit.device_function(strict=True)
def encode_float8_row(mantissa, bias, largest_code, source, n, factor, target):
    """Encode n float32 times `factor`, rounded to nearest even."""
    d, factors = 0, simd.splat(factor)
    while d + 16 <= n:
        x = simd.mul(simd.load_f32(source + 4 * d), factors)
        store_narrow(target + d, _codes(mantissa, bias, largest_code, x))
        d += 16
    while d < n:
        x = read_f32(source + 4 * d) * np.float32(factor)
        write_u8(target + d, float8_code(mantissa, bias, largest_code, x))
        d += 1


@jit.device_function(strict=True)
def _codes(mantissa, bias, largest_code, x):
    """Return the codes of 16 numbers."""
    size = simd.and_(simd.as_i32(x), simd.splat_i32(0x7FFFFFFF))
    is_nan = simd.shr(simd.sub(simd.splat_i32(0x7F800000), size), simd.splat_i32(31))
    largest = float8_value(mantissa, bias, np.int64(largest_code))
    t = simd.minimum(simd.as_f32(size), simd.splat(largest))
    least = simd.splat(simd.bits_to_float((128 - bias) << 23))
    power = simd.and_(simd.as_i32(simd.maximum(t, least)), simd.splat_i32(0x7F800000))
    inverse = simd.sub(simd.splat_i32(254 << 23), power)
    steps = simd.as_f32(simd.add(inverse, simd.splat_i32(mantissa << 23)))
    count = simd.to_i32(simd.rint(simd.mul(t, steps)))
    exponent = simd.sub(simd.shr(power, simd.splat_i32(23)), simd.splat_i32(128 - bias))
    code = simd.add(simd.shl(exponent, simd.splat_i32(mantissa)), count)
    nan = simd.and_(simd.sub(simd.splat_i32(0), is_nan), simd.splat_i32(127))
    sign = simd.and_(simd.shr(simd.as_i32(x), simd.splat_i32(24)), simd.splat_i32(128))
    return simd.or_(simd.or_(code, nan), sign)


@jit.device_function(strict=True)
def float8_code(mantissa, bias, largest_code, x):
    """Return the code of a number."""
    bits = np.int64(np.float32(x).view(np.uint32))
    size = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 128
    if size > 0x7F800000:
        return sign | 127
    exponent = max(size >> 23, 128 - bias)
    digits = (size & 0x7FFFFF) | (0x800000 if size >> 23 else 0)
    shift = min(23 - mantissa + exponent - max(size >> 23, 1), 30)
    half = (np.int64(1) << (shift - 1)) - 1
    count = (digits + half + ((digits >> shift) & 1)) >> shift
    code = ((exponent - (128 - bias)) << mantissa) + count
    return sign | min(code, largest_code)
