// GEMM by `wgmma` with row-major weights in float16 or bfloat16.
//
// As in `cuda_mma.cu`, lane t of four takes columns 8 t to 8 t + 7 of 32 of rows g and g + 8: one 16-byte
// chunk gives its operands of two steps of 16.  A lane copies its own chunks to a ring in shared memory that
// no other lane reads; tokens are permuted alike (`position_of_column`).
#include "matmul/cuda_wgmma_mainloop.cuh"

struct RowMajorWeights {
  static constexpr int RING = 4, STAGE = 128 * WARPGROUPS * 64;

  const u16* rows[2];
  int k, n_columns, n_steps;  // k: first column of this lane
  u8* chunks;

  // Row numbers are clamped to the last row.
  DEV RowMajorWeights(u8* ring, const u16* weights, int row_0, int n_rows, int n_columns, int n_steps)
      : n_columns(n_columns), n_steps(n_steps), chunks(ring + 16 * threadIdx.x) {
    const int lane = threadIdx.x & 31, row = row_0 + (threadIdx.x >> 5) * 16 + (lane >> 2);
    k = 8 * (lane & 3);
#pragma unroll
    for (int h = 0; h < 2; h++) rows[h] = weights + (i64)min(row + 8 * h, n_rows - 1) * n_columns;
    for (int step = 0; step < RING - 2; step++) copy(step);
  }

  DEV_METHOD void copy(int step) const {
    if (step < n_steps) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = step * STEP + 32 * (j >> 1) + k;
        const bool valid = at < n_columns;  // rows are multiples of 8
        copy_16_or_zeros(shared_place(chunks + step % RING * STAGE + j * (STAGE / 4)),
                         rows[j & 1] + (valid ? at : 0), valid);
      }
    }
    end_copies();
  }

  DEV_METHOD void fetch(int step) const { copy(step + RING - 2); }

  DEV_METHOD void take(int step, u32 (&operands)[4][4]) const {
    wait_for_copies<RING - 2>();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4* at = (const uint4*)(chunks + step % RING * STAGE) + i * (STAGE / 32);
      const uint4 low = at[0], high = at[STAGE / 64];
      const u32 words[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
#pragma unroll
      for (int j = 0; j < 8; j++) operands[2 * i + j / 4][j % 4] = words[j];
    }
  }
};

// Thread block (token tile, row tile): neighbours share rows of weights in the L2 cache.
template <int KIND, int PARTS, int TOKENS>
__global__ void IN_CLUSTERS __launch_bounds__(128 * WARPGROUPS, 1) gemm(
    const u16* weights, const u8* staged, const float* factors, const float* bias, float* out,
    i64 out_stride, int n_staged, int n_tokens, int n_rows, int n_columns, int n_steps, int accumulate) {
  extern __shared__ __align__(16) u8 shared[];
  const int row_0 = blockIdx.y * TILE_ROWS, token_0 = blockIdx.x * TOKENS;
  const RowMajorWeights rows(shared, weights, row_0, n_rows, n_columns, n_steps);
  const TokenRing<PARTS, TOKENS> ring(shared + rows.RING * rows.STAGE, staged, token_0, n_staged, n_steps);
  float total[TOKENS / 2];
  mainloop<KIND>(rows, ring, total);
  write_sums<TOKENS>({out, bias, factors, out_stride, n_rows, n_tokens, accumulate}, total, row_0, token_0);
}
