// GEMM with block-format weights, from activations staged in global memory by `stage_activations`.
//
// A warp computes ROW_TILES row tiles for TOKEN_TILES groups of 8 tokens: it dequantizes a chunk of its
// weights once, has the next AHEAD chunks in flight, and reads the tokens' fragments from a ring in shared
// memory that `cp.async` fills for all warps.  The sum of a split is added to the total, or written to
// global memory if blockIdx.y divides the splits among thread blocks.  The bits are those of `cuda_gemv.cu`.
#include "quantized_matmul/cuda_split_k.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, RING = 2;
// Chunks of weights in flight, limited by registers.
constexpr int AHEAD = CHUNK_WORDS > 12 || (ARITHMETIC != BF16_SUMS && TOKEN_TILES > 2) ? 1 : 2;
constexpr int RECORD = Record<8>::BYTES, STAGE = TOKEN_TILES * RECORD;
constexpr int RESULTS = TOKEN_TILES * ROW_TILES * 4;  // per thread

// Write the records of all tokens, padded with zeros: thread block (chunk, group of 8 tokens), a warp per
// token.
extern "C" __global__ void __launch_bounds__(256) stage_activations(
    const float* x, u8* records, long long x_stride, int n_tokens, int n_columns, int int8) {
  const int lane = threadIdx.x & 31, n = threadIdx.x >> 5;
  const int row = blockIdx.y * 8 + n;
  const bool wide = (((unsigned long long)x | 4 * x_stride) & 15) == 0;
  float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
  if (row < n_tokens) v = load_four(x + row * x_stride, blockIdx.x * CHUNK + 4 * lane, n_columns, wide);
  if (int8) v = rounded_to_int8(v);
  stage<8>(v, records + ((long long)blockIdx.x * gridDim.y + blockIdx.y) * RECORD, n, lane);
}

// A chunk of a warp's row tiles in registers; the second row tile is `second` bytes after the first.
struct Tiles {
  Chunk chunks[ROW_TILES];
  Floats floats[ROW_TILES];

  DEV void load_words(const u8* unit, u32 second, int odd, int lane) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
      chunks[r].load_words(chunk_of(unit + (r ? second : 0), odd), lane);
  }

  DEV void load_scales(const u8* unit, u32 second, int odd, int lane) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      chunks[r].load_scales(chunk_of(unit + (r ? second : 0), odd), lane);
      floats[r].load(unit + (r ? second : 0), lane);
    }
  }
};

// acc += weights . x for steps `first` to `end` of chunk `odd` of a unit.  Calls `between` after the first step, and
// `decoded` when the weight words are no longer needed.
template <class Between, class Decoded>
DEV void multiply(
    const Table& table, const Tiles& now, int odd, const u8* stage, int first, int end, int groups, int lane,
    float (*acc)[ROW_TILES][4], Between between, Decoded decoded) {
  if constexpr (ARITHMETIC == BF16_SUMS) {
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const bool own = WHOLE || (first <= tile && tile < end);
      u32 operand[ROW_TILES][4][4];
      if (own) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
          decode_bf16(table, now.chunks[r], now.floats[r], odd, tile, operand[r]);
      }
      if (tile == 1) decoded();
      if (own) {
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; m++)
          multiply_tile<ROW_TILES, 8>(operand, stage + m * RECORD, tile, lane, acc[m]);
        if (tile == 0) between();
      }
    }
  } else {
    u32 operand[ROW_TILES][8][OPERANDS];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int tile = 0; tile < 2; tile++)
        decode_tile(table, now.chunks[r], now.floats[r], odd, tile, operand[r] + 4 * tile);
    decoded();
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; m++) {
      // always true; with two MMAs per group it limits the registers that the compiler uses
      if (ARITHMETIC == INT8_SUMS || m < groups)
        multiply_chunk<ROW_TILES, 8>([](int) {}, table, operand, now.chunks, now.floats, stage + m * RECORD,
                                     lane, acc[m]);
      __syncwarp();
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm(
    const u8* weights, const u8* records, const float* bias, float* out, float* partial, int* arrived,
    long long tile_bytes, long long out_stride, int n_tokens, int n_rows, int n_columns,
    int block_tiles, int accumulate) {
  extern __shared__ __align__(16) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int per_block = SPLITS / gridDim.y, n_tiles = (n_rows + 15) / 16;
  const int n_chunks = (n_columns + CHUNK - 1) / CHUNK;
  const int first_split = blockIdx.y * per_block, end_split = first_split + per_block;
  const int step_0 = split_step(first_split, n_columns), step_1 = split_step(end_split, n_columns);
  const int unit_0 = unit_of(step_0), unit_1 = step_0 < step_1 ? units_to(step_1) : unit_0;
  const int chunk_1 = min(2 * unit_1, n_chunks);
  const int n_groups = gridDim.z * TOKEN_TILES, group_0 = blockIdx.z * TOKEN_TILES;
  const int tile_0 = blockIdx.x * block_tiles + warp * ROW_TILES;
  const int tile_1 = min(min((blockIdx.x + 1) * block_tiles, n_tiles), tile_0 + ROW_TILES);

  u32 ring;
  asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(ring) : "l"(shared));
  ring += threadIdx.x * 16;
  const long long chunk_records = (long long)n_groups * RECORD;
  const u8* coming = records + 2 * unit_0 * chunk_records + group_0 * RECORD + threadIdx.x * 16;
  auto fetch = [&](int unit) {
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      if (2 * unit + odd < chunk_1) {
        const u32 to = ring + ((unit % RING) * 2 + odd) * STAGE;
#pragma unroll
        for (int i = 0; i < STAGE; i += 16 * THREADS)
          if (i + 16 * THREADS <= STAGE || i + threadIdx.x * 16 < STAGE) copy_16(to + i, coming + i);
      }
      coming += chunk_records;
    }
    end_copies();
  };

  float acc[TOKEN_TILES][ROW_TILES][4] = {};
  float* totals = (float*)(shared + 2 * RING * STAGE) + threadIdx.x;  // [result][thread]
#pragma unroll
  for (int i = 0; i < RESULTS; i++) totals[i * THREADS] = 0.0f;

  // Add all splits that end at `step` or before to the totals, or write them to `partial`.
  int split = first_split, split_end = split_step(split + 1, n_columns);
  auto end_splits = [&](int step) {
    while (split < end_split && split_end <= step) {
#pragma unroll
      for (int m = 0; m < TOKEN_TILES; m++) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
          float* sums = acc[m][r];
          if (gridDim.y > 1) {
            const long long tile = (long long)(group_0 + m) * n_tiles + tile_0 + r;
            float* to = partial_at(partial, tile, split) + (lane >> 2) * 8 + (lane & 3) * 2;
            if (tile_0 + r < tile_1) {
              *(float2*)to = make_float2(sums[0], sums[1]);
              *(float2*)(to + 64) = make_float2(sums[2], sums[3]);
            }
          } else {
#pragma unroll
            for (int i = 0; i < 4; i++) totals[((m * ROW_TILES + r) * 4 + i) * THREADS] += sums[i];
          }
          sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
        }
      }
      split++;
      split_end = split_step(split + 1, n_columns);
    }
  };

  // row tiles are clamped to the last one
  const u8* unit_at = weights + min(tile_0, n_tiles - 1) * tile_bytes + (long long)unit_0 * UNIT_BYTES;
  const u32 second = tile_0 + 1 < n_tiles ? tile_bytes : 0;
  Tiles tiles[AHEAD];
  Table table;
  table.load(n_rows >> 31, lane);
#pragma unroll
  for (int odd = 0; odd < AHEAD; odd++) {
    if (tile_0 < tile_1 && 2 * unit_0 + odd < chunk_1) {
      tiles[odd].load_words(unit_at, second, odd, lane);
      tiles[odd].load_scales(unit_at, second, odd, lane);
    }
  }
#pragma unroll
  for (int i = 0; i < RING - 1; i++) fetch(unit_0 + i);
  if (tile_0 < tile_1) end_splits(step_0);

#pragma unroll 1
  for (int unit = unit_0; unit < unit_1; unit++) {
    wait_for_copies<RING - 2>();
    __syncthreads();
    fetch(unit + RING - 1);
    if (tile_0 >= tile_1) continue;
    const int first = step_0 - UNIT_STEPS * unit, end = step_1 - UNIT_STEPS * unit;
    const u8* next_unit = unit_at + (unit + 1 < unit_1 ? UNIT_BYTES : 0);  // clamped to the last unit
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      // chunk to load next: the other one of this unit, or one of the next unit
      const bool of_unit = AHEAD == 1 && odd == 0;
      const int next_odd = of_unit ? 1 : AHEAD == 2 ? odd : 0;
      const u8* from = of_unit ? unit_at : next_unit;
      const bool valid = WHOLE || 2 * unit + (of_unit ? 1 : 2 + next_odd) < chunk_1;
      Tiles& now = tiles[odd % AHEAD];
      auto load_words = [&] { if (valid) now.load_words(from, second, next_odd, lane); };
      auto between = [&] { if (!WHOLE) end_splits(UNIT_STEPS * unit + 2 * odd + 1); };
      if (WHOLE || 2 * unit + odd < chunk_1)
        multiply(table, now, odd, shared + ((unit % RING) * 2 + odd) * STAGE, first - 2 * odd, end - 2 * odd,
                 TOKEN_TILES + (n_rows >> 31), lane, acc, between, load_words);
      if (valid) now.load_scales(from, second, next_odd, lane);
      if (odd || (ARITHMETIC == BF16_SUMS && !WHOLE)) end_splits(UNIT_STEPS * unit + 2 * odd + 2);
    }
    unit_at = next_unit;
  }

  const Output output = {out, bias, out_stride, n_rows, (float)accumulate};
  if (gridDim.y > 1) {
    if (!last_to_arrive(arrived + blockIdx.z * gridDim.x + blockIdx.x, gridDim.y)) return;
    for (int i = 0; i < TOKEN_TILES * ROW_TILES; i++) {
      const int group = group_0 + i / ROW_TILES, tile = tile_0 + i % ROW_TILES;
      if (tile >= tile_1) continue;
      for (int e = lane; e < 128; e += 32) {  // coalesced writes
        const int row = e % 16, token = group * 8 + e / 16;
        const float* sums = partial_at(partial, (long long)group * n_tiles + tile, 0);
        if (token < n_tokens)
          output.put(sum_of_splits(sums + row * 8 + e / 16), tile * 16 + row, token);
      }
    }
    return;
  }
#pragma unroll
  for (int m = 0; m < TOKEN_TILES; m++) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      if (tile_0 + r >= tile_1) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = (lane >> 2) + 8 * (i >> 1), token = (group_0 + m) * 8 + 2 * (lane & 3) + (i & 1);
        if (token < n_tokens)
          output.put(totals[((m * ROW_TILES + r) * 4 + i) * THREADS], (tile_0 + r) * 16 + row, token);
      }
    }
  }
}
