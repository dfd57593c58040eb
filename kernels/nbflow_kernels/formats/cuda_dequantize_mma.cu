// Row gather with dequantization of weights in the MMA layout (`layout_mma.py`), with the bits that
// `cuda_dequantize.cu` decodes from storage bytes.
#include "formats/decode_mma.cuh"

DEV void store_pair(float* to, float2 v) { *(float2*)to = v; }
DEV void store_pair(u16* to, float2 v) { *(u32*)to = to_f16x2(v.x, v.y); }
DEV void store(float* to, float x) { *to = x; }
DEV void store(u16* to, float x) { *to = to_f16x2(x, 0.0f); }

// out[t] = row ids[t] (t if ids is null) * factor.  An index out of range gives NaN.
//
// Four threads decode a chunk of a row: those lanes of an MMA fragment that hold it.  Matrices of
// `matrix_rows` rows follow each other.  `wide`: pairs of columns are aligned in out.
template <class T>
__global__ void __launch_bounds__(128) decode_rows(
    const u8* weights, const int* ids, T* out, int n_rows, int n_out, int columns, int matrix_rows,
    long long tile_bytes, float factor, int wide) {
  const int part = blockIdx.x * 128 + threadIdx.x, lane = part & 3;
  // threads past the last column decode the last chunk again: lanes of a warp look up for each other
  const int last = (columns - 1) / CHUNK, chunk = min(part >> 2, last);
  Table table;
  table.load(n_rows >> 31, threadIdx.x & 31);
  const long long matrix_tiles = (matrix_rows + 15) / 16;
  for (int t = blockIdx.y; t < n_out; t += gridDim.y) {
    const int row = ids != nullptr ? ids[t] : t;
    const bool known = 0 <= row && row < n_rows;
    const int in_matrix = known ? row % matrix_rows : 0, in_tile = in_matrix & 15;
    const long long tile = known ? row / matrix_rows * matrix_tiles + in_matrix / 16 : 0;
    const u8* unit = weights + tile * tile_bytes + (chunk >> 1) * UNIT_BYTES;
    const u8* at = chunk_of(unit, chunk & 1);
    Chunk fragment;
    fragment.load_words(at, 4 * (in_tile & 7) + lane);
    u32 words[ROW_WORDS ? ROW_WORDS : 1];
    Floats floats = {};
    load_bytes<ROW_BYTES>(words, at + in_tile * ROW_BYTES);
    floats.load(unit, 4 * (in_tile & 7));
    const u32 of_row = floats.of_row[in_tile >> 3];
    u32 operand[8][4];
    codes_of_tile(table, fragment, floats, chunk & 1, 0, operand);
    codes_of_tile(table, fragment, floats, chunk & 1, 1, operand + 4);
#pragma unroll
    for (int s = 0; s < 8; s++) {
      float scale, base;
      scale_of(table, words, s * 16 / SUB_BLOCK, scale, base);
      scale *= (HAS_FLOATS ? low_f16(of_row) : 1.0f) * FACTOR;
      base *= TWO_FLOATS ? -high_f16(of_row) : FACTOR;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int k = chunk * CHUNK + 16 * s + 8 * j + 2 * lane;
        const u32 codes = in_tile < 8 ? operand[s][2 * j] : operand[s][2 * j + 1];
        const u32 position = (u32)POSITIONS >> 4 * (2 * (s & 3) + j) & 15u;
        float2 v = values_of(table, codes, position);
        v.x = (HAS_MIN ? fmaf(scale, v.x, base) : scale * v.x) * factor;
        v.y = (HAS_MIN ? fmaf(scale, v.y, base) : scale * v.y) * factor;
        if (!known) v.x = v.y = nan32();
        if (k >= columns || part >> 2 > last) continue;
        T* to = out + (long long)t * columns + k;
        if (wide) {
          store_pair(to, v);
        } else {
          store(to, v.x);
          if (k + 1 < columns) store(to + 1, v.y);
        }
      }
    }
  }
}
