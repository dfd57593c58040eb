// Float32 arithmetic on CUDA cores, with row-major weights in float32, float16 or bfloat16.
//
// A warp computes ROWS rows for TOKENS tokens: lane l adds the products of columns 256 i + 8 l + 0..7,
// i after i, and the lanes are added as a tree.  Neither order depends on the number of tokens.
// blockIdx.z is the matrix of a segment of tokens (`indptr`), or of a batched product.
#include "cuda/float16.cuh"
#include "cuda/block_reduce.cuh"

constexpr int ROWS = 4, WARPS = 8;

// Load columns k to k + 8 of a row of n, with zeros past its end.
template <int KIND, bool WIDE>
__device__ inline void load_8(float to[8], const typename Element<KIND>::Stored* row, int k, int n) {
  using E = Element<KIND>;
  if (WIDE && k + 8 <= n) {
    if constexpr (KIND == F32) {
      *(float4*)to = *(const float4*)(row + k);
      *(float4*)(to + 4) = *(const float4*)(row + k + 4);
    } else {
      const uint4 q = __ldg((const uint4*)(row + k));
      const unsigned words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        to[2 * i] = E::of((unsigned short)words[i]);
        to[2 * i + 1] = E::of((unsigned short)(words[i] >> 16));
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) to[i] = k + i < n ? E::of(row[k + i]) : 0.0f;
}

template <int KIND, int TOKENS, bool WIDE>
__global__ void __launch_bounds__(32 * WARPS) matmul(
    const float* x, const typename Element<KIND>::Stored* w, const float* bias, float* out,
    const int* indptr, const int* rows, long long x_stride, long long out_stride, int n_tokens,
    int n_rows, int n_columns, int accumulate, long long x_batch_stride, long long out_batch_stride) {
  const int lane = threadIdx.x & 31, row_0 = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * ROWS;
  if (row_0 >= n_rows) return;
  int token = 0, end = n_tokens;
  if (indptr) token = indptr[blockIdx.z], end = indptr[blockIdx.z + 1];
  w += (long long)blockIdx.z * n_rows * n_columns;
  if (bias) bias += (long long)blockIdx.z * n_rows;
  x += blockIdx.z * x_batch_stride, out += blockIdx.z * out_batch_stride;
  for (token += blockIdx.y * TOKENS; token < end; token += gridDim.y * TOKENS) {
    const float* tokens[TOKENS];
#pragma unroll
    for (int n = 0; n < TOKENS; n++) {  // clamped to the last token
      int t = min(token + n, end - 1);
      tokens[n] = x + (rows ? rows[t] : t) * x_stride;
    }
    float acc[ROWS][TOKENS] = {};
    for (int k = 8 * lane; k < n_columns; k += 256) {
      float weights[ROWS][8];
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        load_8<KIND, WIDE>(weights[r], w + (long long)min(row_0 + r, n_rows - 1) * n_columns, k, n_columns);
#pragma unroll
      for (int n = 0; n < TOKENS; n++) {
        float v[8];
        load_8<F32, WIDE>(v, tokens[n], k, n_columns);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int i = 0; i < 8; i++) acc[r][n] = fmaf(weights[r][i], v[i], acc[r][n]);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int n = 0; n < TOKENS; n++) {
        float v = reduce_lanes<32>(acc[r][n], Sum());
        if (lane == r * TOKENS + n && row_0 + r < n_rows && token + n < end) {
          if (bias) v += bias[row_0 + r];
          float* at = out + (token + n) * out_stride + row_0 + r;
          *at = accumulate ? v + *at : v;
        }
      }
    }
  }
}
