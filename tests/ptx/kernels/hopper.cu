// Kernels for compute capability 9.0, each with a bug that a check must find, and repaired.
typedef unsigned int u32;
typedef unsigned long long u64;
#define ASM asm volatile

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A tile that lies as columns of 16 bytes, `leading` bytes apart (no swizzle): 8 rows are 128 bytes.
__device__ u64 plain(const void* p, u32 leading) {
  return (u64)(shared_address(p) >> 4) | (u64)(leading >> 4) << 16 | (u64)(128 >> 4) << 32;
}
// A tile of rows of 128 bytes, swizzled.
__device__ u64 swizzled(const void* p) {
  return (u64)(shared_address(p) >> 4) | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// d (64 x 8) += a b, 16 along K.
__device__ void product(float (&d)[4], u64 a, u64 b) {
  ASM("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
}
__device__ void product(float (&d)[4], const u32 (&a)[4], u64 b) {
  ASM("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, "
      "1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ void begin() { ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void commit() { ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ void finish() {
  ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ void visible() { ASM("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ void init(u64* bar, u32 count) {
  ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
__device__ void publish() { ASM("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void arrive(u64* bar) {
  ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
__device__ void expect(u64* bar, u32 bytes) {
  ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)),
      "r"(bytes) : "memory");
}
__device__ bool try_wait(u64* bar, u32 parity) {
  u32 done;
  ASM("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
  return done;
}
__device__ void wait(u64* bar, u32 parity) { while (!try_wait(bar, parity)) {} }
__device__ void bulk(void* to, const void* from, u32 bytes, u64* bar) {
  ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
      "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(bar)) : "memory");
}
__device__ bool elected() {
  u32 yes;
  ASM("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(yes));
  return yes;
}

// Two tiles of 64 x 16 and 8 x 16 as the products take them: 2048 and 256 bytes.
struct Tiles { uint4 a[128]; uint4 b[16]; };
__device__ void load(Tiles& s, const uint4* x) {
  s.a[threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x < 16) s.b[threadIdx.x] = x[128 + threadIdx.x];
}
__device__ void save(float* y, const float (&d)[4]) {
  for (int k = 0; k < 4; ++k) y[4 * threadIdx.x + k] = d[k];
}
#define TILES __shared__ __align__(1024) Tiles s

// ---- registers

template <bool OK> __device__ void accumulator(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  load(s, x);
  visible();
  __syncthreads();
  begin();
  product(d, plain(s.a, 1024), plain(s.b, 128));
  commit();
  if (OK) finish<0>();
  save(y, d);
  if (!OK) finish<0>();
}

template <bool OK> __device__ void unfenced(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  load(s, x);
  visible();
  __syncthreads();
  if (OK) begin();
  product(d, plain(s.a, 1024), plain(s.b, 128));
  commit();
  finish<0>();
  save(y, d);
}

template <bool OK> __device__ void late(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  load(s, x);
  visible();
  __syncthreads();
  begin();
  for (int r = 0; r < 2; ++r) {
    product(d, plain(s.a, 1024), plain(s.b, 128));
    commit();
    finish<0>();
    for (int k = 0; k < 4; ++k) d[k] *= 0.5f;
    if (OK) begin();
  }
  save(y, d);
}

template <bool OK> __device__ void fragment(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  load(s, x);
  visible();
  __syncthreads();
  u32 a[4] = {x[0].x, x[1].y, x[2].z, x[3].w};
  for (int r = 0; r < 2; ++r) {
    begin();
    product(d, a, plain(s.b, 128));
    commit();
    if (OK) finish<0>();
    for (int k = 0; k < 4; ++k) ASM("add.u32 %0, %0, 1;" : "+r"(a[k]));
    finish<0>();
  }
  save(y, d);
}

template <bool OK> __device__ void end(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  load(s, x);
  visible();
  __syncthreads();
  begin();
  product(d, plain(s.a, 1024), plain(s.b, 128));
  commit();
  if (OK) finish<0>();
  y[threadIdx.x] = 1;
}

template <bool OK> __device__ void descriptor(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  load(s, x);
  visible();
  __syncthreads();
  begin();
  product(d, plain(s.a, 1024), plain(s.b, OK ? 128 : 128 + 16 * (threadIdx.x == 77)));
  commit();
  finish<0>();
  save(y, d);
}

// ---- what is read

template <bool OK> __device__ void store(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  load(s, x);
  if (OK) visible();
  __syncthreads();
  begin();
  product(d, plain(s.a, 1024), plain(s.b, 128));
  commit();
  finish<0>();
  save(y, d);
}

template <bool OK> __device__ void order(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  load(s, x);
  visible();
  if (OK) __syncthreads();
  begin();
  product(d, plain(s.a, 1024), plain(s.b, 128));
  commit();
  finish<0>();
  save(y, d);
}

template <bool OK> __device__ void unwritten(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  if (OK || threadIdx.x < 100) s.a[threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x < 16) s.b[threadIdx.x] = x[128 + threadIdx.x];
  visible();
  __syncthreads();
  begin();
  product(d, plain(s.a, 1024), plain(s.b, 128));
  commit();
  finish<0>();
  save(y, d);
}

template <bool OK> __device__ void outside(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  load(s, x);
  visible();
  __syncthreads();
  begin();
  product(d, plain(s.a, 1024), plain(s.b, OK ? 128 : 256));
  commit();
  finish<0>();
  save(y, d);
}

template <bool OK> __device__ void pattern(const uint4* x, float* y) {
  __shared__ __align__(1024) uint4 s[72 * 8];
  float d[4] = {};
  for (int k = threadIdx.x; k < 72 * 8; k += 128) s[k] = x[k];
  visible();
  __syncthreads();
  begin();
  product(d, swizzled(OK ? s + 2 : s + 8), swizzled(s + 64 * 8));
  commit();
  finish<0>();
  save(y, d);
}

template <bool OK> __device__ void tile(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  for (int r = 0; r < 2; ++r) {
    load(s, x + 144 * r);
    visible();
    __syncthreads();
    begin();
    product(d, plain(s.a, 1024), plain(s.b, 128));
    commit();
    if (OK) finish<0>();
    __syncthreads();
  }
  finish<0>();
  save(y, d);
}

template <bool OK> __device__ void part(const uint4* x, float* y) {
  TILES;
  float d[4] = {};
  load(s, x);
  visible();
  __syncthreads();
  if (OK || threadIdx.x < 96) {
    begin();
    product(d, plain(s.a, 1024), plain(s.b, 128));
    commit();
    finish<0>();
  }
  __syncthreads();
  save(y, d);
}

// ---- mbarriers and bulk copies

template <bool OK> __device__ void unwaited(const uint4* x, float* y) {
  TILES;
  __shared__ u64 bar;
  if (threadIdx.x == 0) init(&bar, 1), publish();
  __syncthreads();
  if (threadIdx.x == 0) expect(&bar, sizeof s), bulk(&s, x, sizeof s, &bar);
  if (OK) wait(&bar, 0);
  y[threadIdx.x] = s.a[threadIdx.x].x;
  if (!OK) wait(&bar, 0);
}

template <bool OK> __device__ void once(const uint4* x, float* y) {
  TILES;
  __shared__ u64 bar;
  if (threadIdx.x == 0) init(&bar, 1), publish();
  __syncthreads();
  if (threadIdx.x == 0) expect(&bar, sizeof s), bulk(&s, x, sizeof s, &bar);
  if (OK) wait(&bar, 0); else try_wait(&bar, 0);
  y[threadIdx.x] = s.a[threadIdx.x].x;
}

template <bool OK> __device__ void phase(const uint4* x, float* y) {
  TILES;
  __shared__ u64 bar;
  if (threadIdx.x == 0) init(&bar, 1), publish();
  __syncthreads();
  for (u32 r = 0; r < 2; ++r) {
    if (threadIdx.x == 0) expect(&bar, sizeof s), bulk(&s, x + 144 * r, sizeof s, &bar);
    wait(&bar, OK ? r : 0);
    y[128 * r + threadIdx.x] = s.a[threadIdx.x].x;
    __syncthreads();
  }
}

template <bool OK> __device__ void bytes(const uint4* x, float* y) {
  TILES;
  __shared__ u64 bar;
  if (threadIdx.x == 0) init(&bar, 1), publish();
  __syncthreads();
  if (threadIdx.x == 0) expect(&bar, sizeof s + (OK ? 0 : 16)), bulk(&s, x, sizeof s, &bar);
  wait(&bar, 0);
  y[threadIdx.x] = s.a[threadIdx.x].x;
}

template <bool OK> __device__ void count(const uint4* x, float* y) {
  TILES;
  __shared__ u64 bar;
  if (threadIdx.x == 0) init(&bar, OK ? 2 : 1), publish();
  __syncthreads();
  if (threadIdx.x == 0) expect(&bar, sizeof s), bulk(&s, x, sizeof s, &bar), arrive(&bar);
  wait(&bar, 0);
  y[threadIdx.x] = s.a[threadIdx.x].x;
}

template <bool OK> __device__ void early(const uint4* x, float* y) {
  __shared__ u64 bar;
  if (threadIdx.x == 0) init(&bar, 128);
  if (OK) __syncthreads(); else __syncwarp();
  arrive(&bar);
  wait(&bar, 0);
}

template <bool OK> __device__ void unpublished(const uint4* x, float* y) {
  TILES;
  __shared__ u64 bar;
  if (threadIdx.x == 0) {
    init(&bar, 1);
    if (OK) publish();
    expect(&bar, sizeof s);
    bulk(&s, x, sizeof s, &bar);
  }
  __syncthreads();
  wait(&bar, 0);
  y[threadIdx.x] = s.a[threadIdx.x].x;
}

template <bool OK> __device__ void overwritten(const uint4* x, float* y) {
  TILES;
  __shared__ u64 bar;
  if (threadIdx.x == 0) init(&bar, 1), publish();
  __syncthreads();
  s.a[threadIdx.x] = x[threadIdx.x];
  if (OK) visible();
  __syncthreads();
  if (threadIdx.x == 0) expect(&bar, sizeof s), bulk(&s, x, sizeof s, &bar);
  wait(&bar, 0);
  y[threadIdx.x] = s.a[threadIdx.x].x;
}

template <bool OK> __device__ void handed(const uint4* x, float* y) {
  // one warp hands values to another by an mbarrier
  __shared__ float s[32];
  __shared__ u64 bar;
  if (threadIdx.x == 0) init(&bar, 32);
  __syncthreads();
  if (threadIdx.x < 32) {
    s[threadIdx.x] = x[threadIdx.x].x;
    if (OK) arrive(&bar);
  } else if (threadIdx.x < 64) {
    if (OK) wait(&bar, 0);
    y[threadIdx.x] = s[63 - threadIdx.x];
  }
}

template <bool OK> __device__ void copies(const uint4* x, float* y) {
  TILES;
  __shared__ u64 bar;
  if (threadIdx.x == 0) init(&bar, 128);
  __syncthreads();
  ASM("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(s.a + threadIdx.x)),
      "l"(x + threadIdx.x));
  if (OK) {
    ASM("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&bar)));
  } else {
    arrive(&bar);
  }
  wait(&bar, 0);
  y[threadIdx.x] = s.a[127 - threadIdx.x].x;
  ASM("cp.async.wait_all;");
}

template <bool OK> __device__ void released(const uint4* x, float* y, int n) {
  // a producer fills one tile again and again, a warpgroup takes products of it
  TILES;
  __shared__ u64 full, empty;
  if (threadIdx.x == 0) init(&full, 1), init(&empty, 1), publish();
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (elected()) {
      for (int r = 0; r < n; ++r) {
        if (OK) wait(&empty, r & 1 ^ 1);
        else if (r) wait(&full, r & 1 ^ 1);  // its own copy, not the products that use it
        expect(&full, sizeof s);
        bulk(&s, x + 144 * r, sizeof s, &full);
      }
    }
  } else {
    float d[4] = {};
    for (int r = 0; r < n; ++r) {
      wait(&full, r & 1);
      begin();
      product(d, plain(s.a, 1024), plain(s.b, 128));
      commit();
      finish<0>();
      if (threadIdx.x == 37) arrive(&empty);  // a wait is of the whole warpgroup
    }
    save(y, d);
  }
}

#define PLANT(CHECK, NAME)                                                             \
  extern "C" __global__ void CHECK##_##NAME(const uint4* x, float* y) { NAME<false>(x, y); } \
  extern "C" __global__ void CHECK##_##NAME##_ok(const uint4* x, float* y) { NAME<true>(x, y); }
PLANT(wgmma, accumulator)
PLANT(wgmma, unfenced)
PLANT(wgmma, late)
PLANT(wgmma, fragment)
PLANT(wgmma, end)
PLANT(wgmma, descriptor)
PLANT(proxy, store)
PLANT(race, order)
PLANT(uninitialised, unwritten)
PLANT(bounds, outside)
PLANT(aligned, pattern)
PLANT(race, tile)
PLANT(masks, part)
PLANT(race, unwaited)
PLANT(race, once)
PLANT(race, phase)
PLANT(barrier, bytes)
PLANT(barrier, count)
PLANT(race, early)
PLANT(proxy, unpublished)
PLANT(proxy, overwritten)
PLANT(race, handed)
PLANT(race, copies)
extern "C" __global__ void race_released(const uint4* x, float* y) { released<false>(x, y, 4); }
extern "C" __global__ void race_released_ok(const uint4* x, float* y) { released<true>(x, y, 4); }

// ---- a product of 128 x 8 by warpgroups that have roles: one thread copies, two warpgroups multiply

template <int N> __device__ void meet(int number) {
  ASM("bar.sync %0, %1;" ::"r"(number), "n"(N) : "memory");
}

// Step k of block b takes 4096 bytes of A and 256 of B, as the products take them.
extern "C" __global__ void __launch_bounds__(384) pipeline(const uint4* a, const uint4* b, float* y,
                                                           int n) {
  constexpr int STAGES = 3;
  struct Stage { uint4 a[256]; uint4 b[16]; };
  extern __shared__ __align__(1024) Stage stages[];
  __shared__ u64 full[STAGES], empty[STAGES];
  int role = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) init(full + s, 1), init(empty + s, 2);
    publish();
  }
  __syncthreads();
  if (role == 2) {
    ASM("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 288 && elected()) {
      for (int k = 0; k < n; ++k) {
        Stage& stage = stages[k % STAGES];
        u64* bar = full + k % STAGES;
        wait(empty + k % STAGES, k / STAGES & 1 ^ 1);
        expect(bar, sizeof(Stage));
        bulk(stage.a, a + 256 * (n * blockIdx.x + k), sizeof stage.a, bar);
        bulk(stage.b, b + 16 * k, sizeof stage.b, bar);
      }
    }
    return;
  }
  ASM("setmaxnreg.inc.sync.aligned.u32 232;");
  float d[4] = {};
  for (int k = 0; k < n; ++k) {
    Stage& stage = stages[k % STAGES];
    wait(full + k % STAGES, k / STAGES & 1);
    begin();
    product(d, plain(stage.a + 128 * role, 1024), plain(stage.b, 128));
    commit();
    finish<1>();  // the product before this one is done: its stage may be filled again
    if (k && threadIdx.x % 128 == 0) arrive(empty + (k - 1) % STAGES);
  }
  finish<0>();
  // both warpgroups put their parts where the stages were
  meet<256>(1);
  float* out = (float*)stages[0].b;
  for (int i = 0; i < 4; ++i) {
    int row = 16 * (threadIdx.x / 32) + threadIdx.x % 32 / 4 + 8 * (i / 2);
    out[8 * row + 2 * (threadIdx.x % 4) + i % 2] = d[i];
  }
  meet<256>(1);
  for (int i = threadIdx.x; i < 1024; i += 256) y[1024 * blockIdx.x + i] = out[i];
}
