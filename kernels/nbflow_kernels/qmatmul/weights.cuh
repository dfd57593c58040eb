// Weights of units as the numbers they stand for: the same float32 bits as on the CPU.
#pragma once
#include "quants/units.cuh"

// What the codes of a row's sub-block are multiplied by, and what is added.
struct Scaling {
  float scale, base;

  DEV Scaling(const Table& table, const u32* words, u32 floats_of_row, int sub_block) {
    scale_of(table, words, sub_block, scale, base);
    scale *= (HAS_FLOATS ? low_f16(floats_of_row) : 1.0f) * FACTOR;
    base *= TWO_FLOATS ? -high_f16(floats_of_row) : FACTOR;
  }

  // Two weights of slot 0 to 7 of 64 columns: the code's unit is 2**-24 times 2**position of its slot.
  DEV_METHOD float2 weights(u32 codes, int slot) const {
    const u32 position = ((u32)POSITIONS >> 4 * slot) & 15u;
    const float up = __uint_as_float((127u - position) << 23) / UNIT;
    return make_float2(fmaf(scale, low_f16(codes) * up - ZERO, base),
                       fmaf(scale, high_f16(codes) * up - ZERO, base));
  }
};

// The weights of 64 columns of a chunk, rounded to bfloat16, as the operands of four steps of 16.
template <int TILE>
DEV void decode_rounded(const Table& table, const Chunk& chunk, const Floats& floats, u32 (&operands)[4][4]) {
  decode_tile(table, chunk.w, TILE, operands);
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const Scaling scaling(table, chunk.scales[h], floats.of_row[h], (4 * TILE + s) * 16 / SUB_BLOCK);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float2 v = scaling.weights(operands[s][2 * j + h], 2 * s + j);
        operands[s][2 * j + h] = to_bf16x2(v.x, v.y);
      }
    }
  }
}
