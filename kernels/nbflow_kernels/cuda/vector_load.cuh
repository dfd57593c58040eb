// Loads and stores of four floats: 16-byte accesses if rows are aligned (WIDE), else one by one.
#pragma once

// Elements [i, i + 4) of the n at `x`; those from n on are `other`.
template <bool WIDE>
__device__ inline float4 load4(const float* x, long long i, long long n, float other = 0.0f) {
  if (WIDE) return i < n ? *(const float4*)(x + i) : make_float4(other, other, other, other);
  float4 v;
  v.x = i < n ? x[i] : other;
  v.y = i + 1 < n ? x[i + 1] : other;
  v.z = i + 2 < n ? x[i + 2] : other;
  v.w = i + 3 < n ? x[i + 3] : other;
  return v;
}

template <bool WIDE>
__device__ inline void store4(float* x, long long i, long long n, float4 v) {
  if (WIDE) {
    if (i < n) *(float4*)(x + i) = v;
    return;
  }
  if (i < n) x[i] = v.x;
  if (i + 1 < n) x[i + 1] = v.y;
  if (i + 2 < n) x[i + 2] = v.z;
  if (i + 3 < n) x[i + 3] = v.w;
}
