// Codes of block formats as operands of mma.m16n8k16, read from rows in shared memory.
//
// In the low bits of a half a code *is* a float16 number, the subnormal code * 2**-24, so that pairs of them
// are made by an AND or a byte permutation, without a conversion.  Scales go elsewhere: to the scores of
// keys, and to the weights of values.  Numbers are taken 32 at a time, a *part*; a block of 64 is two parts
// with the same scale.  Float16 rows have parts, too, and no scales.
#pragma once
#include "attention/fragments.cuh"

// How a format's rows of PARTS * 32 numbers become operands.
template <class F>
struct Codes {
    static constexpr int PER_BLOCK = F::FLOAT ? 1 : F::BLOCK / 32;  // parts
    static constexpr int BLOCK_BYTES = F::FLOAT ? 64 : F::BLOCK_BYTES;
    // Two codes to a byte: masked where they are, those above times 16.
    static constexpr bool NIBBLE_PAIRS =
        !F::FLOAT && F::HIGH_BITS == 0 && (F::MODE == HALVES || F::MODE == NIBBLES);
    static constexpr bool BASE = !F::FLOAT && F::BASE_AT >= 0;
    // What a number's code is more than the operand for a scale of 1 and no base.
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

    // Where column c of a part is: in which of the four lanes, which pair, which half.
    struct Place {
        int t, pair, half;
    };
    static DEV_METHOD Place place(int c) {
        if (F::FLOAT) return {c >> 3, c >> 1 & 3, c & 1};
        if (!NIBBLE_PAIRS) return {c >> 2 & 3, c >> 3 & 2 | c >> 1 & 1, c & 1};
        if (F::MODE == NIBBLES) return {c >> 3, c & 3, c >> 2 & 1};
        return {c >> 2 & 3, c << 1 & 2 | c >> 4, c >> 1 & 1};
    }
    // By how many bits pair (or column) i of a lane is shifted up.
    static constexpr int shift(int i) { return NIBBLE_PAIRS && i % 2 ? 4 : 0; }

    static DEV_METHOD void of_key(const u8* row, int row_size, int part, int t, u32* pairs) {
        if constexpr (F::FLOAT) {
            const uint4 all = *(const uint4*)(row + 64 * part + 16 * t);
            pairs[0] = all.x, pairs[1] = all.y, pairs[2] = all.z, pairs[3] = all.w;
        } else if constexpr (NIBBLE_PAIRS) {
            const int at = block_at(part) + F::LOW_AT + part % PER_BLOCK * 16;
            fields(word(row + at + 4 * t, (at | row_size) % 4 == 0), pairs);
        } else {
            const int first = part % PER_BLOCK * 32 + 4 * t;
            const bool aligned = (block_at(part) + F::LOW_AT | row_size) % 4 == 0;
            const u32 a = four(row + block_at(part), first, aligned);
            const u32 b = four(row + block_at(part), first + 16, aligned);
            pairs[0] = prmt(a, 0, 0x4140u), pairs[1] = prmt(a, 0, 0x4342u);
            pairs[2] = prmt(b, 0, 0x4140u), pairs[3] = prmt(b, 0, 0x4342u);
        }
    }

    // ---- values: four columns of a part in a lane, g = lane / 4, as pairs of two neighbouring keys

    // The column that is a lane's number j.
    static DEV_METHOD int column(int g, int j) {
        if (NIBBLE_PAIRS && F::MODE == HALVES) return (j & 1) * 16 + 2 * g + (j >> 1);
        return 4 * g + j;
    }

    static DEV_METHOD void of_values(const u8* row, const u8* next, int row_size, int part, int g,
                                     u32* pairs) {
        if constexpr (NIBBLE_PAIRS) {
            const int at = block_at(part) + F::LOW_AT + part % PER_BLOCK * 16 + 2 * g;
            fields(*(const u16*)(row + at) | (u32) * (const u16*)(next + at) << 16, pairs);
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
    // Four bytes at an even address.
    static DEV_METHOD u32 word(const u8* at, bool aligned) {
        if (aligned) return *(const u32*)at;
        return ((const u16*)at)[0] | (u32)((const u16*)at)[1] << 16;
    }

    // The eight nibbles of a word: low and high ones of bytes 0 and 2, then of bytes 1 and 3.
    static DEV_METHOD void fields(u32 w, u32* pairs) {
        pairs[0] = w & 0x000f000fu, pairs[1] = w & 0x00f000f0u;
        w >>= 8;
        pairs[2] = w & 0x000f000fu, pairs[3] = w & 0x00f000f0u;
    }

    // Four fields of a byte, or of 16 bits, as bytes.
    static DEV_METHOD u32 spread_crumbs(u32 x) {
        x = (x | x << 12) & 0x000f000fu;
        return (x | x << 6) & 0x03030303u;
    }
    static DEV_METHOD u32 spread_nibbles(u32 x) {
        x = (x | x << 8) & 0x00ff00ffu;
        return (x | x << 4) & 0x0f0f0f0fu;
    }
    static DEV_METHOD u32 spread_bits(u32 x) { return x * 0x00204081u & 0x01010101u; }

    // Codes i to i + 3 of a block as bytes; i is a multiple of 4.
    static DEV_METHOD u32 four(const u8* block, int i, bool aligned) {
        const u8 *low = block + F::LOW_AT, *high = block + F::HIGH_AT;
        if constexpr (F::MODE == SIGNED) return word(low + i, aligned) ^ 0x80808080u;
        if constexpr (F::MODE == BYTES) return word(low + i, aligned);
        if constexpr (F::MODE == PAIRS) {  // x + 11 y in planes of 1, 2 and 4 bits
            const u32 n = low[12 + (i >> 2)], m = low[4 + (i >> 3)] >> (i & 4);
            const u32 b = low[i >> 4] >> (i >> 1 & 7);
            const u32 c = (n & 15) | (n & 0xf0) << 12 | (m & 3) << 4 | (m & 12) << 18 |
                          (b & 1) << 6 | (b & 2) << 21;
            const u32 y = c * 373 >> 12 & 0x000f000fu;  // c / 11 for c <= 120
            return (c - 11 * y) | y << 8;
        }
        u32 codes;
        if constexpr (F::MODE == HALVES)
            codes = word(low + (i & 15), aligned) >> (i >> 4) * 4 & 0x0f0f0f0fu;
        else if constexpr (F::MODE == NIBBLES) codes = spread_nibbles(*(const u16*)(low + (i >> 1)));
        else codes = spread_crumbs(low[i >> 2]);
        if constexpr (F::HIGH_BITS == 1)
            codes |= spread_bits(high[i >> 3] >> (i & 4) & 15) << F::LOW_BITS;
        if constexpr (F::HIGH_BITS == 2) codes |= spread_crumbs(high[i >> 2]) << F::LOW_BITS;
        return codes;
    }
};
