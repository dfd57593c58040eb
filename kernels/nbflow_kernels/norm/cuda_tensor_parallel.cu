// RMSNorm of rows that are sharded over ranks: sums of squares of a shard, and scaling by their total.
//
// A thread block has a row.  The order of additions depends on the width of the shard alone.
#include "cuda/block_reduce.cuh"
#include "norm/normalize.cuh"

// out[t] = sum of squares of row t, or 0 if it does not count.
extern "C" __global__ void __launch_bounds__(256) sum_squares(
    const float* x, float* out, int E, long long x_row, long long out_row, int counts) {
  __shared__ float scratch[8];
  x += blockIdx.x * x_row;
  float sum = 0.0f;
  if (counts)
    for (int i = threadIdx.x; i < E; i += 256) sum = __fmaf_rn(x[i], x[i], sum);
  sum = reduce_block<256>(sum, Sum(), scratch);
  if (threadIdx.x == 0) out[blockIdx.x * out_row] = sum;
}

// out = x / sqrt(sums[t] / width + eps) * (weight + offset).
extern "C" __global__ void __launch_bounds__(256) rms_with_sums(
    const float* x, const float* sums, const float* weight, float* out, int E, long long x_row,
    long long sums_row, long long out_row, float width, float eps, float offset) {
  const float factor = norm_factor(sums[blockIdx.x * sums_row], width, eps);
  x += blockIdx.x * x_row, out += blockIdx.x * out_row;
  for (int i = threadIdx.x; i < E; i += 256)
    out[i] = __fmul_rn(__fmul_rn(x[i], factor), __fadd_rn(weight[i], offset));
}
