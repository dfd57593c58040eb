// Kernels that show how a device works: one tensor-core instruction, a large shared memory.
#include "cuda/ptx.cuh"

// c += a b by one instruction: a is 16 x 16, b has its 8 columns of 16 as rows, c is 16 x 8.
extern "C" __global__ void one_mma(const u32* a, const u32* b, float* c) {
  int row = threadIdx.x / 4, pair = threadIdx.x % 4;
  const u32 *low = a + 8 * row + pair, *high = low + 64, *column = b + 8 * row + pair;
  u32 operand[4] = {low[0], high[0], low[4], high[4]};
  float *first = c + 8 * row + 2 * pair, *second = first + 64;
  float sums[4] = {first[0], first[1], second[0], second[1]};
  mma_f16(sums, operand, column[0], column[4]);
  first[0] = sums[0], first[1] = sums[1];
  second[0] = sums[2], second[1] = sums[3];
}

// out = x in reverse order, through n numbers of dynamic shared memory.
extern "C" __global__ void reverse(const int* x, int* out, int n) {
  extern __shared__ int room[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) room[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = room[n - 1 - i];
}
