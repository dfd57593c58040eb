// Round activations to bfloat16 or to int8 with a scale per 32 columns, as float32 numbers.
#define DEV __device__ __forceinline__

DEV float to_bf16(float v) {
  unsigned short h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
  return __uint_as_float((unsigned)h << 16);
}

DEV float warp_max(float v) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}

// Thread block (columns, row), 32 columns per warp.
extern "C" __global__ void __launch_bounds__(256) round_rows(
    const float* x, float* out, long long x_stride, int n_columns, int int8) {
  const int k = blockIdx.x * 256 + threadIdx.x;
  float v = k < n_columns ? x[blockIdx.y * x_stride + k] : 0.0f;
  if (int8) {  // `qmatmul`, Notes
    const float largest = warp_max(fabsf(v));
    const float inverse = largest >= 7.888609052210118e-31f ? 127.0f / largest : 0.0f;  // 2**-100
    float scale = inverse > 0.0f ? largest / 127.0f : 0.0f;
    if (!(largest <= 3.4028234663852886e38f)) scale = largest;  // 0 * inf = NaN, so non-finite inputs propagate
    v = rintf(v * inverse) * scale;
  } else {
    v = to_bf16(v);
  }
  if (k < n_columns) out[(long long)blockIdx.y * n_columns + k] = v;
}

// Round float32 or float16 numbers to the bits of bfloat16.
template <class T, bool HALF>
__global__ void __launch_bounds__(256) to_bf16_bits(const T* x, unsigned short* out, long long n) {
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    float v;
    if constexpr (HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(x[i]));
    else v = x[i];
    out[i] = (unsigned short)(__float_as_uint(to_bf16(v)) >> 16);
  }
}
