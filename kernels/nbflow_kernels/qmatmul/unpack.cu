// Weights in units as rows of numbers: float32, the same bits as on the CPU, or rounded to bfloat16.
//
// A warp writes a chunk of a row tile; `row_0` is a multiple of 16.
#include "quants/units.cuh"

template <class T>
DEV void put(T* out, long long at, float v0, float v1, bool both) {
  if constexpr (sizeof(T) == 4) {
    out[at] = v0;
    if (both) out[at + 1] = v1;
  } else {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(v1), "f"(v0));
    out[at] = (u16)pair;
    if (both) out[at + 1] = (u16)(pair >> 16);
  }
}

template <class T>
__global__ void __launch_bounds__(128) unpack(
    const u8* weights, T* out, long long tile_bytes, int row_0, int n_rows, int n_columns) {
  const int lane = threadIdx.x & 31, chunk = blockIdx.x * 4 + (threadIdx.x >> 5);
  if (chunk * CHUNK >= n_columns) return;
  const u8* unit = weights + (row_0 / 16 + blockIdx.y) * tile_bytes + (chunk >> 1) * UNIT_BYTES;
  Chunk part;
  Floats floats;
  floats.load(unit, lane);
  part.load_scales(chunk_of(unit, chunk & 1), lane);
  part.load_words(chunk_of(unit, chunk & 1), lane);
  Table table;
  table.load(n_rows >> 31, lane);
  u32 operand[8][4];
  decode_chunk(table, part.w, operand);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = blockIdx.y * 16 + (lane >> 2) + 8 * h;
    if (row >= n_rows) continue;
    const float d = HAS_FLOATS ? low_f16(floats.of_row[h]) : 1.0f;
#pragma unroll
    for (int s = 0; s < 8; s++) {
      float scale, base;
      scale_of(table, part.scales[h], s * 16 / SUB_BLOCK, scale, base);
      scale *= d * FACTOR, base *= TWO_FLOATS ? -high_f16(floats.of_row[h]) : FACTOR;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int k = chunk * CHUNK + 16 * s + 8 * j + 2 * (lane & 3);
        if (k >= n_columns) continue;
        // the code's unit is 2**-24 times 2**position of its slot
        const u32 position = ((u32)POSITIONS >> 4 * (2 * (s & 3) + j)) & 15u;
        const float up = __uint_as_float((127u - position) << 23) / UNIT;
        const u32 codes = operand[s][2 * j + h];
        const float v0 = fmaf(scale, low_f16(codes) * up - ZERO, base);
        const float v1 = fmaf(scale, high_f16(codes) * up - ZERO, base);
        put(out, (long long)row * n_columns + k, v0, v1, k + 1 < n_columns);
      }
    }
  }
}
