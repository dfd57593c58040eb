// Active experts of a batch in order, written by the first kernel of a fused MoE layer, read by both.
#pragma once
#include "cuda/types.cuh"

constexpr int MAX_TOKENS = 8;

struct ActiveExpert {
  int expert;
  int pairs[MAX_TOKENS];  // index token * k + j of the pair of token and expert; -1: none
};

struct Plan {
  int n;
  ActiveExpert active[1];  // n entries
};

// Fill the plan with the active ones of experts [first, first + n); by 256 threads, after `ids` is visible.
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
      ActiveExpert& c = plan->active[place];
      c.expert = e;
      for (int t = 0; t < MAX_TOKENS; t++) {
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
