// Activations of a number.  Those that are v * g(v) give NaN for -infinity (0 * infinity), as the
// float64 reference and PyTorch do.
#pragma once

// v / (1 + exp(-slope * v)); an exponential of infinity gives zero.
__device__ inline float logistic(float v, float slope) { return v / (1.0f + expf(-v * slope)); }

struct Silu {
  __device__ static float of(float v) { return logistic(v, 1.0f); }
};
struct Gelu {
  __device__ static float of(float v) { return v * (v < -40.0f ? 0.0f : normcdff(v)); }
};
struct GeluTanh {  // 0.5 * (1 + tanh(u)) = 1 / (1 + exp(-2 u)), without cancellation
  __device__ static float of(float v) {
    return logistic(v, 1.5957691216057308f + 0.07135481282752697f * (v * v));
  }
};
struct GeluQuick {
  __device__ static float of(float v) { return logistic(v, 1.702f); }
};
struct Relu {  // a NaN stays
  __device__ static float of(float v) { return v < 0.0f ? 0.0f : v; }
};
struct Relu2 {
  __device__ static float of(float v) {
    v = Relu::of(v);
    return v * v;
  }
};
struct Sigmoid {
  __device__ static float of(float v) { return 1.0f / (1.0f + expf(-v)); }
};
