// GEMM main loop by `wgmma` (sm_90), weights in registers: `matmul/cuda_wgmma.cu` reads row-major weights,
// `quantized_matmul/cuda_gemm_wgmma.cu` dequantizes block formats.
//
// A thread block computes 128 rows x TOKENS tokens; each of its two warpgroups has 64 of the rows.  While
// one waits for its MMAs and fetches the weights of its next step, the tensor cores work for the other.
// Tokens are copied in steps of 64 columns by TMA bulk copies to a ring in shared memory; with clusters, each
// thread block multicasts its share of the tokens.  The order of sums and the column at each position of a
// step are those of `cuda_mma.cu`.
#pragma once
#include "cuda/sm90.cuh"
#include "matmul/cuda_mma_common.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(1, CLUSTER, 1)
#else
#define IN_CLUSTERS
#endif

constexpr int WARPGROUPS = 2, TILE_ROWS = 64 * WARPGROUPS, LINE = 2 * STEP;

// Ring of token tiles in shared memory: PARTS * TOKENS lines per step.  A stage is refilled LAG steps after
// its use: one, or two (with one more stage) for clusters, whose thread blocks wait for each other.
template <int PARTS, int TOKENS>
struct TokenRing {
  static constexpr int LAG = CLUSTER > 1 && PARTS * TOKENS <= 256 ? 2 : 1;
  static constexpr int N = (PARTS * TOKENS > 192 ? 3 : 4) + LAG - 1, STAGE = PARTS * TOKENS * LINE;
  static constexpr int SHARE = TOKENS * LINE / CLUSTER;  // bytes of a part that this thread block copies

  u32 stages, arrived, used;  // `arrived` and `used`: a barrier for each stage
  u32 release;                // `used` barriers of the cluster's thread block that this lane signals
  const u8* from;             // lines of the first step and part
  i64 part_bytes;
  int n_steps;

  // `staged`: [step][part][token] lines, written by `stage_swizzled`.
  DEV TokenRing(u8* shared, const u8* staged, int token_0, int n_staged, int n_steps) : n_steps(n_steps) {
    __shared__ u64 barriers[2 * N];
    stages = (shared_place(shared) + 1023) & ~1023u;
    arrived = shared_place(barriers), used = arrived + 8 * N;
    from = staged + (i64)token_0 * LINE + share(), part_bytes = (i64)n_staged * LINE;
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        start_barrier(arrived + 8 * i, 1);
        start_barrier(used + 8 * i, 4 * WARPGROUPS * CLUSTER);
      }
      publish_barriers();
    }
    if constexpr (CLUSTER > 1) {
      release = place_in_cluster(used, threadIdx.x % CLUSTER);
      __syncwarp();
      meet_cluster();
    } else {
      __syncthreads();
    }
    if (threadIdx.x == 0)
      for (int step = 0; step < min(N, n_steps); step++) fetch(step, step);
  }

  // Offset of this thread block's share of the tokens.
  DEV static u32 share() { return CLUSTER > 1 ? rank_in_cluster() * SHARE : 0; }

  // Start the copies of a step to a free stage (of all thread blocks of the cluster); by one thread.
  DEV_METHOD void fetch(int step, int stage) const {
    const u32 barrier = arrived + 8 * stage, to = stages + stage * STAGE;
    arrive_expecting(barrier, STAGE);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const u8* lines = from + (step * PARTS + p) * part_bytes;
      if constexpr (CLUSTER > 1)
        copy_bulk_to_all(to + p * TOKENS * LINE + share(), lines, SHARE, barrier, CLUSTER);
      else
        copy_bulk(to + p * TOKENS * LINE, lines, SHARE, barrier);
    }
  }

  // Signal that the MMAs of this stage are done; by whole warps.
  DEV_METHOD void release_stage(int stage) const {
    if constexpr (CLUSTER > 1) {
      if ((threadIdx.x & 31) < CLUSTER) arrive_in_cluster(release + 8 * stage);
    } else {
      if ((threadIdx.x & 31) == 0) arrive(used + 8 * stage);
    }
  }
};

// Accumulate a warpgroup's rows, split after split.  Weights provides
//   fetch(step)            start loading a step of 64 columns
//   take(step, operands)   the loaded weights as the operands of four steps of 16 columns
template <int NUMBER, int PARTS, int TOKENS, class Weights>
DEV void mainloop(Weights&& weights, const TokenRing<PARTS, TOKENS>& ring, float (&total)[TOKENS / 2]) {
  float acc[TOKENS / 2];
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) acc[i] = total[i] = 0.0f;
  constexpr int LAG = TokenRing<PARTS, TOKENS>::LAG;
  int step = 0, stage = 0;
  u32 parity = 0;
  u32 operands[4][4] = {};
  weights.fetch(0);
#pragma unroll 1
  for (int split = 0; split < SPLITS; split++) {
    const int start = step, end = split_start(split + 1, ring.n_steps);
    if (start == end) continue;
#pragma unroll 1
    for (; step < end; step++) {
      weights.take(step, operands);
      wait_for_phase(ring.arrived + 8 * stage, parity);
      __syncwarp();
      const u64 lines = describe_lines(ring.stages + stage * ring.STAGE);
      hold(acc);
      start_products();
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
#pragma unroll
          for (int i = 2 * pair; i < 2 * pair + 2; i++)
            Product<NUMBER, TOKENS>::run(acc, operands[i], lines + (p * TOKENS * LINE + 32 * i) / 16,
                                       step > start || p > 0 || i > 0);
        }
      }
      end_products();
      if (threadIdx.x == 0 && step >= LAG && step - LAG + ring.N < ring.n_steps) {
        const bool wrapped = stage < LAG;
        const int before = wrapped ? stage + ring.N - LAG : stage - LAG;
        wait_for_phase(ring.used + 8 * before, parity ^ wrapped);  // for the other warpgroups
        ring.fetch(step - LAG + ring.N, before);
      }
      __syncwarp();
      if (step + 1 < ring.n_steps) weights.fetch(step + 1);
      wait_for_products();
      hold(acc);
      ring.release_stage(stage);
      if (++stage == ring.N) stage = 0, parity ^= 1;
    }
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) total[i] += acc[i];
  }
  if constexpr (CLUSTER > 1) {  // the matching wait is at the end of `write_sums`
    __syncwarp();
    leave_cluster();
  }
}

// `Output::put` for every sum, with the loads of 32 tokens in flight at once; at the end of a kernel.
template <int TOKENS>
DEV void write_sums(const Output& output, const float (&total)[TOKENS / 2], int row_0, int token_0) {
  const int lane = threadIdx.x & 31, row = row_0 + (threadIdx.x >> 5) * 16 + (lane >> 2);
  const int token = token_0 + 2 * (lane & 3);
  float* const at = output.out + token * output.stride + row;
  float bias[2];
#pragma unroll
  for (int h = 0; h < 2; h++)
    bias[h] = output.bias && row + 8 * h < output.n_rows ? output.bias[row + 8 * h] : 0.0f;
#pragma unroll
  for (int first = 0; first < TOKENS; first += 32) {
    float factors[8], old[8][2];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int n = first + 8 * (i >> 1) + (i & 1);
      const bool valid = token + n < output.n_tokens;
      factors[i] = valid && output.factors ? output.factors[token + n] : 1.0f;
#pragma unroll
      for (int h = 0; h < 2; h++)
        old[i][h] = valid && output.accumulate && row + 8 * h < output.n_rows
            ? at[n * output.stride + 8 * h] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int n = first + 8 * (i >> 1) + (i & 1);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float v = total[(first + 8 * (i >> 1)) / 2 + 2 * h + (i & 1)] * factors[i] + bias[h];
        if (token + n < output.n_tokens && row + 8 * h < output.n_rows)
          at[n * output.stride + 8 * h] = v + old[i][h];
      }
    }
  }
  if constexpr (CLUSTER > 1) {
    __syncwarp();
    wait_for_cluster();
  }
}

// Write tokens as [step][part][token] lines of 128 bytes, swizzled for `describe_lines` and padded with
// zeros; a thread block per token.  ROW_MAJOR: permute columns as row-major weights need (`position_of_column`).
template <int NUMBER, int PARTS, bool ROW_MAJOR>
__global__ void __launch_bounds__(256) stage_swizzled(
    const float* x, u8* staged, float* factors, i64 x_stride, int n_tokens, int n_columns, int n_steps) {
  const int token = blockIdx.x;
  const float* row = x + token * x_stride;
  const bool valid = token < n_tokens;
  const float up = valid ? scale_token<NUMBER>(row, n_columns, factors) : 0.0f;
  for (int chunk = threadIdx.x; chunk < 8 * n_steps; chunk += 256) {
    union { u16 numbers[8]; uint4 all; } out[PARTS];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int k = 8 * chunk + i, column = ROW_MAJOR ? position_of_column(k) : k;
      u16 numbers[PARTS];
      decompose<NUMBER>(valid && column < n_columns ? row[column] * up : 0.0f, numbers);
#pragma unroll
      for (int p = 0; p < PARTS; p++) out[p].numbers[i] = numbers[p];
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const i64 line = ((i64)(chunk >> 3) * PARTS + p) * gridDim.x + token;
      *(uint4*)(staged + line * LINE + 16 * ((chunk ^ token) & 7)) = out[p].all;
    }
  }
}
