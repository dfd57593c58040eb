// Shared by the tensor-core kernels with 16-bit weights: split-K order, decomposition of activations, output.
#pragma once
#include "cuda/ptx.cuh"

constexpr int SPLITS = 8, STEP = 64;

DEV int split_start(int split, int n_steps) { return n_steps * split / SPLITS; }

struct Output {
  float* out;
  const float *bias, *factors;
  long long stride;
  int n_rows, n_tokens, accumulate;
  const int* token_rows = nullptr;  // staged token of each one, for its factor

  DEV void put(float v, int row, int token) const {
    if (row >= n_rows || token >= n_tokens) return;
    if (factors) v *= factors[token_rows ? token_rows[token] : token];
    if (bias) v += bias[row];
    float* at = out + token * stride + row;
    *at = accumulate ? v + *at : v;
  }
};

// Fragment order of 32 columns, and its inverse.  Lane t of four has columns 2 t, 2 t + 1, 2 t + 8 and
// 2 t + 9 of an MMA step of 16.  `column_at` maps positions to columns so that its 8 numbers of two steps
// are contiguous; `position_of_column` maps columns to positions.
DEV int column_at(int position) {
  return (position & ~31) | (position & 4) << 2 | (position & 2) << 2 | (position >> 2 & 6) | (position & 1);
}

DEV int position_of_column(int k) {
  return (k & ~31) | (k & 6) << 2 | (k >> 2 & 4) | (k >> 2 & 2) | (k & 1);
}

// Return the power of two that scales a token's largest magnitude to 2**14..2**15 (float16 only), and write
// its inverse to factors[blockIdx.x].  By a thread block of 256.
template <int NUMBER>
DEV float scale_token(const float* row, int n_columns, float* factors) {
  if constexpr (NUMBER == F16_KIND) {
    __shared__ float largest_of[8];
    float largest = 0.0f;  // fmaxf ignores NaN
    for (int k = threadIdx.x; k < n_columns; k += 256) largest = fmaxf(largest, fabsf(row[k]));
#pragma unroll
    for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
    if ((threadIdx.x & 31) == 0) largest_of[threadIdx.x >> 5] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, largest_of[i]);
    // zero and tiny numbers: as if 2**-112, so that the exponents below stay in range
    const u32 exponent = max(__float_as_uint(largest) >> 23, 15u);
    if (threadIdx.x == 0) factors[blockIdx.x] = __uint_as_float((exponent - 14u) << 23);
    return __uint_as_float((268u - exponent) << 23);
  } else {
    return 1.0f;
  }
}

// Decompose a number into PARTS 16-bit numbers that add up to it, up to rounding.
template <int NUMBER, int PARTS>
DEV void decompose(float rest, u16 (&numbers)[PARTS]) {
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const u16 bits = NUMBER == F16_KIND ? (u16)to_f16x2(rest, 0.0f) : (u16)to_bf16x2(rest, 0.0f);
    numbers[p] = bits;
    rest -= NUMBER == F16_KIND ? low_f16(bits) : __uint_as_float((u32)bits << 16);
    rest = rest == rest ? rest : 0.0f;  // infinities and NaN stay in the first part
  }
}
