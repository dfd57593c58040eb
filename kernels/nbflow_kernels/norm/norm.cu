// Normalization: THREADS threads hold a vector in registers, 4 * N numbers each.  It is read once and
// written once; sums are taken in the order of `normalize.cuh`, which depends on E alone.
#include "activation/functions.cuh"
#include "cuda/float8.cuh"
#include "cuda/vector_load.cuh"
#include "norm/normalize.cuh"

// Vector v of a (T, H, E) array with a row stride of `row` elements.
__device__ inline long long place(int v, int H, int E, long long row) {
  return (long long)(v / H) * row + (long long)(v % H) * E;
}

// Load a vector; with a residual, add it and write the sum to the residual.
template <int THREADS, int N, bool WIDE>
__device__ inline void load_vector(const float* x, float* residual, int E, float4* v) {
  for (int n = 0; n < N; n++) v[n] = load4<WIDE>(x, 4 * (n * THREADS + threadIdx.x), E);
  if (residual == nullptr) return;
  float4 r[N];  // all loads are in flight before the first store
  for (int n = 0; n < N; n++) r[n] = load4<WIDE>(residual, 4 * (n * THREADS + threadIdx.x), E);
  for (int n = 0; n < N; n++) {
    v[n] = plus(v[n], r[n]);
    store4<WIDE>(residual, 4 * (n * THREADS + threadIdx.x), E, v[n]);
  }
}

// Elements of the result: float32, or float8 codes of the numbers times `factor`.
struct Float32 {
  typedef float Element;
  template <bool WIDE>
  __device__ static void store(float* out, int i, int E, float4 y, float) {
    store4<WIDE>(out, i, E, y);
  }
};

template <int MANTISSA, int BIAS, int LARGEST>
struct Float8 {
  typedef u8 Element;
  template <bool WIDE>
  __device__ static void store(u8* out, int i, int E, float4 y, float factor) {
    y = scaled(y, factor);
    const float numbers[4] = {y.x, y.y, y.z, y.w};
    u8 codes[4];
    for (int n = 0; n < 4; n++) codes[n] = float8_code<MANTISSA, BIAS, LARGEST>(numbers[n]);
    if (WIDE) {
      if (i < E) *(u32*)(out + i) = codes[0] | codes[1] << 8 | codes[2] << 16 | (u32)codes[3] << 24;
      return;
    }
    for (int n = 0; n < 4; n++)
      if (i + n < E) out[i + n] = codes[n];
  }
};

// Sum over a vector whose chunk n * THREADS / 32 + warp has the sum mine[n]; all threads get it.
template <int THREADS, int N>
__device__ inline float sum_over(const float* mine, float* scratch) {
  constexpr int WARPS = THREADS / 32;
  const int lane = threadIdx.x % 32;
  if (THREADS == 32) {  // one warp holds the whole vector
    float own = 0.0f;
    for (int n = 0; n < N; n++)
      if (lane == n % 32) own = __fadd_rn(own, mine[n]);
    return lane_sum(own);
  }
  for (int n = 0; n < N; n++)
    if (lane == 0) scratch[n * WARPS + threadIdx.x / 32] = mine[n];
  __syncthreads();
  const float sum = sum_of_chunks(scratch, N * WARPS);
  __syncthreads();  // `scratch` may be used again
  return sum;
}

// out = v / sqrt(sum of squares / divisor + eps) * (weight + offset), v = x or residual += x.
// weight has one row, or one for each of the H heads (weight_row = E).
template <int THREADS, int N, bool WIDE, class Out>
__global__ void rms(const float* x, float* residual, const float* weight,
                    typename Out::Element* out, int n_vectors, int H, int E, long long x_row,
                    long long residual_row, long long out_row, int weight_row, float out_factor,
                    float divisor, float eps, float offset) {
  __shared__ float scratch[N * THREADS / 32];
  int vector = blockIdx.x * blockDim.y + threadIdx.y;
  if (vector >= n_vectors) return;  // whole warps: blockDim.y > 1 only for THREADS == 32
  float4 v[N];
  if (residual != nullptr) residual += place(vector, H, E, residual_row);
  load_vector<THREADS, N, WIDE>(x + place(vector, H, E, x_row), residual, E, v);
  float sums[N];
  for (int n = 0; n < N; n++) sums[n] = lane_sum(squares_of(v[n]));
  float factor = norm_factor(sum_over<THREADS, N>(sums, scratch), divisor, eps);
  out += place(vector, H, E, out_row);
  if (weight != nullptr) weight += (long long)(vector % H) * weight_row;
  float4 shift = make_float4(offset, offset, offset, offset);
  for (int n = 0; n < N; n++) {
    int i = 4 * (n * THREADS + threadIdx.x);
    float4 y = scaled(v[n], factor);
    if (weight != nullptr) y = times(y, plus(load4<WIDE>(weight, i, E), shift));
    Out::template store<WIDE>(out, i, E, y, out_factor);
  }
}

// out = (v - mean) / sqrt(variance + eps) * weight + bias, v = x or residual += x.
template <int THREADS, int N, bool WIDE, class Out>
__global__ void layer(const float* x, float* residual, const float* weight, const float* bias,
                      typename Out::Element* out, int n_vectors, int H, int E, long long x_row,
                      long long residual_row, long long out_row, int weight_row, int bias_row,
                      float out_factor, float eps) {
  __shared__ float scratch[N * THREADS / 32];
  int vector = blockIdx.x * blockDim.y + threadIdx.y;
  if (vector >= n_vectors) return;
  float4 v[N];
  if (residual != nullptr) residual += place(vector, H, E, residual_row);
  load_vector<THREADS, N, WIDE>(x + place(vector, H, E, x_row), residual, E, v);
  float sums[N];
  for (int n = 0; n < N; n++) sums[n] = lane_sum(sum_of(v[n]));
  float mean = __fdiv_rn(sum_over<THREADS, N>(sums, scratch), E);
  for (int n = 0; n < N; n++) {
    v[n] = centered(v[n], mean, 4 * (n * THREADS + threadIdx.x), E);
    sums[n] = lane_sum(squares_of(v[n]));
  }
  float factor = norm_factor(sum_over<THREADS, N>(sums, scratch), E, eps);
  out += place(vector, H, E, out_row);
  if (weight != nullptr) weight += (long long)(vector % H) * weight_row;
  if (bias != nullptr) bias += (long long)(vector % H) * bias_row;
  for (int n = 0; n < N; n++) {
    int i = 4 * (n * THREADS + threadIdx.x);
    float4 y = scaled(v[n], factor);
    if (weight != nullptr) y = times(y, load4<WIDE>(weight, i, E));
    if (bias != nullptr) y = plus(y, load4<WIDE>(bias, i, E));
    Out::template store<WIDE>(out, i, E, y, out_factor);
  }
}

template <class F> __device__ inline float4 gate_of(float4 g) {
  return make_float4(F::of(g.x), F::of(g.y), F::of(g.z), F::of(g.w));
}

// Gated RMS norm of the H groups of E columns of a row: the gate F(g) before the norm or after it.
// weight has a row of E for each group (weight_group = E), or one for all (0).
template <int THREADS, int N, bool WIDE, class F>
__global__ void gated_rms(const float* x, const float* gate, const float* weight, float* out,
                          int n_vectors, int H, int E, long long x_row, long long gate_row,
                          long long out_row, int weight_group, float eps, int gate_first) {
  __shared__ float scratch[N * THREADS / 32];
  int vector = blockIdx.x * blockDim.y + threadIdx.y;
  if (vector >= n_vectors) return;
  float4 v[N], g[N];
  load_vector<THREADS, N, WIDE>(x + place(vector, H, E, x_row), nullptr, E, v);
  load_vector<THREADS, N, WIDE>(gate + place(vector, H, E, gate_row), nullptr, E, g);
  float sums[N];
  for (int n = 0; n < N; n++) {
    g[n] = gate_of<F>(g[n]);
    if (gate_first) v[n] = times(v[n], g[n]);
    sums[n] = lane_sum(squares_of(v[n]));
  }
  float factor = norm_factor(sum_over<THREADS, N>(sums, scratch), E, eps);
  out += place(vector, H, E, out_row);
  weight += (long long)(vector % H) * weight_group;
  for (int n = 0; n < N; n++) {
    int i = 4 * (n * THREADS + threadIdx.x);
    float4 y = times(scaled(v[n], factor), load4<WIDE>(weight, i, E));
    store4<WIDE>(out, i, E, gate_first ? y : times(y, g[n]));
  }
}

// out = x * scale
extern "C" __global__ void linear(const float* x, float* out, int n_vectors, int H, int E,
                                  long long x_row, long long out_row, float scale) {
  for (int vector = blockIdx.x; vector < n_vectors; vector += gridDim.x)
    for (int i = threadIdx.x; i < E; i += blockDim.x)
      out[place(vector, H, E, out_row) + i] = x[place(vector, H, E, x_row) + i] * scale;
}
