// Loads of float32, float16 and bfloat16 elements as float32.  The conversions are PTX, because the
// headers of CUDA C++ are not on every machine that has NVRTC.
#pragma once

enum Kind { F32 = 0, F16 = 1, BF16 = 2 };

template <int KIND> struct Element;
template <> struct Element<F32> {
  using Stored = float;
  __device__ static float of(float x) { return x; }
};
template <> struct Element<F16> {
  using Stored = unsigned short;
  __device__ static float of(unsigned short x) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
  }
};
template <> struct Element<BF16> {
  using Stored = unsigned short;
  __device__ static float of(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
};

// The nearest float16, as bits.
__device__ inline unsigned short to_f16(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// Elements [i, i + 4) of the n at `x` as float32; those from n on are 0.
template <int KIND, bool WIDE>
__device__ inline float4 load4_of(const typename Element<KIND>::Stored* x, long long i,
                                  long long n) {
  using E = Element<KIND>;
  if (WIDE && i < n) {  // 16 or 8 bytes at once
    if (KIND == F32) return *(const float4*)(x + i);
    ushort4 h = *(const ushort4*)(x + i);
    return make_float4(E::of(h.x), E::of(h.y), E::of(h.z), E::of(h.w));
  }
  return make_float4(i < n ? E::of(x[i]) : 0.0f, i + 1 < n ? E::of(x[i + 1]) : 0.0f,
                     i + 2 < n ? E::of(x[i + 2]) : 0.0f, i + 3 < n ? E::of(x[i + 3]) : 0.0f);
}
