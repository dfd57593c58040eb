// Kernels with one bug each, and the same kernel without it (its name ends in _ok).

extern "C" __global__ void bounds(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) y[i] = x[i];
}
extern "C" __global__ void bounds_ok(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}

// Dynamic shared memory of blockDim.x floats, one element too far.
extern "C" __global__ void bounds_shared(float* y) {
    extern __shared__ float s[];
    s[threadIdx.x + 1] = 1.0f;
    y[threadIdx.x] = 0.0f;
}
extern "C" __global__ void bounds_shared_ok(float* y) {
    extern __shared__ float s[];
    s[threadIdx.x] = 1.0f;
    y[threadIdx.x] = 0.0f;
}

extern "C" __global__ void aligned(const float* x, float* y) {
    float4 v = *(const float4*)(x + 4 * threadIdx.x + 1);
    y[threadIdx.x] = v.x + v.y + v.z + v.w;
}
extern "C" __global__ void aligned_ok(const float* x, float* y) {
    float4 v = *(const float4*)(x + 4 * threadIdx.x);
    y[threadIdx.x] = v.x + v.y + v.z + v.w;
}

extern "C" __global__ void uninitialised_shared(const float* x, float* y) {
    __shared__ float s[64];
    int t = threadIdx.x;
    if (t > 0) s[t] = x[t];
    __syncthreads();
    y[t] = s[t];
}
extern "C" __global__ void uninitialised_shared_ok(const float* x, float* y) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    y[t] = s[t];
}

extern "C" __global__ void uninitialised_local(const int* k, float* y) {
    float a[8];
    for (int j = 0; j < 7; ++j) a[(j + k[0]) & 7] = j;
    y[threadIdx.x] = a[k[threadIdx.x] & 7];
}
extern "C" __global__ void uninitialised_local_ok(const int* k, float* y) {
    float a[8];
    for (int j = 0; j < 8; ++j) a[(j + k[0]) & 7] = j;
    y[threadIdx.x] = a[k[threadIdx.x] & 7];
}

// Read after write.
extern "C" __global__ void race_raw(const float* x, float* y) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[t];
    y[t] = s[63 - t];
}
extern "C" __global__ void race_raw_ok(const float* x, float* y) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    y[t] = s[63 - t];
}

// Write after read: the tile is filled again while others still read it.
extern "C" __global__ void race_war(const float* x, float* y) {
    __shared__ float s[64];
    int t = threadIdx.x;
    float sum = 0;
    for (int r = 0; r < 2; ++r) {
        s[t] = x[64 * r + t];
        __syncthreads();
        sum += s[63 - t];
    }
    y[t] = sum;
}
extern "C" __global__ void race_war_ok(const float* x, float* y) {
    __shared__ float s[64];
    int t = threadIdx.x;
    float sum = 0;
    for (int r = 0; r < 2; ++r) {
        s[t] = x[64 * r + t];
        __syncthreads();
        sum += s[63 - t];
        __syncthreads();
    }
    y[t] = sum;
}

// Two threads write different values to one place in one instruction.
extern "C" __global__ void race_waw(int* y) {
    __shared__ int s[32];
    s[threadIdx.x >> 1] = threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x >> 1];
}
extern "C" __global__ void race_waw_ok(int* y) {  // the same value
    __shared__ int s[32];
    s[threadIdx.x >> 1] = threadIdx.x >> 1;
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x >> 1];
}

// Lanes of one warp, without and with __syncwarp.
extern "C" __global__ void race_warp(int* y) {
    __shared__ int s[32];
    int t = threadIdx.x;
    s[t] = t;
    y[t] = s[t ^ 1];
}
extern "C" __global__ void race_warp_ok(int* y) {
    __shared__ int s[32];
    int t = threadIdx.x;
    s[t] = t;
    __syncwarp();
    y[t] = s[t ^ 1];
}

// A plain sum of all blocks.
extern "C" __global__ void race_blocks(float* total) {
    if (threadIdx.x == 0) total[0] = total[0] + 1.0f;
}
extern "C" __global__ void race_blocks_ok(float* total) {
    if (threadIdx.x == 0) atomicAdd(total, 1.0f);
}

// The last block to finish adds what the others left behind.
extern "C" __global__ void race_last_block(float* part, unsigned* done, float* sum) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        part[blockIdx.x] = blockIdx.x;
        last = atomicAdd(done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float s = 0;
        for (int b = 0; b < gridDim.x; ++b) s += part[b];
        *sum = s;
    }
}
extern "C" __global__ void race_last_block_ok(float* part, unsigned* done, float* sum) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        part[blockIdx.x] = blockIdx.x;
        __threadfence();
        last = atomicAdd(done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float s = 0;
        for (int b = 0; b < gridDim.x; ++b) s += part[b];
        *sum = s;
    }
}

// Warps 0 and 1 fill a buffer for warps 2 and 3: producers arrive, consumers wait.
template <int BARRIER> __device__ void hand_over(const float* x, float* y) {
    __shared__ float s[64];
    int t = threadIdx.x;
    if (t < 64) {
        s[t] = x[t];
        asm volatile("bar.arrive 1, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(BARRIER == 1 ? 128 : 64) : "memory");
        y[t - 64] = s[127 - t];
    }
}
extern "C" __global__ void race_named(const float* x, float* y) { hand_over<2>(x, y); }
extern "C" __global__ void race_named_ok(const float* x, float* y) { hand_over<1>(x, y); }

// Asynchronous copy, without and with the wait.
extern "C" __global__ void race_async(const float4* x, float4* y) {
    __shared__ float4 s[32];
    unsigned at = (unsigned)__cvta_generic_to_shared(&s[threadIdx.x]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(x + threadIdx.x));
    asm volatile("cp.async.commit_group;");
    y[threadIdx.x] = s[threadIdx.x];
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}
extern "C" __global__ void race_async_ok(const float4* x, float4* y) {
    __shared__ float4 s[32];
    unsigned at = (unsigned)__cvta_generic_to_shared(&s[threadIdx.x]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(x + threadIdx.x));
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    y[threadIdx.x] = s[threadIdx.x];
}

extern "C" __global__ void barrier_left(float* y, int n) {
    if (threadIdx.x >= n) return;
    __syncthreads();
    y[threadIdx.x] = 1.0f;
}
extern "C" __global__ void barrier_left_ok(float* y, int n) {
    __syncthreads();
    if (threadIdx.x < n) y[threadIdx.x] = 1.0f;
}

// Two halves of a warp wait at two barriers; two warps wait for each other's.
extern "C" __global__ void barrier_split(int* y) {
    if (threadIdx.x % 32 < 16) { __syncthreads(); y[threadIdx.x] = 1; }
    else { __syncthreads(); y[threadIdx.x] = 2; }
}
extern "C" __global__ void barrier_split_ok(int* y) {
    __syncthreads();
    y[threadIdx.x] = threadIdx.x % 32 < 16 ? 1 : 2;
}
extern "C" __global__ void barrier_crossed(int* y) {
    if (threadIdx.x < 32) {
        asm volatile("bar.sync 1, 64;\n\tbar.sync 2, 64;" ::: "memory");
    } else {
        asm volatile("bar.sync 2, 64;\n\tbar.sync 1, 64;" ::: "memory");
    }
    y[threadIdx.x] = 1;
}
extern "C" __global__ void barrier_crossed_ok(int* y) {
    asm volatile("bar.sync 1, 64;\n\tbar.sync 2, 64;" ::: "memory");
    y[threadIdx.x] = 1;
}

extern "C" __global__ void masks_divergent(int* y) {
    int v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_xor_sync(0xffffffffu, v, 1);
    y[threadIdx.x] = v;
}
extern "C" __global__ void masks_divergent_ok(int* y) {
    int v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_xor_sync(0x0000ffffu, v, 1);
    y[threadIdx.x] = v;
}
extern "C" __global__ void masks_own(int* y) { y[threadIdx.x] = __ballot_sync(0x0000ffffu, 1); }
extern "C" __global__ void masks_own_ok(int* y) { y[threadIdx.x] = __ballot_sync(0xffffffffu, 1); }
extern "C" __global__ void masks_source(int* y) {
    if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0x0000ffffu, (int)threadIdx.x, 20);
}
extern "C" __global__ void masks_source_ok(int* y) {
    if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0x0000ffffu, (int)threadIdx.x, 4);
}
extern "C" __global__ void masks_gone(int* y) {
    if (threadIdx.x == 31) return;
    y[threadIdx.x] = __reduce_add_sync(0xffffffffu, 1);
}
extern "C" __global__ void masks_gone_ok(int* y) {
    if (threadIdx.x == 31) return;
    y[threadIdx.x] = __reduce_add_sync(0x7fffffffu, 1);
}

extern "C" __global__ void budget(volatile int* y, int n) {
    while (y[0] == n) {}  // never changes
}
extern "C" __global__ void budget_ok(volatile int* y, int n) {
    while (y[0] != n) {}
}

extern "C" __global__ void trap(int* y, int n) {
    if (threadIdx.x == n) __trap();
    y[threadIdx.x] = 1;
}

// A lock that threads of one warp and of several blocks take in turn.
extern "C" __global__ void lock(int* taken, int* count) {
    bool done = false;
    while (!done) {
        if (atomicCAS(taken, 0, 1) == 0) {
            __threadfence();
            count[0] += 1;
            __threadfence();
            atomicExch(taken, 0);
            done = true;
        }
    }
}

// Memory behaviour: a column of a 32 x 32 tile has all its words in one bank; padding spreads them.
extern "C" __global__ void banks(const float* x, float* y) {
    __shared__ float s[32][32];
    s[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];
    __syncthreads();
    y[threadIdx.y * 32 + threadIdx.x] = s[threadIdx.x][threadIdx.y];
}
extern "C" __global__ void banks_ok(const float* x, float* y) {
    __shared__ float s[32][33];
    s[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];
    __syncthreads();
    y[threadIdx.y * 32 + threadIdx.x] = s[threadIdx.x][threadIdx.y];
}
extern "C" __global__ void strided(const float* x, float* y) {
    y[threadIdx.x] = x[threadIdx.x * 8];
}
