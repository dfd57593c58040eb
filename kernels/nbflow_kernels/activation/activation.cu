// Activations, four columns to a thread.
#include "activation/functions.cuh"
#include "cuda/vector_load.cuh"

// A thread's four columns [i, i + 4) of row t; a row takes `pieces` threads.
struct Place {
  int t, i;
};

__device__ inline bool find(int T, int width, Place& p) {
  int pieces = (width + 3) / 4;
  int n_blocks = (pieces + blockDim.x - 1) / blockDim.x;  // of a row
  p.t = blockIdx.x / n_blocks;
  p.i = 4 * ((blockIdx.x % n_blocks) * blockDim.x + threadIdx.x);
  return p.i < width;
}

template <class F, bool WIDE>
__global__ void plain(const float* x, float* out, int T, int width) {
  Place p;
  if (!find(T, width, p)) return;
  long long row = (long long)p.t * width;
  float4 v = load4<WIDE>(x + row, p.i, width);
  v = make_float4(F::of(v.x), F::of(v.y), F::of(v.z), F::of(v.w));
  store4<WIDE>(out + row, p.i, width, v);
}

// out[t, i] = F(gate[t, i]) * up[t, i], the halves of a row of 2 * width; `gate` and `up` are 0 or width.
template <class F, bool WIDE>
__global__ void gated(const float* x, float* out, int T, int width, int gate, int up) {
  Place p;
  if (!find(T, width, p)) return;
  const float* row = x + 2LL * p.t * width;
  float4 g = load4<WIDE>(row + gate, p.i, width), u = load4<WIDE>(row + up, p.i, width);
  g = make_float4(F::of(g.x) * u.x, F::of(g.y) * u.y, F::of(g.z) * u.z, F::of(g.w) * u.w);
  store4<WIDE>(out + (long long)p.t * width, p.i, width, g);
}

__device__ inline float clamped(float gate, float up, float alpha, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return (up + 1.0f) * logistic(gate, alpha);
}

// gpt-oss: gate and up interleaved (INTERLEAVED), or the halves of a row.
template <bool INTERLEAVED, bool WIDE>
__global__ void swiglu_oai(const float* x, float* out, int T, int width, float alpha, float limit) {
  Place p;
  if (!find(T, width, p)) return;
  const float* row = x + 2LL * p.t * width;
  float4 g, u;
  if (INTERLEAVED) {
    float4 a = load4<WIDE>(row, 2 * p.i, 2 * width), b = load4<WIDE>(row, 2 * p.i + 4, 2 * width);
    g = make_float4(a.x, a.z, b.x, b.z);
    u = make_float4(a.y, a.w, b.y, b.w);
  } else {
    g = load4<WIDE>(row, p.i, width);
    u = load4<WIDE>(row + width, p.i, width);
  }
  float4 y = make_float4(clamped(g.x, u.x, alpha, limit), clamped(g.y, u.y, alpha, limit),
                         clamped(g.z, u.z, alpha, limit), clamped(g.w, u.w, alpha, limit));
  store4<WIDE>(out + (long long)p.t * width, p.i, width, y);
}

__device__ inline float xielu_of(float v, float alpha_p, float alpha_n, float beta, float eps) {
  if (v > 0.0f) return v * fmaf(alpha_p, v, beta);
  return fmaf(alpha_n, expm1f(fminf(v, eps)) - v, beta * v);
}

template <bool WIDE>
__global__ void xielu(const float* x, float* out, int T, int width, float alpha_p, float alpha_n,
                      float beta, float eps) {
  Place p;
  if (!find(T, width, p)) return;
  long long row = (long long)p.t * width;
  float4 v = load4<WIDE>(x + row, p.i, width);
  v = make_float4(xielu_of(v.x, alpha_p, alpha_n, beta, eps), xielu_of(v.y, alpha_p, alpha_n, beta, eps),
                  xielu_of(v.z, alpha_p, alpha_n, beta, eps), xielu_of(v.w, alpha_p, alpha_n, beta, eps));
  store4<WIDE>(out + row, p.i, width, v);
}
