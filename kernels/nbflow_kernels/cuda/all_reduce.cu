// Sums over the ranks of a node through memory that all of them can read and write.
//
// Every rank's memory holds flags, a counter for each thread block, two buffers for what it
// contributes (used in turn, so that nobody waits for slow readers), and one for its share of the sum.
// Block b of a rank only ever meets the blocks b of the others.  Ranks are added in order, in float32,
// so all ranks get the same bits.
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

// 16 bytes: what a thread moves at once.
template <class T>
union Unit {
    static constexpr int N = 16 / sizeof(T);
    uint4 word;
    T elements[N];
};

// Other ranks write what is read here while the kernel runs: never from a stale cache.
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
    // Tell the blocks of all ranks that this one has got to a step, and wait until they have.
    DEV_METHOD void meet(u32 step) const {
        __syncthreads();  // everything written by this block comes before the flag
        if (threadIdx.x < n_ranks) {
            release(flag(threadIdx.x, rank), step);
            while ((int)(acquire(flag(rank, threadIdx.x)) - step) < 0) {}
        }
        __syncthreads();
    }
};

// Unit u of n elements: the last one may be shorter.
template <class T>
DEV Unit<T> load_unit(const T* x, i64 u, i64 n) {
    Unit<T> unit;
    const i64 first = u * Unit<T>::N;
    if (first + Unit<T>::N <= n && ((u64)x & 15) == 0) {
        unit.word = *(const uint4*)(x + first);
    } else {
        unit.word = make_uint4(0, 0, 0, 0);
        for (int i = 0; i < Unit<T>::N; i++)
            if (first + i < n) unit.elements[i] = x[first + i];
    }
    return unit;
}

template <class T>
DEV void store_unit(T* x, i64 u, i64 n, const Unit<T>& unit) {
    const i64 first = u * Unit<T>::N;
    if (first + Unit<T>::N <= n && ((u64)x & 15) == 0) {
        *(uint4*)(x + first) = unit.word;
    } else {
        for (int i = 0; i < Unit<T>::N; i++)
            if (first + i < n) x[first + i] = unit.elements[i];
    }
}

template <class T>
DEV Unit<T> sum_unit(const Group& group, int number, i64 u) {
    float sums[Unit<T>::N];
    for (int rank = 0; rank < group.n_ranks; rank++) {
        Unit<T> part;
        part.word = load_shared(group.data(rank, number) + 16 * u);
        for (int i = 0; i < Unit<T>::N; i++) {
            const float x = widen(part.elements[i]);
            sums[i] = rank == 0 ? x : __fadd_rn(sums[i], x);
        }
    }
    Unit<T> sum;
    for (int i = 0; i < Unit<T>::N; i++) narrow(sums[i], sum.elements[i]);
    return sum;
}

// Every rank reads everything: one meeting, for small messages.
template <class T>
__global__ void __launch_bounds__(512)
one_shot(const u64* bases, const T* x, T* out, i64 n, i64 most_bytes, int n_ranks, int rank) {
    const Group group = {bases, n_ranks, rank < 0 ? (int)blockIdx.y : rank, most_bytes};
    if (rank < 0) x += group.rank * n, out += group.rank * n;
    const u32 step = *group.counter() + 2;
    const int number = step / 2 & 1;
    const i64 n_units = (n + Unit<T>::N - 1) / Unit<T>::N, stride = gridDim.x * blockDim.x;
    const i64 first = blockIdx.x * blockDim.x + threadIdx.x;
    for (i64 u = first; u < n_units; u += stride)
        ((uint4*)group.data(group.rank, number))[u] = load_unit(x, u, n).word;
    group.meet(step);
    for (i64 u = first; u < n_units; u += stride)
        store_unit(out, u, n, sum_unit<T>(group, number, u));
    if (threadIdx.x == 0) *group.counter() = step;
}

// Every rank adds its share and reads the others' sums: two meetings, a fraction of the reading.
template <class T>
__global__ void __launch_bounds__(512)
two_shot(const u64* bases, const T* x, T* out, i64 n, i64 most_bytes, int n_ranks, int rank) {
    const Group group = {bases, n_ranks, rank < 0 ? (int)blockIdx.y : rank, most_bytes};
    if (rank < 0) x += group.rank * n, out += group.rank * n;
    const u32 step = *group.counter() + 2;
    const int number = step / 2 & 1;
    const i64 n_units = (n + Unit<T>::N - 1) / Unit<T>::N, share = (n_units + n_ranks - 1) / n_ranks;
    const i64 stride = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
    for (int part = 0; part < n_ranks; part++)  // what block b of rank `part` will add
        for (i64 i = first, u = part * share + i; i < share && u < n_units; i += stride, u += stride)
            ((uint4*)group.data(group.rank, number))[u] = load_unit(x, u, n).word;
    group.meet(step - 1);
    for (i64 i = first, u = group.rank * share + i; i < share && u < n_units; i += stride, u += stride)
        ((uint4*)group.data(group.rank, 2))[i] = sum_unit<T>(group, number, u).word;
    group.meet(step);
    for (int part = 0; part < n_ranks; part++)
        for (i64 i = first, u = part * share + i; i < share && u < n_units; i += stride, u += stride) {
            Unit<T> sum;
            sum.word = load_shared(group.data(part, 2) + 16 * i);
            store_unit(out, u, n, sum);
        }
    if (threadIdx.x == 0) *group.counter() = step;
}
