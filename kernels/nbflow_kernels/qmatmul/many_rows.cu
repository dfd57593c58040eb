// The product for many tokens, from records that `stage_rows` has written to global memory.
//
// A warp computes ROW_TILES row tiles for TOKEN_TILES groups of 8 tokens: it decodes a chunk of its
// weights once, and reads the tokens' fragments from a ring in shared memory that `cp.async` fills.  A
// slot's sum is added to the total, or put aside where blockIdx.y divides the slots among thread
// blocks.  The arithmetic is `multiply_chunk`, as for few tokens: the same bits.
#include "qmatmul/slots.cuh"

constexpr int WARPS = 8, RING = 3;
constexpr int RECORD = Record<8>::BYTES, STAGE = TOKEN_TILES * RECORD;

// Records of all tokens: thread block (chunk, group of 8 tokens), a warp for each token.
extern "C" __global__ void __launch_bounds__(256) stage_rows(
    const float* x, u8* records, long long x_stride, int n_tokens, int n_columns, int int8) {
  const int lane = threadIdx.x & 31, n = threadIdx.x >> 5;
  const int row = blockIdx.y * 8 + n;
  const bool wide = (((unsigned long long)x | 4 * x_stride) & 15) == 0;
  float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
  if (row < n_tokens) v = load_four(x + row * x_stride, blockIdx.x * CHUNK + 4 * lane, n_columns, wide);
  if (int8) v = rounded_to_int8(v);
  stage<8>(v, records + ((long long)blockIdx.x * gridDim.y + blockIdx.y) * RECORD, n, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, PER_SM) many_rows(
    const u8* weights, const u8* records, const float* bias, float* out, float* partial, int* arrived,
    long long tile_bytes, long long out_stride, int n_tokens, int n_rows, int n_columns,
    int accumulate) {
  extern __shared__ __align__(16) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int per_block = SLOTS / gridDim.y, n_tiles = (n_rows + 15) / 16;
  const int n_chunks = (n_columns + CHUNK - 1) / CHUNK, n_units = (n_chunks + 1) / 2;
  const int first_slot = blockIdx.y * per_block, n_groups = (n_tokens + 7) / 8;
  const int chunk_0 = 2 * slot_start(first_slot, n_units);
  const int chunk_1 = min(2 * slot_start(first_slot + per_block, n_units), n_chunks);
  const int group_0 = blockIdx.z * TOKEN_TILES, groups = min(TOKEN_TILES, n_groups - group_0);
  const int tile_0 = (blockIdx.x * WARPS + warp) * ROW_TILES;

  u32 ring;
  asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(ring) : "l"(shared));
  auto fetch = [&](int chunk) {
    if (chunk < chunk_1) {
      const u8* from = records + ((long long)chunk * n_groups + group_0) * RECORD;
      for (int i = threadIdx.x * 16; i < groups * RECORD; i += 32 * WARPS * 16)
        copy_16(ring + (chunk % RING) * STAGE + i, from + i);
    }
    end_copies();
  };

  // row tiles behind the last compute it once more
  const u8* first = weights + min(tile_0, n_tiles - 1) * tile_bytes;
  const u32 second = tile_0 + 1 < n_tiles ? tile_bytes : 0;
  auto unit_at = [&](int r, int chunk) { return first + (r ? second : 0) + (chunk >> 1) * UNIT_BYTES; };

  float acc[TOKEN_TILES][ROW_TILES][4] = {}, total[TOKEN_TILES][ROW_TILES][4] = {};
  Chunk chunks[ROW_TILES];
  Table table;
  table.load(n_rows >> 31, lane);
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
    if (chunk_0 < chunk_1) chunks[r].load_words(chunk_of(unit_at(r, chunk_0), 0), lane);
#pragma unroll
  for (int i = 0; i < RING - 1; i++) fetch(chunk_0 + i);

  int chunk = chunk_0;
  for (int slot = first_slot; slot < first_slot + per_block; slot++) {
    const int end = min(2 * slot_start(slot + 1, n_units), n_chunks);
#pragma unroll 1
    for (; chunk < end; chunk++) {
      wait_for_copies<RING - 2>();
      __syncthreads();
      fetch(chunk + RING - 1);
      u32 operand[ROW_TILES][8][4];
      Chunk scales[ROW_TILES];
      Floats floats[ROW_TILES];
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
        scales[r].load_scales(chunk_of(unit_at(r, chunk), chunk & 1), lane);
        floats[r].load(unit_at(r, chunk), lane);
        decode_chunk(table, chunks[r].w, operand[r]);
        if (chunk + 1 < chunk_1)
          chunks[r].load_words(chunk_of(unit_at(r, chunk + 1), (chunk + 1) & 1), lane);
      }
#pragma unroll
      for (int m = 0; m < TOKEN_TILES; m++)
        if (m < groups)
          multiply_chunk<ROW_TILES, 8>([](int) {}, table, operand, scales, floats,
                                       shared + (chunk % RING) * STAGE + m * RECORD, lane, acc[m]);
    }
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; m++) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
        const long long tile = (long long)(group_0 + m) * n_tiles + tile_0 + r;
        float* to = partial_at(partial, tile, slot) + (lane >> 2) * 8 + (lane & 3) * 2;
        if (gridDim.y > 1 && m < groups && tile_0 + r < n_tiles) {
          *(float2*)to = make_float2(acc[m][r][0], acc[m][r][1]);
          *(float2*)(to + 64) = make_float2(acc[m][r][2], acc[m][r][3]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) total[m][r][i] += acc[m][r][i], acc[m][r][i] = 0.0f;
      }
    }
  }

  const Output output = {out, bias, out_stride, n_rows, (float)accumulate};
  if (gridDim.y > 1) {
    if (!last_to_arrive(arrived + blockIdx.z * gridDim.x + blockIdx.x, gridDim.y)) return;
    for (int i = 0; i < groups * ROW_TILES; i++) {
      const int group = group_0 + i / ROW_TILES, tile = tile_0 + i % ROW_TILES;
      if (tile >= n_tiles) continue;
      for (int e = lane; e < 128; e += 32) {  // neighbouring lanes write neighbouring rows
        const int row = e % 16, token = group * 8 + e / 16;
        const float* sums = partial_at(partial, (long long)group * n_tiles + tile, 0);
        if (token < n_tokens)
          output.put(sum_of_slots(sums + row * 8 + e / 16), tile * 16 + row, token);
      }
    }
    return;
  }
#pragma unroll
  for (int m = 0; m < TOKEN_TILES; m++) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      if (m >= groups || tile_0 + r >= n_tiles) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = (lane >> 2) + 8 * (i >> 1), token = (group_0 + m) * 8 + 2 * (lane & 3) + (i & 1);
        if (token < n_tokens) output.put(total[m][r][i], (tile_0 + r) * 16 + row, token);
      }
    }
  }
}
