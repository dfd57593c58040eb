// Split-K: division of the columns, partial sums in global memory, arrival counters, output.
//
// The units of a row (in bfloat16 its steps of 64 columns, as in `matmul/cuda_mma.cu`) are cut into SPLITS
// contiguous splits; each is summed unit by unit, and the sums are added in order.  The order depends only
// on the number of columns: not on the number of tokens, nor on the grid.
#pragma once
#include "quantized_matmul/cuda_bf16.cuh"

constexpr int SPLITS = 8;
constexpr int STEP = 64, UNIT_STEPS = 4;

DEV int split_start(int split, int n_units, int n_splits = SPLITS) { return n_units * split / n_splits; }

// The fewest splits (a power of two) with the same sums in the same order as SPLITS: one unit each where
// there are few units.
DEV int splits_for(int n_units) {
  int n = 1;
  while (n < n_units && n < SPLITS) n *= 2;
  return n;
}

// The first step of a split.
DEV int split_step(int split, int n_columns, int n_splits = SPLITS) {
  if (ARITHMETIC == BF16_SUMS) return split_start(split, (n_columns + STEP - 1) / STEP, n_splits);
  const int n_units = (n_columns + UNIT_STEPS * STEP - 1) / (UNIT_STEPS * STEP);
  return UNIT_STEPS * split_start(split, n_units, n_splits);
}

// The units of steps [first, end): unit_of(first) to units_to(end).
DEV int unit_of(int step) { return step / UNIT_STEPS; }
DEV int units_to(int end) { return (end + UNIT_STEPS - 1) / UNIT_STEPS; }

// Output of a matrix: sum plus bias, stored, or times `added` (if that is not 0) added to the old value.
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

// Partial sums in global memory: 16 x 8 numbers per row tile (and group of 8 tokens) and split.
DEV float* partial_at(float* partial, long long tile, int split) {
  return partial + (tile * SPLITS + split) * 128;
}

// Add the splits of an element in order; __ldcg bypasses L1, which is not coherent.
DEV float sum_of_splits(const float* sums) {
  float v = 0.0f;
#pragma unroll
  for (int s = 0; s < SPLITS; s++) v += __ldcg(sums + s * 128);
  return v;
}

// Return whether this thread block is the last of `n` to arrive; the last one resets `counter`.
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
