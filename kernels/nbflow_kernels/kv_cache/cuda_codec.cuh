// Codec of one head vector of the cache: decode number by number, encode block by block.
//
// Compiled per format: `Format` is the format's row of LAYOUTS in `cpu_codec.py`, which stores the same bytes.
// __fadd_rn and __fmul_rn keep the compiler from fusing where an fma would change a stored byte.
#pragma once
#include "cuda/float8.cuh"
#include "cuda/types.cuh"

enum Kind { F32, F16, BF16, FIRST_BLOCK_KIND };
enum Mode { SIGNED, BYTES, NIBBLES, HALVES, CRUMBS, PAIRS, MINIFLOAT };
// Scale rules of the published quantizers, `formats/affine_format.py`; GAUSSIAN: of codebooks, `codebooks.py`.
enum Rule { RANGE, MIDRISE, ABSMAX, GGML_EXTREME, GGML_RANGE, GGML_ABSMAX, GAUSSIAN };

constexpr u16 NAN_HALF = 0x7e00;

// A format's KIND and its row of LAYOUTS, in column order.
template <int Kind, int Block, int BlockBytes, int ScaleAt, int BaseAt, int Mode, int LowAt,
          int HighBits, int HighAt, int LowBits, int Zero, int NCodes, int Rule, int Divisor,
          int TopAt, int TopShift, int MiddleAt, int Radix, int Reciprocal, int Codebook>
struct Format {
    static constexpr int KIND = Kind, BLOCK = Block, BLOCK_BYTES = BlockBytes, SCALE_AT = ScaleAt,
                         BASE_AT = BaseAt, MODE = Mode, LOW_AT = LowAt, HIGH_BITS = HighBits,
                         HIGH_AT = HighAt, LOW_BITS = LowBits, ZERO = Zero, N_CODES = NCodes,
                         RULE = Rule, DIVISOR = Divisor, TOP_AT = TopAt, TOP_SHIFT = TopShift,
                         MIDDLE_AT = MiddleAt, RADIX = Radix, RECIPROCAL = Reciprocal,
                         CODEBOOK = Codebook;
    static constexpr bool FLOAT = Kind < FIRST_BLOCK_KIND;
    static constexpr bool FLOAT8 = Mode == MINIFLOAT && Kind >= FIRST_BLOCK_KIND;
    static constexpr int ITEM = Kind == F32 ? 4 : 2;  // bytes of a float element
};

DEV float half_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

DEV u16 float_to_half(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

DEV u16 float_to_bf16(float x) {  // round half to even; NaN stays NaN
    const u32 bits = __float_as_uint(x);
    if (x != x) return (bits >> 16) | 0x40;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

DEV float load_float(const u8* at, int kind) {
    if (kind == F32) return *(const float*)at;
    const u16 bits = *(const u16*)at;
    return kind == F16 ? half_to_float(bits) : __uint_as_float((u32)bits << 16);
}

DEV void store_float(u8* at, float x, int kind) {
    if (kind == F32) *(float*)at = x;
    else *(u16*)at = kind == F16 ? float_to_half(x) : float_to_bf16(x);
}

// ---- float8: mantissa bits, exponent bias and largest code are LOW_BITS, ZERO and N_CODES -------

template <class F>
DEV float float8_value(u32 code) { return float8_value<F::LOW_BITS, F::ZERO>(code); }

template <class F>
DEV u8 float8_code(float x) { return float8_code<F::LOW_BITS, F::ZERO, F::N_CODES>(x); }

// ---- codebooks of 2, 3 or 4 bits: `codebooks.py`

// Level of a code; the positive levels are bytes of a constant.
template <class F>
DEV int codebook_level(int code) {
    constexpr u64 LEVELS = F::CODEBOOK == 4 ? 0x7e5f4a3a2b1e1206ull : F::CODEBOOK == 3 ? 0x7f4f2d0eull : 0x7f26ull;
    constexpr int HALF = (1 << F::CODEBOOK) >> 1;
    const int n = code >= HALF ? code - HALF : HALF - 1 - code;
    const int level = LEVELS >> 8 * n & 255;
    return code >= HALF ? level : -level;
}

template <class F>
DEV int nearest_code(float steps) {
    int code = 0;
    for (int j = 0; j + 1 < 1 << F::CODEBOOK; j++)
        code += steps >= 0.5f * (codebook_level<F>(j) + codebook_level<F>(j + 1));
    return code;
}

// ---- decode ------------------------------------------------------------------------------------

// Field i of a plane of `bits`-bit fields, lowest bits first.
DEV int field(const u8* plane, int i, int bits) {
    const int per_byte = 8 / bits;
    return (plane[i / per_byte] >> (i % per_byte * bits)) & ((1 << bits) - 1);
}

template <class F>
DEV int load_code(const u8* block, int i) {
    const u8* low = block + F::LOW_AT;
    int code = 0;
    if constexpr (F::MODE == SIGNED) return (signed char)low[i];
    if constexpr (F::MODE == BYTES) return low[i];
    if constexpr (F::MODE == PAIRS) {  // x + RADIX y in planes of 4, 2 and 1 bits
        const int p = i >> 1;
        int c = field(low, p, 4) | field(block + F::HIGH_AT, p, 2) << F::LOW_BITS |
                field(block + F::TOP_AT, p, 1) << F::TOP_SHIFT;
        if (F::MIDDLE_AT >= 0) c |= field(block + F::MIDDLE_AT, p, 4) << 4;
        const int y = c * F::RECIPROCAL >> 16;  // c / RADIX
        return i & 1 ? y : c - F::RADIX * y;
    }
    if constexpr (F::MODE == HALVES) code = (low[i & 15] >> (i >> 4) * 4) & 15;
    if constexpr (F::MODE == NIBBLES) code = field(low, i, 4);
    if constexpr (F::MODE == CRUMBS) code = field(low, i, 2);
    if constexpr (F::HIGH_BITS > 0)
        code |= field(block + F::HIGH_AT, i, F::HIGH_BITS) << F::LOW_BITS;
    if constexpr (F::CODEBOOK > 0) return codebook_level<F>(code);
    return code;
}

template <class F>
DEV float block_scale(const u8* block) { return half_to_float(*(const u16*)(block + F::SCALE_AT)); }

template <class F>
DEV float block_base(const u8* block) {
    if constexpr (F::BASE_AT < 0) return -0.0f;  // keeps the sign of zero
    return half_to_float(*(const u16*)(block + F::BASE_AT));
}

// Decode number d of a row with one rounding: float16 times code has at most 19 bits.
template <class F>
DEV float load_number(const u8* row, int d) {
    if constexpr (F::FLOAT) return load_float(row + d * F::ITEM, F::KIND);
    if constexpr (F::FLOAT8) return float8_value<F>(row[d]);
    const u8* block = row + d / F::BLOCK * F::BLOCK_BYTES;
    const float code = load_code<F>(block, d % F::BLOCK) - F::ZERO;
    return __fmaf_rn(block_scale<F>(block), code, block_base<F>(block));
}

// ---- encode ------------------------------------------------------------------------------------

DEV float warp_max(float x) {
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// Sum of a warp, by halves, without contractions.
DEV float warp_total(float x) {
    for (int step = 16; step; step >>= 1) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

struct Parameters {
    float base, scale, inverse;  // inverse: 1 / scale, or 0 if the scale counts as 0
    bool finite;
};

// Scale and base of a block held by a warp: x[0] per lane, and x[1] for blocks of 64.
// Least-squares scale of a block in a codebook, one number per lane.
template <class F>
DEV Parameters codebook_parameters(float x) {
    const float energy = warp_total(__fmul_rn(x, x));
    Parameters p = {0, 0, 0, __fsub_rn(energy, energy) == 0};
    const bool zero = energy < 1e-14f;
    if (p.finite && !zero) p.inverse = __fdiv_rn((float)F::DIVISOR, __fsqrt_rn(__fdiv_rn(energy, 32.0f)));
    const float level = codebook_level<F>(nearest_code<F>(__fmul_rn(x, p.inverse)));
    const float size = warp_total(__fmul_rn(level, level)), match = warp_total(__fmul_rn(x, level));
    if (!zero) p.scale = __fdiv_rn(match, size);
    return p;
}

template <class F>
DEV Parameters block_parameters(const float* x) {
    if constexpr (F::CODEBOOK > 0) return codebook_parameters<F>(x[0]);
    constexpr int N = F::BLOCK / 32;
    float low = x[0], high = x[0];
    bool good = true;
    for (int k = 0; k < N; k++) {
        low = fminf(low, x[k]);
        high = fmaxf(high, x[k]);
        good = good && __fsub_rn(x[k], x[k]) == 0;
    }
    const float largest = warp_max(high), smallest = -warp_max(-low);
    const float magnitude = fmaxf(fabsf(largest), fabsf(smallest));
    Parameters p = {0, 0, 0, __all_sync(~0u, good) != 0};
    if (F::RULE == GGML_EXTREME) {  // the first number of the largest magnitude
        const u32 found = __ballot_sync(~0u, fabsf(x[0]) == magnitude);
        const float extreme = __shfl_sync(~0u, x[0], found ? __ffs(found) - 1 : 0);
        p.scale = __fdiv_rn(found ? extreme : 0.0f, -(float)F::DIVISOR);
    } else if (F::RULE == ABSMAX || F::RULE == GGML_ABSMAX) {
        p.scale = __fdiv_rn(magnitude, (float)F::DIVISOR);
    } else {
        p.base = smallest;
        p.scale = __fdiv_rn(__fsub_rn(largest, smallest), (float)F::DIVISOR);
    }
    bool cut = p.scale == 0;
    if (F::RULE == RANGE || F::RULE == MIDRISE || F::RULE == ABSMAX)
        cut = p.scale < 1e-5f;
    if (!cut) p.inverse = __fdiv_rn(1.0f, p.scale);
    return p;
}

template <class F>
DEV int half_up(float x) {  // x >= 0, round half up
    if (F::RULE != GGML_ABSMAX) return __float2int_rz(__fadd_rn(x, 0.5f));  // the addition rounds
    const int whole = __float2int_rz(x);
    const float twice = __fsub_rn(x, (float)whole);
    return whole + __float2int_rz(__fadd_rn(twice, twice));
}

template <class F>
DEV int encode_number(float x, float base, float inverse) {
    if constexpr (F::CODEBOOK > 0) return nearest_code<F>(inverse == 0 ? 0.0f : __fmul_rn(x, inverse));
    if (F::RULE == ABSMAX || F::RULE == GGML_ABSMAX) {
        const float steps = __fmul_rn(x, inverse);
        const int up = half_up<F>(fminf(fmaxf(steps, 0.0f), 127.0f));
        return up - half_up<F>(fminf(fmaxf(-steps, 0.0f), 128.0f));
    }
    const float half =
        F::RULE == MIDRISE ? 1e-4f : F::RULE == GGML_EXTREME ? F::ZERO + 0.5f : 0.5f;
    const float steps = __fadd_rn(__fmul_rn(__fsub_rn(x, base), inverse), half);
    return __float2int_rz(fminf(fmaxf(steps, 0.0f), F::N_CODES - 1.0f));
}

// Byte `at` of a `bits`-bit plane of pair codes, from bit `shift` on; 0 outside the plane.
template <class F>
DEV int pair_bits(const u8* codes, int at, int bits, int shift) {
    const int per_byte = 8 / bits;
    int byte = 0;
    if (at < 0 || at >= F::BLOCK / 2 / per_byte) return 0;
    for (int k = 0; k < per_byte; k++) {
        const int p = at * per_byte + k, pair = codes[2 * p] + F::RADIX * codes[2 * p + 1];
        byte |= ((pair >> shift) & ((1 << bits) - 1)) << k * bits;
    }
    return byte;
}

// Byte `at` of the code bytes of a block; `codes` has one code per byte.
template <class F>
DEV u8 code_byte(const u8* codes, int at) {
    const int low = at - F::LOW_AT;
    int byte = 0;
    if constexpr (F::MODE == SIGNED || F::MODE == BYTES) return codes[low];
    if constexpr (F::MODE == PAIRS) {
        byte = pair_bits<F>(codes, at - F::LOW_AT, 4, 0) |
               pair_bits<F>(codes, at - F::HIGH_AT, 2, F::LOW_BITS) |
               pair_bits<F>(codes, at - F::TOP_AT, 1, F::TOP_SHIFT);
        if (F::MIDDLE_AT >= 0) byte |= pair_bits<F>(codes, at - F::MIDDLE_AT, 4, 4);
        return byte;
    }
    if constexpr (F::HIGH_BITS > 0) {
        constexpr int per_byte = 8 / (F::HIGH_BITS > 0 ? F::HIGH_BITS : 1);
        const int high = at - F::HIGH_AT;
        if (high >= 0 && high < F::BLOCK / per_byte) {
            for (int k = 0; k < per_byte; k++)
                byte |= (codes[high * per_byte + k] >> F::LOW_BITS) << k * F::HIGH_BITS;
            return byte;
        }
    }
    if constexpr (F::MODE == HALVES) return (codes[low] & 15) | (codes[low + 16] & 15) << 4;
    if constexpr (F::MODE == NIBBLES) return (codes[2 * low] & 15) | (codes[2 * low + 1] & 15) << 4;
    for (int k = 0; k < 4; k++) byte |= (codes[4 * low + k] & 3) << 2 * k;  // CRUMBS
    return byte;
}

// Encode a block held by a warp; `codes` is scratch of F::BLOCK bytes.
template <class F>
DEV void store_block(u8* block, const float* x, u8* codes) {
    const int lane = threadIdx.x & 31;
    Parameters p = block_parameters<F>(x);
    const float shown =
        F::RULE == MIDRISE ? __fadd_rn(p.base, __fmul_rn(p.scale, 0.5f)) : p.base;
    const u16 scale = p.finite ? float_to_half(p.scale) : NAN_HALF;
    const u16 base = p.finite ? float_to_half(shown) : NAN_HALF;
    if (!p.finite) p.base = p.inverse = 0;
    __syncwarp();  // codes of the previous block are consumed
    for (int k = 0; k < F::BLOCK / 32; k++)
        codes[lane + 32 * k] = encode_number<F>(x[k], p.base, p.inverse);
    __syncwarp();
    for (int at = lane; at < F::BLOCK_BYTES; at += 32) {
        if (at / 2 == F::SCALE_AT / 2) block[at] = scale >> 8 * (at & 1);
        else if (F::BASE_AT >= 0 && at / 2 == F::BASE_AT / 2) block[at] = base >> 8 * (at & 1);
        else block[at] = code_byte<F>(codes, at);
    }
}
