// How the columns are divided, the end of a product, and what the kernels share in global memory.
//
// A row's units are cut into SLOTS pieces of neighbours; the sum of each is computed unit by unit,
// and the sums are added in order.  That order depends on the number of columns alone: not on how
// many tokens there are, nor on which thread block computes what.
#pragma once
#include "qmatmul/staging.cuh"

constexpr int SLOTS = 8;

DEV int slot_start(int slot, int n_units) { return n_units * slot / SLOTS; }

// A result of row `row` (of its matrix) and a token, with the bias and the old one.
struct Output {
  float* out;
  const float* bias;
  long long stride;
  int n_rows, accumulate;

  DEV void put(float v, int row, int token) const {
    if (row >= n_rows) return;
    v *= OUT;
    if (bias) v += bias[row];
    float* at = out + token * stride + row;
    *at = accumulate ? v + *at : v;
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
