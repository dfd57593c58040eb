// Normalization: THREADS threads hold a vector in registers, 4 * N numbers each.  It is read once and
// written once; sums are taken in an order that depends on E alone.
#include "cuda/reduce.cuh"
#include "cuda/wide.cuh"

// Vector v of a (T, H, E) array whose rows (T) lie `row` elements apart.
__device__ inline long long place(int v, int H, int E, long long row) {
  return (long long)(v / H) * row + (long long)(v % H) * E;
}

__device__ inline float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ inline float4 scaled(float4 a, float f) {
  return make_float4(a.x * f, a.y * f, a.z * f, a.w * f);
}

__device__ inline float4 times(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

__device__ inline float dot(float4 a) { return a.x * a.x + a.y * a.y + (a.z * a.z + a.w * a.w); }

// Reads a vector, adds the residual to it and writes the sum there, if there is one.
template <int THREADS, int N, bool WIDE>
__device__ inline void load_vector(const float* x, float* residual, int E, float4* v) {
  for (int n = 0; n < N; n++) v[n] = load4<WIDE>(x, 4 * (n * THREADS + threadIdx.x), E);
  if (residual == nullptr) return;
  float4 r[N];  // all loads are on their way before the first store
  for (int n = 0; n < N; n++) r[n] = load4<WIDE>(residual, 4 * (n * THREADS + threadIdx.x), E);
  for (int n = 0; n < N; n++) {
    v[n] = v[n] + r[n];
    store4<WIDE>(residual, 4 * (n * THREADS + threadIdx.x), E, v[n]);
  }
}

// out = v / sqrt(sum of squares / divisor + eps) * (weight + offset), v = x or residual += x.
// weight has one row, or one for each of the H heads (weight_row = E).
template <int THREADS, int N, bool WIDE>
__global__ void rms(const float* x, float* residual, const float* weight, float* out, int n_vectors,
                    int H, int E, long long x_row, long long residual_row, long long out_row,
                    int weight_row, float divisor, float eps, float offset) {
  __shared__ float room[THREADS / 32];
  int vector = blockIdx.x * blockDim.y + threadIdx.y;
  if (vector >= n_vectors) return;  // whole warps: blockDim.y > 1 only for THREADS == 32
  float4 v[N];
  if (residual != nullptr) residual += place(vector, H, E, residual_row);
  load_vector<THREADS, N, WIDE>(x + place(vector, H, E, x_row), residual, E, v);
  float squares = 0.0f;
  for (int n = 0; n < N; n++) squares += dot(v[n]);
  squares = reduce_block<THREADS>(squares, Sum(), room);
  float factor = 1.0f / sqrtf(squares / divisor + eps);
  out += place(vector, H, E, out_row);
  if (weight != nullptr) weight += (long long)(vector % H) * weight_row;
  float4 shift = make_float4(offset, offset, offset, offset);
  for (int n = 0; n < N; n++) {
    int i = 4 * (n * THREADS + threadIdx.x);
    float4 y = scaled(v[n], factor);
    if (weight != nullptr) y = times(y, load4<WIDE>(weight, i, E) + shift);
    store4<WIDE>(out, i, E, y);
  }
}

// out = (v - mean) / sqrt(variance + eps) * weight + bias, v = x or residual += x.
template <int THREADS, int N, bool WIDE>
__global__ void layer(const float* x, float* residual, const float* weight, const float* bias,
                      float* out, int n_vectors, int H, int E, long long x_row,
                      long long residual_row, long long out_row, int weight_row, int bias_row,
                      float eps) {
  __shared__ float room[THREADS / 32];
  int vector = blockIdx.x * blockDim.y + threadIdx.y;
  if (vector >= n_vectors) return;
  float4 v[N];
  if (residual != nullptr) residual += place(vector, H, E, residual_row);
  load_vector<THREADS, N, WIDE>(x + place(vector, H, E, x_row), residual, E, v);
  float sum = 0.0f;
  for (int n = 0; n < N; n++) sum += v[n].x + v[n].y + (v[n].z + v[n].w);
  float mean = reduce_block<THREADS>(sum, Sum(), room) / E;
  float squares = 0.0f;
  for (int n = 0; n < N; n++) {
    int i = 4 * (n * THREADS + threadIdx.x);
    v[n] = v[n] + make_float4(-mean, -mean, -mean, -mean);
    if (i + 3 < E) {
      squares += dot(v[n]);
    } else {  // what lies behind the end is no part of the variance
      if (i < E) squares += v[n].x * v[n].x;
      if (i + 1 < E) squares += v[n].y * v[n].y;
      if (i + 2 < E) squares += v[n].z * v[n].z;
    }
  }
  float factor = 1.0f / sqrtf(reduce_block<THREADS>(squares, Sum(), room) / E + eps);
  out += place(vector, H, E, out_row);
  if (weight != nullptr) weight += (long long)(vector % H) * weight_row;
  if (bias != nullptr) bias += (long long)(vector % H) * bias_row;
  for (int n = 0; n < N; n++) {
    int i = 4 * (n * THREADS + threadIdx.x);
    float4 y = scaled(v[n], factor);
    if (weight != nullptr) y = times(y, load4<WIDE>(weight, i, E));
    if (bias != nullptr) y = y + load4<WIDE>(bias, i, E);
    store4<WIDE>(out, i, E, y);
  }
}

// out = x * scale
extern "C" __global__ void linear(const float* x, float* out, int n_vectors, int H, int E,
                                  long long x_row, long long out_row, float scale) {
  for (int vector = blockIdx.x; vector < n_vectors; vector += gridDim.x)
    for (int i = threadIdx.x; i < E; i += blockDim.x)
      out[place(vector, H, E, out_row) + i] = x[place(vector, H, E, x_row) + i] * scale;
}
