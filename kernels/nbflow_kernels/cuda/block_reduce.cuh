// Sums and maxima over a thread block, in an order that depends on nothing but THREADS.
#pragma once

struct Sum {
  template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};

struct Max {  // of floats: a NaN does not win
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ int operator()(int a, int b) const { return max(a, b); }
};

template <int LANES, class T, class Op> __device__ T reduce_lanes(T value, Op op) {
  for (int mask = LANES / 2; mask > 0; mask /= 2)
    value = op(value, __shfl_xor_sync(0xffffffffu, value, mask));
  return value;
}

// All threads get the result; `scratch` holds THREADS / 32 values and may be reused at once.
// threadIdx.x counts THREADS threads, a power of two from 32 to 1024.
template <int THREADS, class T, class Op> __device__ T reduce_block(T value, Op op, T* scratch) {
  value = reduce_lanes<32>(value, op);
  if (THREADS == 32) return value;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[threadIdx.x % (THREADS / 32)];
  value = reduce_lanes<THREADS / 32>(value, op);
  __syncthreads();
  return value;
}
