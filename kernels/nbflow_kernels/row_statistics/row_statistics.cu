// Ops on rows by their statistics; a thread block has a row.  The order of additions depends on the
// width of the row alone.
#include "cuda/block_reduce.cuh"

__device__ inline float block_sum(float v, float* scratch) {
  v = reduce_block<256>(v, Sum(), scratch);
  __syncthreads();  // `scratch` may be used again
  return v;
}

// out = x * sqrt(mean(like ** 2) / max(mean(x ** 2), least)).  out may be x.
extern "C" __global__ void __launch_bounds__(256) match_rms(
    const float* x, const float* like, float* out, int E, long long x_row, long long like_row,
    long long out_row, float least) {
  __shared__ float scratch[8];
  x += blockIdx.x * x_row, like += blockIdx.x * like_row, out += blockIdx.x * out_row;
  float own = 0.0f, other = 0.0f;
  for (int i = threadIdx.x; i < E; i += 256) {
    own = __fmaf_rn(x[i], x[i], own);
    other = __fmaf_rn(like[i], like[i], other);
  }
  own = block_sum(own, scratch), other = block_sum(other, scratch);
  float mean = __fdiv_rn(own, (float)E);
  mean = mean < least ? least : mean;  // a NaN stays
  const float factor = __fsqrt_rn(__fdiv_rn(__fdiv_rn(other, (float)E), mean));
  for (int i = threadIdx.x; i < E; i += 256) out[i] = __fmul_rn(x[i], factor);
}

// out[t] = sum and sum of squares of row t.
extern "C" __global__ void __launch_bounds__(256) row_moments(
    const float* x, float* out, int n, long long x_row, long long out_row) {
  __shared__ float scratch[8];
  x += blockIdx.x * x_row;
  float sum = 0.0f, squares = 0.0f;
  for (int i = threadIdx.x; i < n; i += 256) {
    sum = __fadd_rn(sum, x[i]);
    squares = __fmaf_rn(x[i], x[i], squares);
  }
  sum = block_sum(sum, scratch), squares = block_sum(squares, scratch);
  if (threadIdx.x == 0) {
    out[blockIdx.x * out_row] = sum;
    out[blockIdx.x * out_row + 1] = squares;
  }
}

// out = max(0, x - mean - deviations * deviation), from the moments of whole rows of `width` columns.
extern "C" __global__ void __launch_bounds__(256) gaussian_topk(
    const float* x, const float* moments, float* out, int n, long long x_row, long long moments_row,
    long long out_row, float width, float deviations) {
  x += blockIdx.x * x_row, out += blockIdx.x * out_row, moments += blockIdx.x * moments_row;
  const float mean = __fdiv_rn(moments[0], width);
  const float variance = __fmaf_rn(-mean, mean, __fdiv_rn(moments[1], width));
  const float cutoff = __fmaf_rn(deviations, __fsqrt_rn(fmaxf(variance, 0.0f)), mean);
  for (int i = threadIdx.x; i < n; i += 256) {
    const float v = __fsub_rn(x[i], cutoff);
    out[i] = v < 0.0f ? 0.0f : v;  // a NaN stays
  }
}
