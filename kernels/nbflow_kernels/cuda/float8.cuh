// Float8 numbers, as in `formats/float8.py`: MANTISSA bits, exponent BIAS, largest finite code.
#pragma once
#include "cuda/types.cuh"

template <int MANTISSA, int BIAS>
DEV float float8_value(u32 code) {
    const u32 size = code & 127, unit = (127 - BIAS) << 23;
    const u32 special = (size + (MANTISSA == 3 ? 1 : 4)) >> 7;  // NaN; infinity in e5m2
    float x = __uint_as_float((size << (23 - MANTISSA)) + (special + 1) * unit);
    if (size < 1u << MANTISSA)
        x = __fmul_rn((float)size, __uint_as_float((128 - BIAS - MANTISSA) << 23));
    return code > 127 ? -x : x;
}

// Round to nearest even; beyond the largest number: the largest number; NaN stays NaN.
template <int MANTISSA, int BIAS, int LARGEST>
DEV u8 float8_code(float x) {
    constexpr u32 LEAST = 128 - BIAS;  // exponent field of the smallest normal number
    const u32 bits = __float_as_uint(x), size = bits & 0x7fffffff, sign = bits >> 24 & 128;
    if (size > 0x7f800000) return sign | 127;
    const u32 field = size >> 23, exponent = max(field, LEAST);
    const u32 digits = (size & 0x7fffff) | (field ? 0x800000 : 0);
    const u32 shift = min(23 - MANTISSA + exponent - max(field, 1u), 30u);
    const u32 count = (digits + (1u << (shift - 1)) - 1 + (digits >> shift & 1)) >> shift;
    return sign | min(((exponent - LEAST) << MANTISSA) + count, (u32)LARGEST);
}
