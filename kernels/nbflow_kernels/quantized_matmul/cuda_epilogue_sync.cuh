// Synchronization of fused epilogues: the last thread block to finish its share of an output region
// (atomic arrival counter) runs the epilogue of that region.
//
// A region is the rows of a head, 64 columns of the gate and the up projection, or all rows.
#pragma once
#include "quantized_matmul/cuda_split_k.cuh"

// One or two ranges [first, last] of row-tile groups; empty if last < first.
struct Groups {
  int first, last, more_first, more_last;
};

// The groups of rows [a, b), and of rows [c, d) after them.
DEV Groups groups_of(int a, int b, int c, int d, int rows_of_group) {
  Groups g = {a / rows_of_group, (b - 1) / rows_of_group, 0, -1};
  if (c < d) {
    g.more_first = max(c / rows_of_group, g.last + 1);
    g.more_last = (d - 1) / rows_of_group;
  }
  return g;
}

// Number of groups up to `last` that this thread block computes: blockIdx.x, + gridDim.x, ...
DEV int own_groups(int last) {
  return last < (int)blockIdx.x ? 0 : (last - blockIdx.x) / gridDim.x + 1;
}

DEV int own_groups(int first, int last) {
  return last < first ? 0 : own_groups(last) - own_groups(first - 1);
}

// Run finish(region, token) for the regions that are now complete, by a warp per token, or with
// BY_BLOCK finish(region) by all threads.  The counters `arrived` start at zero and end at zero.
template <bool BY_BLOCK, class GroupsOf, class Finish>
DEV void finish_regions(
    int* arrived, int n_regions, int n_tokens, GroupsOf groups_of_region, Finish finish) {
  __shared__ int ready[32 * WARPS], n_ready;
  __threadfence();
  for (int first = 0; first < n_regions; first += 32 * WARPS) {
    __syncthreads();
    if (threadIdx.x == 0) n_ready = 0;
    __syncthreads();
    const int region = first + threadIdx.x;
    if (region < n_regions) {
      const Groups g = groups_of_region(region);
      const int own = own_groups(g.first, g.last) + own_groups(g.more_first, g.more_last);
      const int all = g.last - g.first + 1 + max(0, g.more_last - g.more_first + 1);
      if (own && atomicAdd(arrived + region, own) + own == all * (int)gridDim.y) {
        arrived[region] = 0;
        ready[atomicAdd(&n_ready, 1)] = region;
      }
    }
    __syncthreads();
    __threadfence();
    if constexpr (BY_BLOCK) {
      for (int i = 0; i < n_ready; i++) finish(ready[i], 0);
    } else {
      for (int i = threadIdx.x >> 5; i < n_ready * n_tokens; i += WARPS)
        finish(ready[i / n_tokens], i % n_tokens);
    }
  }
}
