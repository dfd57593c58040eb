// Storage formats of recurrent states: float32, float16, bfloat16, q8_0 (`nbflow_kernels.state_format`).
// A row is the last axis of a state.  A block of a row is spread over LANES lanes, a number to a lane.
#pragma once
#include "cuda/block_reduce.cuh"
#include "cuda/float16.cuh"
#include "cuda/types.cuh"

constexpr int Q8_0 = 3, BLOCK = 32;

template <int KIND> struct StateElement {
  using Stored = typename Element<KIND>::Stored;
};
template <> struct StateElement<Q8_0> {
  using Stored = unsigned char;
};

template <int KIND> __device__ inline long long state_row_bytes(int n) {
  return KIND == F32 ? 4ll * n : KIND == Q8_0 ? n + 2ll * ((n + BLOCK - 1) / BLOCK) : 2ll * n;
}

__device__ inline u16 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Number i of a row; 0 if it is not `inside`.
template <int KIND> __device__ inline float load_state(const char* row, int i, bool inside) {
  if (!inside) return 0.0f;
  if (KIND == F32) return ((const float*)row)[i];
  if (KIND == F16) return Element<F16>::of(((const u16*)row)[i]);
  if (KIND == BF16) return Element<BF16>::of(((const u16*)row)[i]);
  const u8* block = (const u8*)row + (BLOCK + 2) * (i / BLOCK);  // at any byte
  return Element<F16>::of((u16)(block[0] | block[1] << 8)) * (float)(signed char)block[2 + i % BLOCK];
}

// The scale of a q8_0 block, as float16 bits.  All lanes call it, those outside with 0.
template <int LANES> __device__ inline u16 state_scale(float x) {
  const float largest = reduce_lanes<LANES>(fabsf(x), Max());
  const float bad = reduce_lanes<LANES>(x - x, Sum());  // not 0 for NaN and infinity
  return bad == 0.0f ? to_f16(largest / 127.0f) : (u16)0x7e00;
}

__device__ inline float state_code(float x, float scale) {
  return scale > 0.0f ? fminf(fmaxf(rintf(x / scale), -127.0f), 127.0f) : 0.0f;
}

// Writes number i of a row; all lanes call it.
template <int KIND, int LANES>
__device__ inline void store_state(char* row, int i, bool inside, float x) {
  if (KIND == Q8_0) {
    const u16 bits = state_scale<LANES>(inside ? x : 0.0f);
    u8* block = (u8*)row + (BLOCK + 2) * (i / BLOCK);
    if (!inside) return;
    if (i % BLOCK == 0) block[0] = (u8)bits, block[1] = (u8)(bits >> 8);
    block[2 + i % BLOCK] = (u8)(signed char)(int)state_code(x, Element<F16>::of(bits));
    return;
  }
  if (!inside) return;
  if (KIND == F32) ((float*)row)[i] = x;
  else ((u16*)row)[i] = KIND == F16 ? to_f16(x) : to_bf16(x);
}

// A number as it is read back after `store_state`; all lanes call it, those outside with 0.
template <int KIND, int LANES> __device__ inline float round_state(float x) {
  if (KIND == F16) return Element<F16>::of(to_f16(x));
  if (KIND == BF16) return Element<BF16>::of(to_bf16(x));
  if (KIND == F32) return x;
  const float scale = Element<F16>::of(state_scale<LANES>(x));
  return scale * state_code(x, scale);
}
