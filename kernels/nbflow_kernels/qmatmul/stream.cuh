// Units multiplied as they come: while a warp decodes one it has the next one's bytes on their way.
#pragma once
#include "qmatmul/staging.cuh"

constexpr int NB = TOKENS;

// A lane's part of a unit, or of one of its chunks if both would be too many registers.
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

// Multiply a unit of `n_chunks`; its registers take the next one's bytes (`n_next` chunks) as soon as
// they are free.  With WHOLE units have two chunks always, and nothing depends on it.
DEV void multiply_unit(
    const Table& table, Unit& now, const u8* unit, int n_chunks, const u8* next, int n_next,
    const u8* records, int lane, float acc[4]) {
  const Floats floats = now.floats;
  now.floats.load(next, lane);
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    Chunk& chunk = now.chunks[odd % AHEAD];
    // what comes into its place
    const bool own = AHEAD == 1 && odd == 0 && (WHOLE || n_chunks == 2);
    const u8* from = own ? chunk_of(unit, 1) : chunk_of(next, odd % AHEAD);
    const bool there = WHOLE || own || odd % AHEAD < n_next;
    if (WHOLE || odd < n_chunks) {
      u32 operand[1][8][4];
      auto before = [&](int tile) {
        decode_tile(table, chunk.w, tile, operand[0] + 4 * tile);
        if (tile == 1 && there) chunk.load_words(from, lane);
      };
      multiply_chunk<1, NB>(before, table, operand, &chunk, &floats,
                            records + odd * Record<NB>::BYTES, lane, (float(*)[4])acc);
      if (there) chunk.load_scales(from, lane);
    } else if (AHEAD == 2 && there) {
      chunk.load_words(from, lane);
      chunk.load_scales(from, lane);
    }
    __syncwarp();  // keeps the compiler from loading fragments of both chunks at once: registers
  }
}
