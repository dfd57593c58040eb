// Software pipeline of weight units: the next unit is loaded while a warp dequantizes this one.
#pragma once
#include "quantized_matmul/cuda_split_k.cuh"

constexpr int NB = TOKENS;

// A lane's registers of a unit, or of one of its chunks where both would be too many.
constexpr int AHEAD = CHUNK_WORDS > 12 ? 1 : 2;

struct Unit {
  Floats floats;
  Chunk chunks[AHEAD];
};

DEV void load_unit(Unit& to, const u8* unit, int n_chunks, int lane) {
  to.floats.load(unit, lane);
#pragma unroll
  for (int odd = 0; odd < AHEAD; odd++) {
    if (WHOLE || odd < n_chunks) {
      to.chunks[odd].load_scales(chunk_of(unit, odd), lane);
      to.chunks[odd].load_words(chunk_of(unit, odd), lane);
    }
  }
}

// Multiply a unit of `n_chunks`, loading the next unit (`n_next` chunks) into its registers as soon as they
// are free.  WHOLE: all units have two chunks and splits are whole units.  In bfloat16 only steps `first` to
// `end` of the unit belong to this split.
DEV void multiply_unit(
    const Table& table, Unit& now, const u8* unit, int n_chunks, const u8* next, int n_next,
    const u8* records, int lane, float acc[4], int first = 0, int end = UNIT_STEPS) {
  const Floats floats = now.floats;
  now.floats.load(next, lane);
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    Chunk& chunk = now.chunks[odd % AHEAD];
    // chunk to load next
    const bool own = AHEAD == 1 && odd == 0 && (WHOLE || n_chunks == 2);
    const u8* from = own ? chunk_of(unit, 1) : chunk_of(next, odd % AHEAD);
    const bool valid = WHOLE || own || odd % AHEAD < n_next;
    if (WHOLE || odd < n_chunks) {
      const u8* record = records + odd * Record<NB>::BYTES;
      if constexpr (ARITHMETIC == BF16_SUMS) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
          const int step = 2 * odd + tile;
          const bool own_step = WHOLE || (first <= step && step < end);
          u32 operand[1][4][4];
          if (own_step) decode_bf16(table, chunk, floats, odd, tile, operand[0]);
          if (tile == 1 && valid) chunk.load_words(from, lane);
          if (own_step) multiply_tile<1, NB>(operand, record, tile, lane, (float(*)[4])acc);
        }
      } else {
        u32 operand[1][8][OPERANDS];
        auto before = [&](int tile) {
          decode_tile(table, chunk, floats, odd, tile, operand[0] + 4 * tile);
          if (tile == 1 && valid) chunk.load_words(from, lane);
        };
        multiply_chunk<1, NB>(before, table, operand, &chunk, &floats, record, lane, (float(*)[4])acc);
      }
      if (valid) chunk.load_scales(from, lane);
    } else if (AHEAD == 2 && valid) {
      chunk.load_words(from, lane);
      chunk.load_scales(from, lane);
    }
    __syncwarp();  // else fragments of both chunks are loaded at once, which takes too many registers
  }
}
