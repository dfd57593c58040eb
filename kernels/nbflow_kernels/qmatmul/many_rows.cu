// The product for many tokens, from records that `stage_rows` has written to global memory.
//
// A warp computes ROW_TILES row tiles for TOKEN_TILES groups of 8 tokens: it decodes a chunk of its
// weights once, has the next AHEAD chunks on their way, and reads the tokens' fragments from a ring in
// shared memory that `cp.async` fills for all warps.  A slot's sum is added to the total, or put aside where
// blockIdx.y divides the slots among thread blocks.  The arithmetic is that of `few_rows.cu`: the same bits.
#include "qmatmul/slots.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, RING = 4;
constexpr int AHEAD = CHUNK_WORDS > 12 ? 1 : 2;
constexpr int RECORD = Record<8>::BYTES, STAGE = TOKEN_TILES * RECORD;
constexpr int RESULTS = TOKEN_TILES * ROW_TILES * 4;  // of a thread

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

// A chunk of a warp's row tiles, on its way or here.
struct Tiles {
  Chunk chunks[ROW_TILES];
  Floats floats[ROW_TILES];

  DEV void load_words(const u8* const* units, int chunk, int lane) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
      chunks[r].load_words(chunk_of(units[r] + (chunk >> 1) * UNIT_BYTES, chunk & 1), lane);
  }

  DEV void load_scales(const u8* const* units, int chunk, int lane) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      const u8* unit = units[r] + (chunk >> 1) * UNIT_BYTES;
      chunks[r].load_scales(chunk_of(unit, chunk & 1), lane);
      floats[r].load(unit, lane);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) many_rows(
    const u8* weights, const u8* records, const float* bias, float* out, float* partial, int* arrived,
    long long tile_bytes, long long out_stride, int n_tokens, int n_rows, int n_columns,
    int block_tiles, int accumulate) {
  extern __shared__ __align__(16) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int per_block = SLOTS / gridDim.y, n_tiles = (n_rows + 15) / 16;
  const int n_chunks = (n_columns + CHUNK - 1) / CHUNK;
  const int first_slot = blockIdx.y * per_block, end_slot = first_slot + per_block;
  const int step_0 = slot_step(first_slot, n_columns), step_1 = slot_step(end_slot, n_columns);
  const int chunk_0 = step_0 / 2, chunk_1 = step_0 < step_1 ? min((step_1 + 1) / 2, n_chunks) : chunk_0;
  const int n_groups = (n_tokens + 7) / 8, group_0 = blockIdx.z * TOKEN_TILES;
  const int groups = min(TOKEN_TILES, n_groups - group_0);
  const int tile_0 = blockIdx.x * block_tiles + warp * ROW_TILES;
  const int tile_1 = min(min((blockIdx.x + 1) * block_tiles, n_tiles), tile_0 + ROW_TILES);

  u32 ring;
  asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(ring) : "l"(shared));
  auto fetch = [&](int chunk) {
    if (chunk < chunk_1) {
      const u8* from = records + ((long long)chunk * n_groups + group_0) * RECORD;
      for (int i = threadIdx.x * 16; i < groups * RECORD; i += THREADS * 16)
        copy_16(ring + (chunk - chunk_0) % RING * STAGE + i, from + i);
    }
    end_copies();
  };

  // a row tile behind the last is the last once more
  const u8* units[ROW_TILES];
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) units[r] = weights + min(tile_0 + r, n_tiles - 1) * tile_bytes;
  float acc[TOKEN_TILES][ROW_TILES][4] = {};
  float* totals = (float*)(shared + RING * STAGE) + threadIdx.x;  // [result][thread]
#pragma unroll
  for (int i = 0; i < RESULTS; i++) totals[i * THREADS] = 0.0f;

  // All slots that end at a step: to the totals, or aside.
  int slot = first_slot;
  auto end_slots = [&](int step) {
    for (; slot < end_slot && slot_step(slot + 1, n_columns) <= step; slot++) {
#pragma unroll
      for (int m = 0; m < TOKEN_TILES; m++) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
          const float* sums = acc[m][r];
          if (gridDim.y > 1) {
            const long long tile = (long long)(group_0 + m) * n_tiles + tile_0 + r;
            float* to = partial_at(partial, tile, slot) + (lane >> 2) * 8 + (lane & 3) * 2;
            if (m < groups && tile_0 + r < tile_1) {
              *(float2*)to = make_float2(sums[0], sums[1]);
              *(float2*)(to + 64) = make_float2(sums[2], sums[3]);
            }
          } else {
#pragma unroll
            for (int i = 0; i < 4; i++) totals[((m * ROW_TILES + r) * 4 + i) * THREADS] += sums[i];
          }
#pragma unroll
          for (int i = 0; i < 4; i++) acc[m][r][i] = 0.0f;
        }
      }
    }
  };

  Tiles tiles[AHEAD];
  Table table;
  table.load(n_rows >> 31, lane);
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (tile_0 < tile_1 && chunk_0 + i < chunk_1) {
      tiles[i].load_words(units, chunk_0 + i, lane);
      tiles[i].load_scales(units, chunk_0 + i, lane);
    }
  }
#pragma unroll
  for (int i = 0; i < RING - 1; i++) fetch(chunk_0 + i);
  end_slots(step_0);

  auto multiply = [&](Tiles& now, int chunk) {
    const u8* stage = shared + (chunk - chunk_0) % RING * STAGE;
    const int next = chunk + AHEAD;
    if constexpr (ARITHMETIC == BF16) {
#pragma unroll
      for (int tile = 0; tile < 2; tile++) {
        const int step = 2 * chunk + tile;
        const bool own = step_0 <= step && step < step_1;
        u32 operand[ROW_TILES][4][4];
        if (own) {
#pragma unroll
          for (int r = 0; r < ROW_TILES; r++)
            decode_bf16(table, now.chunks[r], now.floats[r], tile, operand[r]);
        }
        if (tile == 1 && next < chunk_1) now.load_words(units, next, lane);
        if (own) {
#pragma unroll
          for (int m = 0; m < TOKEN_TILES; m++)
            if (m < groups) multiply_tile<ROW_TILES, 8>(operand, stage + m * RECORD, tile, lane, acc[m]);
          if (tile == 0) end_slots(step + 1);
        }
      }
    } else {
      u32 operand[ROW_TILES][8][4];
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) decode_chunk(table, now.chunks[r].w, operand[r]);
      if (next < chunk_1) now.load_words(units, next, lane);
#pragma unroll
      for (int m = 0; m < TOKEN_TILES; m++)
        if (m < groups)
          multiply_chunk<ROW_TILES, 8>([](int) {}, table, operand, now.chunks, now.floats,
                                       stage + m * RECORD, lane, acc[m]);
    }
    if (next < chunk_1) now.load_scales(units, next, lane);
    end_slots(2 * chunk + 2);
  };
#pragma unroll 1
  for (int chunk = chunk_0; chunk < chunk_1; chunk += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (chunk + i >= chunk_1) break;
      wait_for_copies<RING - 2>();
      __syncthreads();
      fetch(chunk + i + RING - 1);
      if (tile_0 < tile_1) multiply(tiles[i], chunk + i);
    }
  }
  if (tile_0 < tile_1) end_slots(step_1);

  const Output output = {out, bias, out_stride, n_rows, (float)accumulate};
  if (gridDim.y > 1) {
    if (!last_to_arrive(arrived + blockIdx.z * gridDim.x + blockIdx.x, gridDim.y)) return;
    for (int i = 0; i < groups * ROW_TILES; i++) {
      const int group = group_0 + i / ROW_TILES, tile = tile_0 + i % ROW_TILES;
      if (tile >= tile_1) continue;
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
      if (m >= groups || tile_0 + r >= tile_1) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = (lane >> 2) + 8 * (i >> 1), token = (group_0 + m) * 8 + 2 * (lane & 3) + (i & 1);
        if (token < n_tokens)
          output.put(totals[((m * ROW_TILES + r) * 4 + i) * THREADS], (tile_0 + r) * 16 + row, token);
      }
    }
  }
}
