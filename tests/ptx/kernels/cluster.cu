// Kernels of thread block clusters; `bug` plants one of the mistakes that a check must find (0: none).
typedef unsigned int u32;
typedef unsigned long long u64;
#define ASM asm volatile
#define PAIR __cluster_dims__(2, 1, 1)

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ u32 rank() {
  u32 r;
  ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ u32 map(u32 address, u32 rank) {
  u32 to;
  ASM("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address), "r"(rank));
  return to;
}
__device__ float load(u32 address) {
  float v;
  ASM("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ void give() { ASM("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ void give_relaxed() { ASM("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ void take() { ASM("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ void meet() { give(), take(); }

__device__ void init(u64* bar, u32 count) {
  ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
__device__ void publish() { ASM("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void arrive(u32 bar) {
  ASM("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ void expect(u64* bar, u32 bytes) {
  ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)),
      "r"(bytes) : "memory");
}
__device__ void wait(u64* bar, u32 parity) {
  u32 done = 0;
  while (!done)
    ASM("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
}
__device__ void multicast(void* to, const void* from, u32 bytes, u64* bar, unsigned short blocks) {
  ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)), "l"(from), "r"(bytes),
      "r"(shared_address(bar)), "h"(blocks) : "memory");
}

// Each block reads what the other one of its pair has written.
extern "C" __global__ void PAIR swap(const float* x, float* y, int bug) {
  __shared__ float s[64];
  const u32 t = threadIdx.x;
  if (bug != 1 || t < 32) s[t] = x[64 * blockIdx.x + t];
  if (bug == 2) __syncthreads();
  else if (bug == 3) give_relaxed(), take();
  else meet();
  if (bug == 4) give();
  if (bug == 5 && blockIdx.x == 1) ASM("exit;");
  const u32 from = map(shared_address(s + 63 - t), (rank() ^ 1) + (bug == 6));
  y[64 * blockIdx.x + t] = load(from + (bug == 7 ? 64 * 4 : 0));
  if (bug == 8) take();
  if (bug == 9) s[t] = 2;
  if (bug != 10) meet();
  if (bug == 11) y[64 * (blockIdx.x ^ 1) + t] = 1;
}

// The same by addresses that say nothing of their space; sums of the cluster's first block.
extern "C" __global__ void __cluster_dims__(1, 2, 2) sum(u32* y) {
  __shared__ u32 n, places[4];
  if (threadIdx.x == 0) n = 0;
  meet();
  u64 to;
  ASM("mapa.u64 %0, %1, 0;" : "=l"(to) : "l"((u64)&n));
  atomicAdd((u32*)to, threadIdx.x + 1);
  ASM("mapa.u64 %0, %1, 0;" : "=l"(to) : "l"((u64)(places + rank())));
  u32 whose;
  ASM("getctarank.u64 %0, %1;" : "=r"(whose) : "l"(to));
  if (threadIdx.x == 0) *(u32*)to = (blockIdx.x << 8 | blockIdx.y << 4 | blockIdx.z) + whose;
  meet();
  u32 id[6];
  ASM("mov.u32 %0, %%clusterid.y; mov.u32 %1, %%nclusterid.y; mov.u32 %2, %%cluster_ctaid.z;"
      "mov.u32 %3, %%cluster_nctaid.z; mov.u32 %4, %%cluster_nctarank;"
      "{ .reg .pred p; mov.pred p, %%is_explicit_cluster; selp.u32 %5, 1, 0, p; }"
      : "=r"(id[0]), "=r"(id[1]), "=r"(id[2]), "=r"(id[3]), "=r"(id[4]), "=r"(id[5]));
  y += 12 * (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
  if (threadIdx.x < 6) y[threadIdx.x] = id[threadIdx.x];
  if (threadIdx.x == 6) y[6] = rank(), y[7] = n;
  if (threadIdx.x >= 8 && threadIdx.x < 12) y[threadIdx.x] = rank() ? 0 : places[threadIdx.x - 8];
}

// Two blocks add up the same n pieces of 64 numbers, of which each fetches one half for both.
extern "C" __global__ void PAIR __launch_bounds__(64) share(const float* x, float* y, int n, int bug) {
  constexpr int STAGES = 2;
  __shared__ __align__(128) float stages[STAGES][64];
  __shared__ u64 full[STAGES], used[STAGES];
  const u32 t = threadIdx.x, half = 32 * rank();
  if (t == 0) {
    for (int i = 0; i < STAGES; i++) init(full + i, 1), init(used + i, bug == 1 ? 2 : 4);
    if (bug != 2) publish();
  }
  if (bug == 3) __syncthreads();
  else if (bug == 4) meet();
  else give_relaxed(), take();
  auto fetch = [&](int k) {
    const int i = k % STAGES;
    expect(full + i, bug == 5 ? 128 : 256);
    multicast(stages[i] + half, x + 64 * k + half, 128, full + i, bug == 6 ? 1 : bug == 7 ? 7 : 3);
  };
  if (t == 0)
    for (int k = 0; k < min(n, STAGES); k++) fetch(k);
  const u32 release = map(shared_address(used), bug == 1 ? rank() : t & 1);
  float sum = 0;
  for (int k = 0; k < n; k++) {
    const int i = k % STAGES;
    wait(full + i, k / STAGES & 1);
    sum += stages[i][t];
    __syncwarp();
    if (t % 32 < (bug == 1 || bug == 8 ? 1 : 2)) arrive(release + 8 * i);
    if (t == 0 && k + STAGES < n) {
      if (bug != 9) wait(used + i, k / STAGES & 1);
      fetch(k + STAGES);
    }
  }
  y[64 * blockIdx.x + t] = sum;
  if (bug != 10) meet();
}

// Barriers of each half of a block.
extern "C" __global__ void PAIR halves(float* y, int bug) {
  __shared__ float s[128];
  const u32 t = threadIdx.x;
  s[t] = t;
  if (bug == 1) __syncwarp();
  else ASM("bar.sync %0, 64;" ::"r"(1 + t / 64) : "memory");
  y[128 * blockIdx.x + t] = s[t ^ 63];
}

// Without a cluster, `barrier.cluster` is a barrier of the block.
extern "C" __global__ void alone(float* y) {
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x;
  meet();
  y[threadIdx.x] = s[63 - threadIdx.x];
}
