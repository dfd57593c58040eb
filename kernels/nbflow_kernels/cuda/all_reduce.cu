// One-shot and two-shot all-reduce through peer-accessible memory of the ranks of a node.
//
// Every rank's memory holds flags, a counter for each thread block, two buffers for its contribution
// (alternating, so that a rank need not wait for slow readers), and one for its share of the sum.
// Block b of a rank synchronizes only with the blocks b of the others.  Ranks are added in order, in
// float32, so all ranks get the same bits.
//
// A launch with rank < 0 runs all ranks in one grid, blockIdx.y being the rank.
#include "cuda/types.cuh"

constexpr int MOST_RANKS = 8;
constexpr i64 FLAG_BYTES = 4096;

struct Half {
    u16 bits;
};
struct Bfloat {
    u16 bits;
};

DEV float widen(float x) { return x; }
DEV float widen(Half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEV float widen(Bfloat x) { return __uint_as_float((u32)x.bits << 16); }

DEV void narrow(float x, float& to) { to = x; }
DEV void narrow(float x, Half& to) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
DEV void narrow(float x, Bfloat& to) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
}

// One 16-byte load or store of a thread.
template <class T>
union Vec16 {
    static constexpr int N = 16 / sizeof(T);
    uint4 word;
    T elements[N];
};

// Load of memory that other ranks write while the kernel runs; bypasses stale caches.
DEV uint4 load_shared(const void* at) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

DEV void release(u32* at, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

DEV u32 acquire(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

struct Group {
    const u64* bases;  // of the ranks' memory, as this rank sees it
    int n_ranks, rank;
    i64 most_bytes;

    DEV_METHOD u32* flag(int of, int from) const {
        return (u32*)bases[of] + blockIdx.x * MOST_RANKS + from;
    }
    DEV_METHOD u32* counter() const {
        return (u32*)bases[rank] + gridDim.x * MOST_RANKS + blockIdx.x;
    }
    DEV_METHOD char* data(int of, int number) const {
        return (char*)bases[of] + FLAG_BYTES + number * most_bytes;
    }
    // Barrier with the same block of all other ranks.
    DEV_METHOD void barrier(u32 step) const {
        __syncthreads();  // everything written by this block comes before the flag
        if (threadIdx.x < n_ranks) {
            release(flag(threadIdx.x, rank), step);
            while ((int)(acquire(flag(rank, threadIdx.x)) - step) < 0) {}
        }
        __syncthreads();
    }
};

// Vector u of n elements; the last one may be partial.
template <class T>
DEV Vec16<T> load_vec(const T* x, i64 u, i64 n) {
    Vec16<T> vec;
    const i64 first = u * Vec16<T>::N;
    if (first + Vec16<T>::N <= n && ((u64)x & 15) == 0) {
        vec.word = *(const uint4*)(x + first);
    } else {
        vec.word = make_uint4(0, 0, 0, 0);
        for (int i = 0; i < Vec16<T>::N; i++)
            if (first + i < n) vec.elements[i] = x[first + i];
    }
    return vec;
}

template <class T>
DEV void store_vec(T* x, i64 u, i64 n, const Vec16<T>& vec) {
    const i64 first = u * Vec16<T>::N;
    if (first + Vec16<T>::N <= n && ((u64)x & 15) == 0) {
        *(uint4*)(x + first) = vec.word;
    } else {
        for (int i = 0; i < Vec16<T>::N; i++)
            if (first + i < n) x[first + i] = vec.elements[i];
    }
}

template <class T>
DEV Vec16<T> sum_vec(const Group& group, int number, i64 u) {
    float sums[Vec16<T>::N];
    for (int rank = 0; rank < group.n_ranks; rank++) {
        Vec16<T> term;
        term.word = load_shared(group.data(rank, number) + 16 * u);
        for (int i = 0; i < Vec16<T>::N; i++) {
            const float x = widen(term.elements[i]);
            sums[i] = rank == 0 ? x : __fadd_rn(sums[i], x);
        }
    }
    Vec16<T> sum;
    for (int i = 0; i < Vec16<T>::N; i++) narrow(sums[i], sum.elements[i]);
    return sum;
}

// out = sum of the rows of parts (n_parts, n), in order: ranks' contributions in one place.
extern "C" __global__ void __launch_bounds__(256)
ordered_sum(const float* parts, float* out, i64 n, int n_parts) {
    using Vec = Vec16<float>;
    const i64 n_vecs = (n + Vec::N - 1) / Vec::N, stride = gridDim.x * blockDim.x;
    for (i64 u = blockIdx.x * blockDim.x + threadIdx.x; u < n_vecs; u += stride) {
        Vec sum = load_vec(parts, u, n);
        for (int part = 1; part < n_parts; part++) {
            const Vec term = load_vec(parts + part * n, u, n);
            for (int i = 0; i < Vec::N; i++)
                sum.elements[i] = __fadd_rn(sum.elements[i], term.elements[i]);
        }
        store_vec(out, u, n, sum);
    }
}

// Every rank reads everything: one barrier, for small messages.
template <class T>
__global__ void __launch_bounds__(512)
one_shot(const u64* bases, const T* x, T* out, i64 n, i64 most_bytes, int n_ranks, int rank) {
    const Group group = {bases, n_ranks, rank < 0 ? (int)blockIdx.y : rank, most_bytes};
    if (rank < 0) x += group.rank * n, out += group.rank * n;
    const u32 step = *group.counter() + 2;
    const int number = step / 2 & 1;
    const i64 n_vecs = (n + Vec16<T>::N - 1) / Vec16<T>::N, stride = gridDim.x * blockDim.x;
    const i64 first = blockIdx.x * blockDim.x + threadIdx.x;
    for (i64 u = first; u < n_vecs; u += stride)
        ((uint4*)group.data(group.rank, number))[u] = load_vec(x, u, n).word;
    group.barrier(step);
    for (i64 u = first; u < n_vecs; u += stride)
        store_vec(out, u, n, sum_vec<T>(group, number, u));
    if (threadIdx.x == 0) *group.counter() = step;
}

// Every rank adds its share and reads the others' sums: two barriers, less traffic.
template <class T>
__global__ void __launch_bounds__(512)
two_shot(const u64* bases, const T* x, T* out, i64 n, i64 most_bytes, int n_ranks, int rank) {
    const Group group = {bases, n_ranks, rank < 0 ? (int)blockIdx.y : rank, most_bytes};
    if (rank < 0) x += group.rank * n, out += group.rank * n;
    const u32 step = *group.counter() + 2;
    const int number = step / 2 & 1;
    const i64 n_vecs = (n + Vec16<T>::N - 1) / Vec16<T>::N, share = (n_vecs + n_ranks - 1) / n_ranks;
    const i64 stride = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
    for (int peer = 0; peer < n_ranks; peer++)  // the share that block b of rank `peer` adds
        for (i64 i = first, u = peer * share + i; i < share && u < n_vecs; i += stride, u += stride)
            ((uint4*)group.data(group.rank, number))[u] = load_vec(x, u, n).word;
    group.barrier(step - 1);
    for (i64 i = first, u = group.rank * share + i; i < share && u < n_vecs; i += stride, u += stride)
        ((uint4*)group.data(group.rank, 2))[i] = sum_vec<T>(group, number, u).word;
    group.barrier(step);
    for (int peer = 0; peer < n_ranks; peer++)
        for (i64 i = first, u = peer * share + i; i < share && u < n_vecs; i += stride, u += stride) {
            Vec16<T> sum;
            sum.word = load_shared(group.data(peer, 2) + 16 * i);
            store_vec(out, u, n, sum);
        }
    if (threadIdx.x == 0) *group.counter() = step;
}
