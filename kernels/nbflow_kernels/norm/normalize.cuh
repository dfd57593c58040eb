// Arithmetic of norms with a fixed order of additions: the kernels of norm.cu and the fused prologue
// (`quantized_matmul/cuda_prologue_norm.cuh`) give the same bits.
//
// A sum over a vector is taken in chunks of 128 numbers, four per lane of the chunk's warp;
// lane c % 32 then adds the sums of chunks c, and the lanes are added.
#pragma once
#include "cuda/block_reduce.cuh"
#include "cuda/types.cuh"

constexpr int NORM_CHUNK = 128;

DEV float lane_sum(float v) { return reduce_lanes<32>(v, Sum()); }

DEV float sum_of(float4 v) { return __fadd_rn(__fadd_rn(v.x, v.y), __fadd_rn(v.z, v.w)); }

DEV float squares_of(float4 v) {
  return __fadd_rn(__fmaf_rn(v.x, v.x, __fmul_rn(v.y, v.y)), __fmaf_rn(v.z, v.z, __fmul_rn(v.w, v.w)));
}

// Sum of the chunk sums, within a warp.
DEV float sum_of_chunks(const float* chunks, int n_chunks) {
  float mine = 0.0f;
  for (int c = threadIdx.x & 31; c < n_chunks; c += 32) mine = __fadd_rn(mine, chunks[c]);
  return lane_sum(mine);
}

// Elements [i, i + 4) of n minus the mean; 0 past the end, so that it adds nothing to the variance.
DEV float4 centered(float4 v, float mean, int i, int n) {
  return make_float4(i < n ? __fsub_rn(v.x, mean) : 0.0f, i + 1 < n ? __fsub_rn(v.y, mean) : 0.0f,
                     i + 2 < n ? __fsub_rn(v.z, mean) : 0.0f, i + 3 < n ? __fsub_rn(v.w, mean) : 0.0f);
}

// Scale factor of a vector, from its sum of squares (around the mean for LayerNorm).
DEV float norm_factor(float squares, float divisor, float eps) {
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, divisor), eps)));
}

DEV float4 scaled(float4 v, float f) {
  return make_float4(__fmul_rn(v.x, f), __fmul_rn(v.y, f), __fmul_rn(v.z, f), __fmul_rn(v.w, f));
}

DEV float4 times(float4 a, float4 b) {
  return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}

DEV float4 plus(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// f * a + b
DEV float4 fma_of(float f, float4 a, float4 b) {
  return make_float4(__fmaf_rn(f, a.x, b.x), __fmaf_rn(f, a.y, b.y), __fmaf_rn(f, a.z, b.z),
                     __fmaf_rn(f, a.w, b.w));
}
