// Router GEMM: normalized tokens times 16 rows of the router's weights per thread block, with the bits of
// `matmul/cuda_simt.cu` (float32) and `matmul/cuda_mma.cu` (float16, bfloat16).
//
// Tokens are in shared memory with a stride that is a multiple of 64, padded with zeros.
#pragma once
#include "cuda/ptx.cuh"
#include "cuda/block_reduce.cuh"

enum { ROUTER_F32, ROUTER_F16, ROUTER_BF16 };

constexpr int ROUTER_ROWS = 16, ROUTER_STEP = 64;
constexpr int ROUTER_FLOATS = 8 * 128 + 16;  // of shared memory that `multiply_router` needs

struct Tokens {
  const float* rows;
  int stride, n, n_columns;

  DEV_METHOD const float* row(int token) const { return rows + min(token, n - 1) * stride; }
};

// Load four columns from k on of a row of float32 weights.
DEV float4 router_four(const float* row, int k, int n, bool wide) {
  if (wide && k + 4 <= n) return *(const float4*)(row + k);
  return make_float4(k < n ? row[k] : 0.0f, k + 1 < n ? row[k + 1] : 0.0f,
                     k + 2 < n ? row[k + 2] : 0.0f, k + 3 < n ? row[k + 3] : 0.0f);
}

// Rows [row_0, row_0 + 16) of E, two per warp.  Lane l adds columns 256 i + 8 l + 0..7, i after i.
DEV void multiply_f32(const float* w, const Tokens& x, int row_0, int E, float* logits) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const bool wide = (((u64)w | 4 * (u64)x.n_columns) & 15) == 0;
  for (int r = 0; r < 2; r++) {
    const int row = row_0 + 2 * warp + r;
    if (row >= E) return;
    const float* weights = w + (i64)row * x.n_columns;
    for (int token = 0; token < x.n; token++) {
      float acc = 0.0f;
      for (int k = 8 * lane; k < x.n_columns; k += 256) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const float4 a = router_four(weights, k + i, x.n_columns, wide);
          const float4 b = *(const float4*)(x.row(token) + k + i);
          acc = fmaf(a.x, b.x, acc), acc = fmaf(a.y, b.y, acc);
          acc = fmaf(a.z, b.z, acc), acc = fmaf(a.w, b.w, acc);
        }
      }
      acc = reduce_lanes<32>(acc, Sum());
      if (lane == 0) logits[token * E + row] = acc;
    }
  }
}

// Round eight numbers to pairs of the weights' type and leave the remainders in `x`.
template <int KIND_OF_ROUTER>
DEV uint4 next_part(float x[8]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float &a = x[2 * i], &b = x[2 * i + 1];
    if constexpr (KIND_OF_ROUTER == ROUTER_F16) {
      words[i] = to_f16x2(a, b);
      a -= low_f16(words[i]), b -= high_f16(words[i]);
    } else {
      words[i] = to_bf16x2(a, b);
      a -= __uint_as_float(words[i] << 16), b -= __uint_as_float(words[i] & 0xffff0000u);
    }
    a = a == a ? a : 0.0f, b = b == b ? b : 0.0f;  // infinities and NaN stay in the first part
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Rows [row_0, row_0 + 16) of E on tensor cores; split-K over the warps.
template <int KIND_OF_ROUTER>
DEV void multiply_halves(
    const u16* w, const Tokens& x, int row_0, int E, float* logits, float* scratch) {
  constexpr int PARTS = KIND_OF_ROUTER == ROUTER_F16 ? 2 : 3;
  const int lane = threadIdx.x & 31, split = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  float *ups = scratch + 8 * 128, *factors = ups + 8;
  if (KIND_OF_ROUTER == ROUTER_F16) {  // a warp per token
    float largest = 0.0f;  // fmaxf ignores NaN
    if (split < x.n)
      for (int k = lane; k < x.n_columns; k += 32) largest = fmaxf(largest, fabsf(x.row(split)[k]));
    largest = reduce_lanes<32>(largest, Max());
    const u32 exponent = max(__float_as_uint(largest) >> 23, 15u);  // as if 2**-112
    if (lane == 0) {
      ups[split] = __uint_as_float((268u - exponent) << 23);
      factors[split] = __uint_as_float((exponent - 14u) << 23);
    }
    __syncthreads();
  }
  const float up = KIND_OF_ROUTER == ROUTER_F16 ? ups[min(g, x.n - 1)] : 1.0f;
  const int n_steps = (x.n_columns + ROUTER_STEP - 1) / ROUTER_STEP;
  const u16* rows[2];  // clamped to the last row
#pragma unroll
  for (int h = 0; h < 2; h++) rows[h] = w + (i64)min(row_0 + g + 8 * h, E - 1) * x.n_columns;
  float acc[4] = {};
  for (int step = n_steps * split / 8; step < n_steps * (split + 1) / 8; step++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int k = step * ROUTER_STEP + 32 * i + 8 * t;
      uint4 a[2];
#pragma unroll
      for (int h = 0; h < 2; h++)
        a[h] = k < x.n_columns ? stream_16(rows[h] + k) : make_uint4(0, 0, 0, 0);
      float v[8];
      *(float4*)v = *(const float4*)(x.row(g) + k);
      *(float4*)(v + 4) = *(const float4*)(x.row(g) + k + 4);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] *= up;
      const u32 first[4] = {a[0].x, a[1].x, a[0].y, a[1].y};
      const u32 second[4] = {a[0].z, a[1].z, a[0].w, a[1].w};
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const uint4 part = next_part<KIND_OF_ROUTER>(v);
        if constexpr (KIND_OF_ROUTER == ROUTER_F16) {
          mma_f16(acc, first, part.x, part.y);
          mma_f16(acc, second, part.z, part.w);
        } else {
          mma_bf16(acc, first, part.x, part.y);
          mma_bf16(acc, second, part.z, part.w);
        }
      }
    }
  }
  float* to = scratch + split * 128 + g * 8 + 2 * t;
  *(float2*)to = make_float2(acc[0], acc[1]);
  *(float2*)(to + 64) = make_float2(acc[2], acc[3]);
  __syncthreads();
  for (int i = threadIdx.x; i < 128; i += 256) {
    const int row = row_0 + i % 16, token = i / 16;
    float v = 0.0f;
#pragma unroll
    for (int s = 0; s < 8; s++) v += scratch[s * 128 + i % 16 * 8 + token];
    if (KIND_OF_ROUTER == ROUTER_F16) v *= factors[token];
    if (row < E && token < x.n) logits[token * E + row] = v;
  }
}

template <int KIND_OF_ROUTER>
DEV void multiply_router(
    const void* w, const Tokens& x, int row_0, int E, float* logits, float* scratch) {
  if constexpr (KIND_OF_ROUTER == ROUTER_F32)
    multiply_f32((const float*)w, x, row_0, E, logits);
  else
    multiply_halves<KIND_OF_ROUTER>((const u16*)w, x, row_0, E, logits, scratch);
}
