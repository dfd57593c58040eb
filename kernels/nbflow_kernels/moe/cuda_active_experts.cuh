// The experts that any token goes to, in order, as the kernels of a layer hand them on.
#pragma once
#include "cuda/types.cuh"

constexpr int MOST_TOKENS = 8;

struct Chosen {
  int expert;
  int pairs[MOST_TOKENS];  // number of the token's pair with this expert, token * k + j; -1: none
};

struct Plan {
  int n;
  Chosen chosen[1];  // n of them
};

// Fill the plan: all of 256 threads, of whom every one sees `ids`.  Experts [first, first + n) count.
DEV void make_plan(Plan* plan, const int* ids, int n_tokens, int k, int first, int n) {
  __shared__ int in_warp[8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int before = 0;
  for (int base = 0; base < n; base += 256) {
    const int e = base + threadIdx.x;
    bool wanted = false;
    for (int p = 0; e < n && p < n_tokens * k; p++) wanted |= ids[p] == first + e;
    const u32 mask = __ballot_sync(0xffffffffu, wanted);
    if (lane == 0) in_warp[warp] = __popc(mask);
    __syncthreads();
    int place = before + __popc(mask & ((1u << lane) - 1u));
    for (int w = 0; w < 8; w++) {
      place += w < warp ? in_warp[w] : 0;
      before += in_warp[w];
    }
    if (wanted) {
      Chosen& c = plan->chosen[place];
      c.expert = e;
      for (int t = 0; t < MOST_TOKENS; t++) {
        int pair = -1;
        for (int j = 0; t < n_tokens && j < k; j++)
          if (ids[t * k + j] == first + e) pair = t * k + j;
        c.pairs[t] = pair;
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) plan->n = before;
}
