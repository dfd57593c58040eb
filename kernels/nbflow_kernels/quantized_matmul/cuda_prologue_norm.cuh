// Fused norm prologue: tokens are normalized while they are staged.  Every thread block computes the
// statistics of all tokens, which costs a few reads from the L2 cache.
#pragma once
#include "norm/normalize.cuh"
#include "quantized_matmul/cuda_stage_activations.cuh"

enum { NO_NORM, RMS_NORM, LAYER_NORM };

// Weight and bias of a norm (each may be null), and the output of the normalized tokens (null: not written).
struct Scaling {
  const float *weight, *bias;
  float* out;
  i64 out_stride;
};

struct Norm {
  Scaling scaling, second;  // second: another norm of the same tokens, only written
  float eps, offset;        // offset: added to the weights
};

DEV bool is_wide(const float* row) { return ((u64)row & 15) == 0; }

// Store four columns from `k` on of a row of n.
DEV void store_four(float* row, int k, int n, float4 v) {
  if (is_wide(row) && k + 4 <= n) {
    *(float4*)(row + k) = v;
    return;
  }
  if (k < n) row[k] = v.x;
  if (k + 1 < n) row[k + 1] = v.y;
  if (k + 2 < n) row[k + 2] = v.z;
  if (k + 3 < n) row[k + 3] = v.w;
}

// Means (layer norm) and scale factors of rows row(0), row(1), ...; `scratch` is scratch memory, a number per
// chunk.  By all threads of the thread block.
template <int NORM_KIND, class Rows>
DEV void norm_statistics(
    Rows row, int n_rows, int width, float eps, float* scratch, float* means, float* factors) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int n_chunks = (width + NORM_CHUNK - 1) / NORM_CHUNK;
#pragma unroll
  for (int pass = NORM_KIND == LAYER_NORM ? 0 : 1; pass < 2; pass++) {
#pragma unroll 4
    for (int i = warp; i < n_rows * n_chunks; i += WARPS) {
      const int n = i / n_chunks, k = i % n_chunks * NORM_CHUNK + 4 * lane;
      const float* at = row(n);
      float4 v = load_four(at, k, width, is_wide(at));
      if (pass && NORM_KIND == LAYER_NORM) v = centered(v, means[n], k, width);
      const float sum = lane_sum(pass ? squares_of(v) : sum_of(v));
      if (lane == 0) scratch[i] = sum;
    }
    __syncthreads();
    for (int n = warp; n < n_rows; n += WARPS) {
      const float sum = sum_of_chunks(scratch + n * n_chunks, n_chunks);
      if (lane == 0) {
        if (pass) factors[n] = norm_factor(sum, width, eps);
        else means[n] = __fdiv_rn(sum, width);
      }
    }
    __syncthreads();
  }
}

// Normalize columns k to k + 3 of a row.
template <int NORM_KIND>
DEV float4 normalized(
    float4 v, int k, int width, const Scaling& by, float offset, float mean, float factor) {
  if (NORM_KIND == LAYER_NORM) v = centered(v, mean, k, width);
  v = scaled(v, factor);
  if (by.weight != nullptr) {
    float4 w = load_four(by.weight, k, width, is_wide(by.weight));
    if (NORM_KIND == RMS_NORM) w = plus(w, make_float4(offset, offset, offset, offset));
    v = times(v, w);
  }
  if (NORM_KIND == LAYER_NORM && by.bias != nullptr)
    v = plus(v, load_four(by.bias, k, width, is_wide(by.bias)));
  return v;
}

// Call put(n, k, v) with the normalized columns k to k + 3 of each row row(n).  By all threads of the
// thread block; `scratch` as above.
template <int NORM_KIND, class Rows, class Put>
DEV void normalize_rows(
    Rows row, int n_rows, int width, const Scaling& by, float eps, float offset, float* scratch, Put put) {
  __shared__ float means[TOKENS], factors[TOKENS];
  norm_statistics<NORM_KIND>(row, n_rows, width, eps, scratch, means, factors);
  const int lane = threadIdx.x & 31, n_chunks = (width + NORM_CHUNK - 1) / NORM_CHUNK;
  for (int i = threadIdx.x >> 5; i < n_rows * n_chunks; i += WARPS) {
    const int n = i / n_chunks, k = i % n_chunks * NORM_CHUNK + 4 * lane;
    const float4 v = load_four(row(n), k, width, is_wide(row(n)));
    put(n, k, normalized<NORM_KIND>(v, k, width, by, offset, means[n], factors[n]));
  }
}
