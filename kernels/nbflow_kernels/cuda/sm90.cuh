// PTX wrappers for Hopper (compute capability 9.0, sm_90a): wgmma, mbarrier, bulk copies, clusters.
#pragma once
#include "cuda/ptx.cuh"

DEV u32 shared_place(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- barriers and copies -------------------------------------------------------------------------

// A phase of a barrier ends when `count` threads have arrived and all announced bytes are there.
DEV void start_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Fence that makes barriers initialized by this thread visible to bulk copies; a __syncthreads() follows.
DEV void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEV void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEV void arrive_expecting(u32 barrier, u32 n_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n_bytes)
               : "memory");
}

// Wait for the end of a phase: parity 0 for even phases, 1 for odd ones.
DEV void wait_for_phase(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}

// ---- clusters: thread blocks that run together ----------------------------------------------------

// Rank of this thread block in its cluster.
DEV u32 rank_in_cluster() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Cluster address (mapa) of a shared memory location in the thread block of a rank.
DEV u32 place_in_cluster(u32 place, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(rank));
  return there;
}

// Arrive at a barrier of any thread block of the cluster.  Cluster scope would be a slow fence for all
// memory; after `wait_for_products` nothing is left to order.
DEV void arrive_in_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Cluster barrier at the start (converged warps): all thread blocks run and have published barriers.
DEV void meet_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Cluster barrier before exit (converged warps): no peer may still access this block's shared memory.
DEV void leave_cluster() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }

DEV void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Bulk copy of a multiple of 16 bytes to shared memory; the barrier counts the bytes.
DEV void copy_bulk(u32 to_shared, const void* from, u32 n_bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to_shared), "l"(from), "r"(n_bytes), "r"(barrier) : "memory");
}

// Multicast bulk copy to the same address and barrier in the first `blocks` blocks of the cluster.
DEV void copy_bulk_to_all(u32 to_shared, const void* from, u32 n_bytes, u32 barrier, int blocks) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1], %2, [%3], %4;"
               ::"r"(to_shared), "l"(from), "r"(n_bytes), "r"(barrier), "h"((u16)((1 << blocks) - 1))
               : "memory");
}

// ---- products of warpgroups ----------------------------------------------------------------------

// wgmma descriptor of a matrix with 128-byte swizzle: lines of 64 16-bit numbers, 8 lines per 1024 bytes,
// 16-byte chunk c of line n at c ^ (n & 7).  `place` is a multiple of 1024 plus 32 for each 16 numbers
// along the lines.  The product sums along the lines, or over 16 lines if TRANSPOSED; `block` is the
// distance in bytes between blocks of 64 numbers.
DEV u64 describe_lines(u32 place, u32 block = 16) {
  constexpr u64 SWIZZLE_128 = 1ull << 62, EIGHT = (1024ull >> 4) << 32;
  return SWIZZLE_128 | EIGHT | (u64)(block >> 4) << 16 | (place & 0x3ffff) >> 4;
}

// Descriptor advanced by `n_bytes`.
DEV u64 lines_behind(u64 lines, u32 n_bytes) {
  return (u64)(u32)(lines >> 32) << 32 | ((u32)lines + (n_bytes >> 4));
}

// Make this thread's writes to shared memory visible to wgmma after a barrier.
DEV void publish_lines() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// wgmma.fence before the first product: orders this thread's register writes.
DEV void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEV void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most LEFT groups are in flight: before results are read or register operands are
// written.
template <int LEFT = 0>
DEV void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// Scheduling barrier: keeps waits for products from moving up over work meant to overlap with them.
// Empty assembly or __syncwarp leaves no machine instruction here, and ptxas 12.9 then moves the second
// wait of `flash_prefill_wgmma.cu` up to the first, so that the softmax of a tile no longer overlaps with
// the product before it.  ptxas keeps the order of pmevent and waits; pmevent itself only counts an event
// for profilers, in one instruction.
DEV void stay_in_front() { asm volatile("pmevent 0;"); }

// Keep accesses of accumulators on their side of a product or wait.
template <int N>
DEV void hold(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i]));
}

// wgmma: c = a b, or c += a b, of 64 rows x 16 columns (16 rows per warp, in the layout of `mma_f16`) and
// 16 columns x TOKENS; the sums of each 8 tokens are in the layout of `mma_f16`.  Rows are in registers
// or in shared memory that `a` describes.
template <int NUMBER, int TOKENS, bool TRANSPOSED = false> struct Product;

#define SUMS_8(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define SUMS_32(c, i) SUMS_8(c, i), SUMS_8(c, i + 8), SUMS_8(c, i + 16), SUMS_8(c, i + 24)
#define NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
  NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_96 \
  NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, " \
  "%88, %89, %90, %91, %92, %93, %94, %95"

#define NAMES_128 \
  NAMES_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"

#define RUN(TYPE, TRANSPOSED, TOKENS, NAMES, A, B, ADD)                                   \
  "{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; "                                           \
  "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32." TYPE "." TYPE " {" NAMES "}, " A \
  ", " B ", p, 1, 1, " TRANSPOSED "; }"

#define PRODUCT(NUMBER, TYPE, TRANSPOSED, TOKENS, NAMES, A0, A1, A2, A3, B, ADD, ...)                           \
  template <> struct Product<NUMBER, TOKENS, TRANSPOSED> {                                                      \
    static DEV_METHOD void run(float (&c)[TOKENS / 2], const u32 (&a)[4], u64 b, bool add) {                    \
      asm volatile(RUN(TYPE, #TRANSPOSED, TOKENS, NAMES, "{" A0 ", " A1 ", " A2 ", " A3 "}", B, ADD)            \
                   : __VA_ARGS__                                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));                        \
    }                                                                                                           \
    static DEV_METHOD void run(float (&c)[TOKENS / 2], u64 a, u64 b, bool add) {                                \
      asm volatile(RUN(TYPE, "0, " #TRANSPOSED, TOKENS, NAMES, A0, A1, A2)                                      \
                   : __VA_ARGS__                                                                                \
                   : "l"(a), "l"(b), "r"((int)add));                                                            \
    }                                                                                                           \
  };
#define PRODUCT_64(NUMBER, TYPE, TRANSPOSED) \
  PRODUCT(NUMBER, TYPE, TRANSPOSED, 64, NAMES_32, "%32", "%33", "%34", "%35", "%36", "%37", SUMS_32(c, 0))
#define PRODUCT_128(NUMBER, TYPE, TRANSPOSED) \
  PRODUCT(NUMBER, TYPE, TRANSPOSED, 128, NAMES_64, "%64", "%65", "%66", "%67", "%68", "%69", SUMS_32(c, 0), SUMS_32(c, 32))
#define PRODUCT_192(NUMBER, TYPE, TRANSPOSED) \
  PRODUCT(NUMBER, TYPE, TRANSPOSED, 192, NAMES_96, "%96", "%97", "%98", "%99", "%100", "%101", SUMS_32(c, 0), SUMS_32(c, 32), SUMS_32(c, 64))
#define PRODUCT_256(NUMBER, TYPE, TRANSPOSED) \
  PRODUCT(NUMBER, TYPE, TRANSPOSED, 256, NAMES_128, "%128", "%129", "%130", "%131", "%132", "%133", SUMS_32(c, 0), SUMS_32(c, 32), SUMS_32(c, 64), SUMS_32(c, 96))
PRODUCT_64(F16_KIND, "f16", 0)
PRODUCT_64(BF16_KIND, "bf16", 0)
PRODUCT_128(F16_KIND, "f16", 0)
PRODUCT_128(BF16_KIND, "bf16", 0)
PRODUCT_192(F16_KIND, "f16", 0)
PRODUCT_192(BF16_KIND, "bf16", 0)
PRODUCT_64(F16_KIND, "f16", 1)
PRODUCT_64(BF16_KIND, "bf16", 1)
PRODUCT_128(F16_KIND, "f16", 1)
PRODUCT_128(BF16_KIND, "bf16", 1)
PRODUCT_192(F16_KIND, "f16", 1)
PRODUCT_192(BF16_KIND, "bf16", 1)
PRODUCT_256(F16_KIND, "f16", 1)
PRODUCT_256(BF16_KIND, "bf16", 1)
