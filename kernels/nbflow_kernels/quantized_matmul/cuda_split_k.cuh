// How the columns are divided, the end of a product, and what the kernels share in global memory.
//
// A row's units (in bfloat16: its steps of 64 columns, as those of `matmul/cuda_mma.cu`) are cut into
// SLOTS pieces of neighbours; the sum of each is computed unit by unit, and the sums are added in order.
// That order depends on the number of columns alone: not on how many tokens there are, nor on which thread
// block computes what.
#pragma once
#include "quantized_matmul/cuda_bf16.cuh"

constexpr int SLOTS = 8;
constexpr int STEP = 64, UNIT_STEPS = 4;

DEV int slot_start(int slot, int n_units, int n_slots = SLOTS) { return n_units * slot / n_slots; }

// How many slots, a power of two, give the same sums in the same order as SLOTS do: of few units, as
// many as let each have one.
DEV int slots_for(int n_units) {
  int n = 1;
  while (n < n_units && n < SLOTS) n *= 2;
  return n;
}

// The first step of a slot.
DEV int slot_step(int slot, int n_columns, int n_slots = SLOTS) {
  if (ARITHMETIC == BF16_SUMS) return slot_start(slot, (n_columns + STEP - 1) / STEP, n_slots);
  const int n_units = (n_columns + UNIT_STEPS * STEP - 1) / (UNIT_STEPS * STEP);
  return UNIT_STEPS * slot_start(slot, n_units, n_slots);
}

// The units that steps [first, end) lie in: unit_of(first) to units_to(end).
DEV int unit_of(int step) { return step / UNIT_STEPS; }
DEV int units_to(int end) { return (end + UNIT_STEPS - 1) / UNIT_STEPS; }

// A result of row `row` (of its matrix) and a token: with the bias, put in place of the old one, or
// times `added` (if that is not 0) added to it.
struct Output {
  float* out;
  const float* bias;
  long long stride;
  int n_rows;
  float added;

  DEV_METHOD float value(float sum, int row) const {
    const float v = ARITHMETIC == BF16_SUMS ? sum : __fmul_rn(sum, OUT);
    return bias ? __fadd_rn(v, bias[row]) : v;
  }

  DEV_METHOD void write(float v, int row, int token) const {
    float* at = out + token * stride + row;
    *at = added != 0.0f ? __fmaf_rn(added, v, *at) : v;
  }

  DEV_METHOD void put(float sum, int row, int token) const {
    if (row < n_rows) write(value(sum, row), row, token);
  }
};

// Sums of slots in global memory: of each row tile, slot and group of 8 tokens 16 x 8 numbers.
DEV float* partial_at(float* partial, long long tile, int slot) {
  return partial + (tile * SLOTS + slot) * 128;
}

// The sum of all slots of element i, in order; past the first cache, where others' sums are not.
DEV float sum_of_slots(const float* sums) {
  float v = 0.0f;
#pragma unroll
  for (int s = 0; s < SLOTS; s++) v += __ldcg(sums + s * 128);
  return v;
}

// Whether this thread block is the last of `n` to arrive; then `counter` is 0 again.
DEV bool last_to_arrive(int* counter, int n) {
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1) == n - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}
