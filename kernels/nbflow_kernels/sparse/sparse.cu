// Product with sparse weights: one warp per weight row, lanes along its values.
#include "cuda/block_reduce.cuh"

// out[t, n] = (out[t, n] +) sum over j of x[t, indices[j]] * values[j], j in row n.
extern "C" __global__ void sparse_matmul(const float* x, const int* indptr, const int* indices,
                                         const float* values, float* out, int T, int N,
                                         long long x_row, long long out_row, int accumulate) {
  int n = blockIdx.x * blockDim.y + threadIdx.y;
  if (n >= N) return;  // whole warps
  int first = indptr[n], last = indptr[n + 1];
  for (int t = blockIdx.y; t < T; t += gridDim.y) {
    float total = 0.0f;
    for (int j = first + threadIdx.x; j < last; j += 32)
      total += x[t * x_row + indices[j]] * values[j];
    total = reduce_lanes<32>(total, Sum());
    if (threadIdx.x == 0) {
      float* to = out + t * out_row + n;
      *to = accumulate ? *to + total : total;
    }
  }
}
