// Products with gates, four columns to a thread.
#include "activation/functions.cuh"
#include "cuda/vector_load.cuh"

struct Identity {
  static __device__ float of(float v) { return v; }
};

// out[t, i] = F(gate[t, i]) * x[t, i]; rows of each array are gate_row, x_row and out_row apart.
template <class F, bool WIDE>
__global__ void gated_product(const float* gate, const float* x, float* out, int T, int width,
                              long long gate_row, long long x_row, long long out_row) {
  int n_blocks = ((width + 3) / 4 + blockDim.x - 1) / blockDim.x;  // of a row
  int t = blockIdx.x / n_blocks;
  int i = 4 * ((blockIdx.x % n_blocks) * blockDim.x + threadIdx.x);
  if (i >= width) return;
  float4 g = load4<WIDE>(gate + t * gate_row, i, width), u = load4<WIDE>(x + t * x_row, i, width);
  g = make_float4(F::of(g.x) * u.x, F::of(g.y) * u.y, F::of(g.z) * u.z, F::of(g.w) * u.w);
  store4<WIDE>(out + t * out_row, i, width, g);
}

// out[t, i] = x[t, i] within [-limit, limit], one element to a thread; NaN stays.
extern "C" __global__ void clip(const float* x, float* out, int T, int width, long long x_row,
                                long long out_row, float limit) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= T * width) return;
  float v = x[i / width * x_row + i % width];
  out[i / width * out_row + i % width] = v > limit ? limit : v < -limit ? -limit : v;
}

// out[t, h] = rate[h] * log(1 + exp(x[t, h] + bias[h])), one element to a thread.
extern "C" __global__ void log_decay(const float* x, const float* rate, const float* bias, float* out,
                                     int T, int width, long long x_row, long long out_row) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= T * width) return;
  int t = i / width, h = i % width;
  float v = x[t * x_row + h] + bias[h];
  float soft = fmaxf(v, 0.0f) + log1pf(expf(-fabsf(v)));
  out[t * out_row + h] = rate[h] * (v != v ? v : soft);
}

// out[t, h] = (x[t, h], number or its exponential, 0, ...), one element of out to a thread.
extern "C" __global__ void extend_heads(const float* x, const float* numbers, float* out, int T,
                                        int H, int D, int W, long long x_row,
                                        long long numbers_row, long long out_row,
                                        int exponential) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= T * H * W) return;
  int t = i / (H * W), h = i / W % H, d = i % W;
  float v = 0.0f;
  if (d < D) v = x[t * x_row + h * D + d];
  if (d == D) {
    v = numbers[t * numbers_row + h];
    if (exponential) v = expf(v);
  }
  out[t * out_row + h * W + d] = v;
}
