// Dequantize units to rows of bfloat16.
//
// A warp writes a chunk of a row tile; `row_0` is a multiple of 16.  Rows are padded with zeros to multiples
// of 32 columns, which are in fragment order (`column_at` in `matmul/cuda_mma_common.cuh`).
#include "quantized_matmul/cuda_bf16.cuh"

extern "C" __global__ void __launch_bounds__(128) unpack(
    const u8* weights, u16* out, long long tile_bytes, int row_0, int n_rows, int n_columns) {
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
  u32 codes[8][4];
  codes_of_tile(table, part, floats, chunk & 1, 0, codes);
  codes_of_tile(table, part, floats, chunk & 1, 1, codes + 4);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = blockIdx.y * 16 + (lane >> 2) + 8 * h;
    u32 pairs[4];  // of two MMA steps
#pragma unroll
    for (int s = 0; s < 8; s++) {
      float scale, base;
      numbers_of(table, part.scales[h], floats.of_row[h], s * 16 / SUB_BLOCK, scale, base);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int k = chunk * CHUNK + 16 * s + 8 * j + 2 * (lane & 3);
        const float2 values = values_of(table, codes[s][2 * j + h], position_of(2 * (s & 3) + j));
        const float v0 = fmaf(scale, values.x, base), v1 = fmaf(scale, values.y, base);
        pairs[2 * (s & 1) + j] = to_bf16x2(k < n_columns ? v0 : 0.0f, k + 1 < n_columns ? v1 : 0.0f);
      }
      const int piece = chunk * CHUNK + 16 * (s - 1), stride = (n_columns + 31) / 32 * 32;
      if ((s & 1) && piece < stride && row < n_rows)
        *(uint4*)(out + (long long)row * stride + piece + 8 * (lane & 3)) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}
