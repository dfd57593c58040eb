// Dequantization to bfloat16 in registers, and bfloat16 MMAs.
//
// Weights have the bits that `cuda_dequantize.cu` writes to panels, and products are added in the order of
// `matmul/cuda_mma.cu` (splits of steps of 64 columns): a result has the same bits with and without panels.
#pragma once
#include "quantized_matmul/cuda_stage_activations.cuh"

DEV u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// A pair of powers of two, and a pair of -n * 2**-6.
constexpr u32 power_bf16x2(int exponent) { return (127u + exponent) * 0x00800080u; }

constexpr u32 minus_bf16x2(u32 n) {
  u32 top = 0;
  for (u32 v = n; v > 1; v >>= 1) top++;
  return n == 0 ? 0x80008000u : (0x8000u | (121u + top) << 7 | (n << (7 - top) & 127u)) * 0x10001u;
}

// scale * (code - ZERO), rounded once, in pairs: the float16 scale is the sum of two bfloat16 numbers, of
// which the second has 3 bits, so that its product with 6 bits is exact.  As in float16, a field in the low
// 8 bits is a subnormal number, code * 2**-133.
constexpr int WHOLE_ZERO = (int)ZERO;
constexpr bool IN_PAIRS = KIND == BITS_KIND && SCALES == HALF && BITS <= 6 && ZERO == WHOLE_ZERO;
// scale * ZERO is exact in float32: one fma scales and subtracts the zero point.
constexpr bool ZERO_IN_BASE =
    HAS_ZERO && (SCALES == HALF || (SCALES == BYTE && (WHOLE_ZERO & (WHOLE_ZERO - 1)) == 0));
// float16 scales leave exponent range for the power of two of a code.
constexpr bool UNIT_IN_SCALE =
    SCALES != FLOAT && SCALES != FLOAT_MIN && SCALES != E8M0 && (!HAS_ZERO || (ZERO_IN_BASE && !HAS_MIN));

// The bit position of the codes of a column pair (2 * step + half) of a tile.
DEV constexpr u32 position_of(int pair) { return ((u32)POSITIONS >> 4 * pair) & 15u; }

// Scale and base of sub-block `g` of a row; `of_row` holds the unit's float16 numbers of the row.
DEV void numbers_of(const Table& table, const u32* words, u32 of_row, int g, float& scale, float& base) {
  scale_of(table, words, g, scale, base);
  scale *= (HAS_FLOATS ? low_f16(of_row) : 1.0f) * FACTOR;
  base *= TWO_FLOATS ? -high_f16(of_row) : FACTOR;
}

// Dequantize 64 columns of chunk `odd` of a unit to the operands of four MMA steps.
DEV void decode_bf16(
    const Table& table, const Chunk& chunk, const Floats& floats, int odd, int tile, u32 weights[4][4]) {
  codes_of_tile(table, chunk, floats, odd, tile, weights);
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
      float scale, base;
      numbers_of(table, chunk.scales[h], floats.of_row[h], (4 * tile + s) * 16 / SUB_BLOCK, scale, base);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32& pair = weights[s][2 * j + h];
        const u32 position = position_of(2 * s + j);
        if constexpr (IN_PAIRS) {
          const float larger = 64.0f * scale;
          const u32 first = to_bf16x2(larger, larger);
          const float rest = larger - __uint_as_float(first << 16);
          const u32 second = to_bf16x2(rest, rest);
          const bool fits = position + BITS <= 8;
          const u32 value = fma_bf16x2(fits ? pair : pair >> position,
                                       power_bf16x2(127 - (fits ? position : 0)), minus_bf16x2(WHOLE_ZERO));
          pair = fma_bf16x2(value, first, fma_bf16x2(value, second, 0));
        } else if constexpr (UNIT_IN_SCALE) {
          // a code is a float16 subnormal: 2**-24 times 2**position
          const float up = __uint_as_float((127u - position) << 23) / UNIT;
          const float from = HAS_ZERO ? -ZERO * scale : base;
          pair = to_bf16x2(fmaf(scale * up, low_f16(pair), from), fmaf(scale * up, high_f16(pair), from));
        } else {
          const float2 values = values_of(table, pair, position);
          pair = to_bf16x2(fmaf(scale, values.x, base), fmaf(scale, values.y, base));
        }
      }
    }
  }
}

// acc += weights . x of R row tiles, for tile `tile` of a record's chunk.
template <int R, int NB>
DEV void multiply_tile(const u32 (*weights)[4][4], const u8* record, int tile, int lane, float (*acc)[4]) {
  using Of = Record<NB>;
  record += 2 * tile * Of::GROUP + Of::token_of_column(lane >> 2) * 64 + (lane & 3) * 16;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint4 x = *(const uint4*)(record + i * Of::GROUP);
#pragma unroll
    for (int r = 0; r < R; r++) mma_bf16(acc[r], weights[r][2 * i], x.x, x.y);
#pragma unroll
    for (int r = 0; r < R; r++) mma_bf16(acc[r], weights[r][2 * i + 1], x.z, x.w);
  }
}
