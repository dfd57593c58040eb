// Thread blocks of a cluster read each other's shared memory.
#include "cuda/types.cuh"
#include "cuda/sm90.cuh"

// out[block] = 100 + the block that is its peer.
extern "C" __global__ void __cluster_dims__(2, 1, 1) read_peer(int* out) {
  __shared__ int own;
  if (threadIdx.x == 0) own = 100 + blockIdx.x;
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  wait_for_cluster();
  u32 place = place_in_cluster((u32)__cvta_generic_to_shared(&own), rank_in_cluster() ^ 1);
  int value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(place) : "memory");
  if (threadIdx.x == 0) out[blockIdx.x] = value;
  leave_cluster();
  wait_for_cluster();
}
