// Row gather from a float matrix, one thread block per row.
#include "cuda/float16.cuh"
#include "cuda/types.cuh"
#include "cuda/vector_load.cuh"

// out[t] = table[ids[t]] * scale (table[t] if ids is null).  An index out of range gives NaN.
// The result is float32, or float16 with HALF.
template <int KIND, bool WIDE, bool HALF>
__global__ void gather(const int* ids, const typename Element<KIND>::Stored* table, void* out,
                       int V, int E, float scale) {
  int id = ids != nullptr ? ids[blockIdx.x] : blockIdx.x;
  bool known = 0 <= id && id < V;
  const float nan = nan32();
  for (int i = 4 * threadIdx.x; i < E; i += 4 * blockDim.x) {
    float4 v = make_float4(nan, nan, nan, nan);
    if (known) {
      v = load4_of<KIND, WIDE>(table + (long long)id * E, i, E);
      v = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
    }
    if (HALF) {
      unsigned short* to = (unsigned short*)out + (long long)blockIdx.x * E + i;
      to[0] = to_f16(v.x);
      if (i + 1 < E) to[1] = to_f16(v.y);
      if (i + 2 < E) to[2] = to_f16(v.z);
      if (i + 3 < E) to[3] = to_f16(v.w);
    } else {
      store4<WIDE>((float*)out + (long long)blockIdx.x * E, i, E, v);
    }
  }
}

// out[t, j] = x[t, order[j]], 0 where the order is -1.  Thread block (columns, rows).
template <typename T>
__global__ void __launch_bounds__(256) gather_columns(const T* x, const int* order, T* out,
                                                      long long x_stride, long long out_stride,
                                                      int n_rows, int n_columns) {
  const int j = blockIdx.x * 256 + threadIdx.x;
  if (j >= n_columns) return;
  const int k = order[j];
  for (int t = blockIdx.y; t < n_rows; t += gridDim.y)
    out[t * out_stride + j] = k < 0 ? T(0) : x[t * x_stride + k];
}

// out[t, j] = x[t, k] * scales[k] with k = order[j], 0 where it is -1.  Grid as above.
extern "C" __global__ void __launch_bounds__(256) gather_scaled_columns(
    const float* x, const int* order, const float* scales, float* out, long long x_stride,
    long long out_stride, int n_rows, int n_columns) {
  const int j = blockIdx.x * 256 + threadIdx.x;
  if (j >= n_columns) return;
  const int k = order[j];
  const float scale = k < 0 ? 0.0f : scales[k];
  for (int t = blockIdx.y; t < n_rows; t += gridDim.y)
    out[t * out_stride + j] = k < 0 ? 0.0f : x[t * x_stride + k] * scale;
}

// x[i] *= scale.
extern "C" __global__ void scale_in_place(float* x, long long n, float scale) {
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
    x[i] *= scale;
}

// rows[t] = ids[t] - first, or `other` where a shard of n_rows rows does not hold it.
extern "C" __global__ void __launch_bounds__(256) shard_rows(
    const int* ids, int* rows, int n, int first, int n_rows, int other) {
  const int t = blockIdx.x * 256 + threadIdx.x;
  if (t >= n) return;
  const int row = ids[t] - first;
  rows[t] = 0 <= row && row < n_rows ? row : other;
}

// Zero the rows of out whose index is negative.  Thread block (columns, rows).
extern "C" __global__ void __launch_bounds__(256) clear_foreign_rows(
    const int* rows, float* out, int T, int E) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= E) return;
  for (int t = blockIdx.y; t < T; t += gridDim.y)
    if (rows[t] < 0) out[(long long)t * E + i] = 0.0f;
}
