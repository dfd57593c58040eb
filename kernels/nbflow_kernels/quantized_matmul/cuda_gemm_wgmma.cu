// GEMM by `wgmma` with block-format weights, dequantized to bfloat16 in registers, and bfloat16 activations.
// The weights of a step are dequantized while the MMAs of the step before run.
//
// Weights have the bits that `cuda_dequantize.cu` writes, and sums the order of `matmul/cuda_mma.cu`: the
// results have the same bits as `cuda_dequant_gemm.py`.
#include "matmul/cuda_wgmma_mainloop.cuh"
#include "quantized_matmul/cuda_bf16.cuh"

struct Decoded {
  const u8* units;  // of this warp's row tile
  int lane, n_chunks;
  u32 zero;
  Table table;
  Chunk now, ahead;
  Floats floats_now, floats_ahead;
  u32 next[4][4];

  // Row tiles are clamped to the last one.
  DEV Decoded(const u8* weights, i64 tile_bytes, int row_0, int n_rows, int n_columns) {
    const int tile = row_0 / 16 + (threadIdx.x >> 5);
    lane = threadIdx.x & 31;
    units = weights + min(tile, (n_rows - 1) / 16) * tile_bytes;
    n_chunks = (n_columns + CHUNK - 1) / CHUNK;
    zero = n_rows >> 31;
    table.load(zero, lane);
    load(0);
  }

  DEV_METHOD void load(int chunk) {
    const u8* unit = units + (chunk >> 1) * UNIT_BYTES;
    const u8* from = chunk_of(unit, chunk & 1);
    floats_ahead.load(unit, lane);
    ahead.load_scales(from, lane);
    ahead.load_words(from, lane);
  }

  DEV_METHOD void fetch(int step) {
    const int odd = step >> 1 & 1;
    if (step & 1) {
      decode_bf16(table, now, floats_now, odd, 1, next);
    } else {
      now = ahead, floats_now = floats_ahead;
      if (step / 2 + 1 < n_chunks) load(step / 2 + 1);
      decode_bf16(table, now, floats_now, odd, 0, next);
    }
  }

  // The new operands depend on the old ones (`zero` is 0 at run time): else the compiler writes them to
  // registers that MMAs in flight still read, and waits.
  DEV_METHOD void take(int step, u32 (&operands)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) operands[i][j] = next[i][j] ^ (operands[i][j] & zero);
  }
};

// Thread block (token tile, row tile): neighbours share weights in the L2 cache.
template <int TOKENS>
__global__ void IN_CLUSTERS __launch_bounds__(128 * WARPGROUPS, 1) gemm(
    const u8* weights, const u8* staged, const float* bias, float* out, i64 tile_bytes, i64 out_stride,
    int n_staged, int n_tokens, int n_rows, int n_columns, int n_steps, int accumulate) {
  extern __shared__ __align__(16) u8 shared[];
  const int row_0 = blockIdx.y * TILE_ROWS, token_0 = blockIdx.x * TOKENS;
  Decoded rows(weights, tile_bytes, row_0, n_rows, n_columns);
  const TokenRing<1, TOKENS> ring(shared, staged, token_0, n_staged, n_steps);
  float total[TOKENS / 2];
  mainloop<BF16_KIND>(rows, ring, total);
  write_sums<TOKENS>({out, bias, nullptr, out_stride, n_rows, n_tokens, accumulate}, total, row_0, token_0);
}
