// Codes of quantized rows in shared memory as operands of mma.m16n8k16.
//
// A code in the low bits of a half *is* a float16 number, the subnormal code * 2**-24, so an AND or a byte permutation
// makes operands without a conversion.  Tensor cores count it with the exponent -14, so that sums are cut to 2**-14
// (Hopper: 2**-15) of code 1 times the largest number that meets a code.  Key scales are applied to scores, value scales to weights.  Numbers are taken
// 32 at a time, a *part*; a block of 64 is two parts with one scale.  Float16 rows are parts without scales.
#pragma once
#include "attention/cuda/mma.cuh"

// Conversion of a format's rows of PARTS * 32 numbers to operands.
template <class F>
struct Codes {
    static constexpr int PER_BLOCK = F::FLOAT ? 1 : F::BLOCK / 32;  // parts
    static constexpr int BLOCK_BYTES = F::FLOAT ? 64 : F::BLOCK_BYTES;
    // Bit fields masked in place, which scales the codes by a power of two; other formats are widened to bytes first.
    static constexpr bool IN_PLACE =
        !F::FLOAT && (F::MODE == NIBBLES || F::MODE == CRUMBS || F::MODE == PAIRS ||
                      F::MODE == HALVES && F::HIGH_BITS == 0);
    static constexpr bool BASE = !F::FLOAT && F::BASE_AT >= 0;
    // Zero point to subtract from codes.
    static constexpr int ZERO = F::FLOAT ? 0 : F::MODE == SIGNED ? 128 : F::ZERO;
    static constexpr float UNIT = F::FLOAT ? 1.0f : 5.9604644775390625e-8f;

    static constexpr int row_bytes(int parts) { return parts / PER_BLOCK * BLOCK_BYTES; }
    static constexpr int block_at(int part) { return part / PER_BLOCK * BLOCK_BYTES; }

    static DEV_METHOD float scale(const u8* row, int part) {
        return F::FLOAT ? 1.0f : half_to_float(*(const u16*)(row + block_at(part) + F::SCALE_AT));
    }
    static DEV_METHOD float base(const u8* row, int part) {
        return BASE ? half_to_float(*(const u16*)(row + block_at(part) + F::BASE_AT)) : 0.0f;
    }

    // ---- keys: eight columns of a part in a lane, t = lane % 4, as four pairs

    // Position of column c of a part: lane, pair and half.
    struct HeaderField {
        int t, pair, half;
    };
    static DEV_METHOD HeaderField place(int c) {
        if (F::FLOAT) return {c >> 3, c >> 1 & 3, c & 1};
        if (!IN_PLACE) return {c >> 2 & 3, c >> 3 & 2 | c >> 1 & 1, c & 1};
        if (F::MODE == HALVES) return {c >> 2 & 3, c << 1 & 2 | c >> 4, c >> 1 & 1};
        return {c >> 3, c & 3, c >> 2 & 1};
    }
    // Left shift of pair (or column) i of a lane.
    static constexpr int shift(int i) {
        if (!IN_PLACE) return 0;
        return F::MODE == CRUMBS ? 2 * i : i % 2 * (F::MODE == PAIRS ? 14 : 4);
    }

    static DEV_METHOD void of_key(const u8* row, int row_size, int part, int t, u32* pairs) {
        if constexpr (F::FLOAT) {
            const uint4 all = *(const uint4*)(row + 64 * part + 16 * t);
            pairs[0] = all.x, pairs[1] = all.y, pairs[2] = all.z, pairs[3] = all.w;
        } else if constexpr (IN_PLACE) {
            const int at = low_at(part);
            if constexpr (F::MODE == PAIRS) {
                const u8* block = row + block_at(part);
                const int n = part % PER_BLOCK * 4 + t;  // index of four pairs
                const u32 m = block[F::HIGH_AT + n], b = block[F::TOP_AT + n / 2] >> n % 2 * 4;
                const u32 low = widen(*(const u16*)(block + F::LOW_AT + 2 * n));
                split_pairs(low, m | m << 12, b | b << 14, pairs);
            } else if constexpr (F::MODE == CRUMBS) fields(widen(*(const u16*)(row + at + 2 * t)), pairs);
            else fields(word(row + at + 4 * t, (at | row_size) % 4 == 0), pairs);
            const u8* high = row + high_at(part);
            if constexpr (F::HIGH_BITS == 1) add_high(high[t] | high[t] << 12, pairs);
            if constexpr (F::HIGH_BITS == 2) add_high(widen(*(const u16*)(high + 2 * t)), pairs);
        } else {
            const int first = part % PER_BLOCK * 32 + 4 * t;
            const bool aligned = (block_at(part) + F::LOW_AT | row_size) % 4 == 0;
            const u32 a = four(row + block_at(part), first, aligned);
            const u32 b = four(row + block_at(part), first + 16, aligned);
            pairs[0] = widen(a), pairs[1] = prmt(a, 0, 0x4342u);
            pairs[2] = widen(b), pairs[3] = prmt(b, 0, 0x4342u);
        }
    }

    // ---- values: four columns of a part in a lane, g = lane / 4, as pairs of two neighbouring keys

    // Column of a lane's j-th number.
    static DEV_METHOD int column(int g, int j) {
        if (IN_PLACE && F::MODE == HALVES) return (j & 1) * 16 + 2 * g + (j >> 1);
        return 4 * g + j;
    }

    static DEV_METHOD void of_values(const u8* row, const u8* next, int row_size, int part, int g,
                                     u32* pairs) {
        if constexpr (IN_PLACE) {
            const u8 *a = row + low_at(part), *b = next + low_at(part);
            if constexpr (F::MODE == PAIRS) {
                a = row + block_at(part), b = next + block_at(part);
                const int n = part % PER_BLOCK * 8 + g, up = n % 2 * 4, down = n % 4 * 2;
                const int low = F::LOW_AT + n, m = F::HIGH_AT + n / 2, top = F::TOP_AT + n / 4;
                split_pairs(a[low] | b[low] << 16, a[m] >> up | b[m] >> up << 16,
                            a[top] >> down | b[top] >> down << 16, pairs);
            } else if constexpr (F::MODE == CRUMBS) fields(a[g] | b[g] << 16, pairs);
            else fields(*(const u16*)(a + 2 * g) | *(const u16*)(b + 2 * g) << 16, pairs);
            a = row + high_at(part), b = next + high_at(part);
            if constexpr (F::HIGH_BITS == 1) {
                const int nibble = g % 2 * 4;
                add_high(a[g / 2] >> nibble | b[g / 2] >> nibble << 16, pairs);
            }
            if constexpr (F::HIGH_BITS == 2) add_high(a[g] | b[g] << 16, pairs);
        } else if constexpr (F::FLOAT) {
            const uint2 a = *(const uint2*)(row + 64 * part + 8 * g);
            const uint2 b = *(const uint2*)(next + 64 * part + 8 * g);
            pairs[0] = prmt(a.x, b.x, 0x5410u), pairs[1] = prmt(a.x, b.x, 0x7632u);
            pairs[2] = prmt(a.y, b.y, 0x5410u), pairs[3] = prmt(a.y, b.y, 0x7632u);
        } else {
            const int first = part % PER_BLOCK * 32 + 4 * g;
            const bool aligned = (block_at(part) + F::LOW_AT | row_size) % 4 == 0;
            const u32 a = four(row + block_at(part), first, aligned);
            const u32 b = four(next + block_at(part), first, aligned);
            const u32 low = prmt(a, b, 0x5410u), high = prmt(a, b, 0x7632u);
            pairs[0] = low & 0x00ff00ffu, pairs[1] = prmt(low, 0, 0x4341u);
            pairs[2] = high & 0x00ff00ffu, pairs[3] = prmt(high, 0, 0x4341u);
        }
    }

  private:
    // Load four bytes from an even address.
    static DEV_METHOD u32 word(const u8* at, bool aligned) {
        if (aligned) return *(const u32*)at;
        return ((const u16*)at)[0] | (u32)((const u16*)at)[1] << 16;
    }

    // Offsets of a part's fields in the planes of low and of high bits.
    static constexpr int low_at(int part) {
        return block_at(part) + F::LOW_AT + part % PER_BLOCK * (F::MODE == CRUMBS ? 8 : 16);
    }
    static constexpr int high_at(int part) {
        return block_at(part) + F::HIGH_AT + part % PER_BLOCK * 4 * F::HIGH_BITS;
    }

    static DEV_METHOD u32 widen(u32 two_bytes) { return prmt(two_bytes, 0, 0x4140u); }

    // Unpack 2-bit fields, four per half, or 4-bit fields: low and high nibbles of the first bytes, then of the second.
    static DEV_METHOD void fields(u32 w, u32* pairs) {
        if constexpr (F::MODE == CRUMBS) {
#pragma unroll
            for (int i = 0; i < 4; i++) pairs[i] = w & 0x00030003u << 2 * i;
        } else {
            pairs[0] = w & 0x000f000fu, pairs[1] = w & 0x00f000f0u;
            w >>= 8;
            pairs[2] = w & 0x000f000fu, pairs[3] = w & 0x00f000f0u;
        }
    }
    // Insert high bits (field i of each half for pair i) above the low ones.
    static DEV_METHOD void add_high(u32 w, u32* pairs) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int to = shift(i) + F::LOW_BITS;
            pairs[i] |= w << (to - F::HIGH_BITS * i) & ((1u << F::HIGH_BITS) - 1) * 0x10001u << to;
        }
    }

    // Split pair codes p = x + 11 y, two per half: 4 bits of each in w, 2 in m, 1 in b.  (1024 + p) / 11 + 930.9 rounds
    // to 1025 + floor(p / 11) for all p in 0..120; the rest is exact and gives y * 2**-10 and x * 2**-24.
    static DEV_METHOD void split_pairs(u32 w, u32 m, u32 b, u32* pairs) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 p = w >> 4 * i & 0x000f000fu;
            p |= m << 4 - 2 * i & 0x00300030u;
            p |= b << 6 - i & 0x00400040u;
            const u32 high = fma_f16x2(p | 0x64006400u, 0x2dd12dd1u, 0x63476347u);
            pairs[2 * i + 1] = fma_f16x2(high, 0x14001400u, 0xbc01bc01u);
            pairs[2 * i] = fma_f16x2(pairs[2 * i + 1], 0x91809180u, p);
        }
    }

    static DEV_METHOD u32 spread_bits(u32 x) { return x * 0x00204081u & 0x01010101u; }

    // Codes i to i + 3 of a block as bytes; i is a multiple of 4.
    static DEV_METHOD u32 four(const u8* block, int i, bool aligned) {
        const u8 *low = block + F::LOW_AT, *high = block + F::HIGH_AT;
        if constexpr (F::MODE == SIGNED) return word(low + i, aligned) ^ 0x80808080u;
        if constexpr (F::MODE == BYTES) return word(low + i, aligned);
        // nibbles split in halves, with a plane of high bits
        u32 codes = word(low + (i & 15), aligned) >> (i >> 4) * 4 & 0x0f0f0f0fu;
        codes |= spread_bits(high[i >> 3] >> (i & 4) & 15) << F::LOW_BITS;
        return codes;
    }
};
