// Radix select: the cut of a filter, or the element of a draw, without sorting the row.
//
// A thread block works on a row.  Weights are added as integers: a float32 times a power of two that
// makes the row's largest element 24 + FRACTION bits long.  Integer sums do not depend on the order
// of the additions, so atomic additions are deterministic.
//
// `select` finds an element by rank or by cumulative weight: a histogram of a digit of the keys, the
// highest digit first, then the same within the bucket in which the number or the weight is reached.
#pragma once
#include "cuda/types.cuh"

constexpr float LOWEST = -3.402823466e38f;
constexpr int BUCKETS = 2048;
constexpr int INDEX_BITS = 22;  // the longest row has 2 ** 22 elements
constexpr u32 LAST_INDEX = (1u << INDEX_BITS) - 1;
constexpr u64 NO_LIMIT = ~0ull;
constexpr double SLACK = 1.0 - 1e-13;  // tolerance for rounding, as on the CPU

struct SharedScratch {  // of a thread block
    u32 counts[BUCKETS];
    u64 masses[BUCKETS];
    u64 warp_values[32];
    u32 warp_counts[32];
    u64 answer;
    u32 found, number_before, number_here;
    u64 mass_before, mass_here;
};

// ---- sums and extremes of a thread block -------------------------------------------------------

struct Max {
    DEV_METHOD u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};
struct Min {
    DEV_METHOD u64 operator()(u64 a, u64 b) const { return a < b ? a : b; }
};
struct Add {
    DEV_METHOD u64 operator()(u64 a, u64 b) const { return a + b; }
};
struct AddDoubles {
    DEV_METHOD u64 operator()(u64 a, u64 b) const {
        return __double_as_longlong(__longlong_as_double(a) + __longlong_as_double(b));
    }
};

// All-reduce over the thread block, in a fixed order.
template <class Op>
DEV u64 all_reduce_block(SharedScratch& scratch, u64 x, Op op) {
    const int lane = threadIdx.x & 31, n_warps = blockDim.x / 32;
    for (int step = 16; step; step >>= 1) x = op(x, __shfl_xor_sync(~0u, x, step));
    __syncthreads();  // earlier uses of the scratch memory are over
    if (lane == 0) scratch.warp_values[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch.warp_values[0];
    for (int w = 1; w < n_warps; w++) x = op(x, scratch.warp_values[w]);
    return x;
}

DEV double sum_of_doubles(SharedScratch& scratch, double x) {
    return __longlong_as_double(all_reduce_block(scratch, __double_as_longlong(x), AddDoubles()));
}

// ---- keys --------------------------------------------------------------------------------------

// Integer with the order of float32; -0 = 0.
DEV u32 key_of(float x) {
    const u32 bits = __float_as_uint(x);
    return (int)bits >= 0 ? 0x80000000u + bits : 0x80000000u - (bits & 0x7fffffffu);
}

DEV float value_of(u32 key) {
    return __uint_as_float(key >= 0x80000000u ? key - 0x80000000u : 0x80000000u | (0x80000000u - key));
}

// Among equal ranks the lowest index has the largest key.
DEV u64 ranked_key(float rank, int j) { return (u64)key_of(rank) << INDEX_BITS | (LAST_INDEX - j); }

DEV u64 index_key(int j) { return LAST_INDEX - j; }

// ---- weights as integers -----------------------------------------------------------------------

DEV float power_of_2(int n) { return __int_as_float((n + 127) << 23); }

struct Scale {
    int top_exponent, fraction;  // biased exponent of the row's largest element; FRACTION

    DEV_METHOD u64 integer(float x) const {
        const u32 bits = __float_as_uint(x);
        const int exponent = max((int)(bits >> 23), 1);
        const u64 significand = (bits & 0x7fffffu) | (bits >> 23 ? 0x800000u : 0);
        const int shift = fraction - (top_exponent - exponent);
        if (shift >= 0) return significand << shift;
        return shift > -26 ? ((significand >> (-shift - 1)) + 1) >> 1 : 0;  // to nearest
    }
    // A sum of integers as a real number.
    DEV_METHOD double real(u64 sum) const { return ldexp((double)sum, top_exponent - 150 - fraction); }
    // Sums and elements scaled so that the largest element is in [1, 2).
    DEV_METHOD float sum_in_units(u64 sum) const { return (float)sum * power_of_2(-23 - fraction); }
    DEV_METHOD float in_units(float x) const {  // two factors: one might underflow
        const int power = 127 - top_exponent, half = power / 2;
        return x * power_of_2(half) * power_of_2(power - half);
    }
};

DEV Scale scale_of(float top, int fraction) {
    return {max((int)(__float_as_uint(top) >> 23), 1), fraction};
}

// ---- selection ---------------------------------------------------------------------------------

struct Selected {
    u64 key;   // of the element
    u64 mass;  // of the elements up to it
};

// Find the first bucket, from the top, in which `number` elements or `mass` are reached, else the
// last one that is not empty; write its counts and those before it to the scratch memory.
DEV void find_bucket(SharedScratch& scratch, int n_buckets, u32 number, u64 mass) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    const int each = (n_buckets + blockDim.x - 1) / blockDim.x;
    const int first = n_buckets - 1 - (int)threadIdx.x * each, end = max(first - each, -1);
    u32 n = 0;
    u64 m = 0;
    for (int b = first; b > end; b--) {
        n += scratch.counts[b];
        m += scratch.masses[b];
    }
    u32 n_to = n;
    u64 m_to = m;
    for (int step = 1; step < 32; step <<= 1) {
        const u32 other_n = __shfl_up_sync(~0u, n_to, step);
        const u64 other_m = __shfl_up_sync(~0u, m_to, step);
        if (lane >= step) {
            n_to += other_n;
            m_to += other_m;
        }
    }
    if (lane == 31) {
        scratch.warp_counts[warp] = n_to;
        scratch.warp_values[warp] = m_to;
    }
    if (threadIdx.x == 0) scratch.answer = NO_LIMIT;
    __syncthreads();
    u32 n_all = 0;
    for (int w = 0; w < n_warps; w++) {
        if (w < warp) {
            n_to += scratch.warp_counts[w];
            m_to += scratch.warp_values[w];
        }
        n_all += scratch.warp_counts[w];
    }
    n = n_to - n;
    m = m_to - m;
    for (int b = first; b > end; b--) {  // the first bucket over all threads
        const u32 here = scratch.counts[b];
        const u64 mass_here = scratch.masses[b];
        const bool reached = n + here >= number || m + mass_here >= mass || n + here == n_all;
        if (here && reached) {
            atomicMin(&scratch.answer, (u64)(n_buckets - 1 - b) << 32 | n);
            break;
        }
        n += here;
        m += mass_here;
    }
    __syncthreads();
    const int bucket = n_buckets - 1 - (int)(scratch.answer >> 32);
    if (first >= bucket && bucket > end) {
        u64 before = m_to;
        for (int b = end + 1; b <= bucket; b++) before -= scratch.masses[b];
        scratch.found = bucket;
        scratch.number_before = (u32)scratch.answer;
        scratch.number_here = scratch.counts[bucket];
        scratch.mass_before = before;
        scratch.mass_here = scratch.masses[bucket];
    }
    __syncthreads();
}

// Add elements to the histogram, one of each thread of a warp that `counts`.  Atomic additions to one
// address wait for each other, and elements of a warp often have one bucket (always the first digit
// of an index does): the warp adds up those of its first buckets, the rest add their own.
constexpr int BUCKETS_ADDED_UP = 2;

DEV void add_to_histogram(SharedScratch& scratch, bool counts, int bucket, u64 weight) {
    u32 left = __ballot_sync(~0u, counts);
    for (int i = 0; left && i < BUCKETS_ADDED_UP; i++) {
        const int leader = __ffs(left) - 1;
        const int chosen = __shfl_sync(~0u, bucket, leader);
        const bool with_leader = counts && bucket == chosen;
        const u32 all = __ballot_sync(~0u, with_leader);
        u64 sum = with_leader ? weight : 0;
        for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        if ((threadIdx.x & 31) == leader) {
            atomicAdd(&scratch.counts[bucket], (u32)__popc(all));
            if (sum) atomicAdd(&scratch.masses[bucket], sum);
        }
        counts = counts && !with_leader;
        left &= ~all;
    }
    if (counts) {
        atomicAdd(&scratch.counts[bucket], 1u);
        if (weight) atomicAdd(&scratch.masses[bucket], weight);
    }
}

// Find the first element in descending order of `row.key` at which `number` elements or `mass` are
// reached, else the last one, among those for which `row.takes` is true.  Keys have 32 + INDEX_BITS
// bits, or INDEX_BITS if `by_index`.
template <class Row>
DEV Selected select(SharedScratch& scratch, const Row& row, int V, bool by_index, u32 number, u64 mass) {
    int shift = by_index ? INDEX_BITS : INDEX_BITS + 32;
    u64 prefix = 0, seen = 0;
    while (shift > 0) {
        const int parent = shift, width = shift == INDEX_BITS + 10 ? 10 : 11;
        shift -= width;
        __syncthreads();
        for (int b = threadIdx.x; b < 1 << width; b += blockDim.x) {
            scratch.counts[b] = 0;
            scratch.masses[b] = 0;
        }
        __syncthreads();
        for (int first = 0; first < V; first += blockDim.x) {
            const int j = first + threadIdx.x;
            bool counts = j < V && row.takes(j);
            const u64 key = counts ? row.key(j) : 0;
            counts = counts && key >> parent == prefix;
            const int bucket = (key >> shift) & ((1 << width) - 1);
            add_to_histogram(scratch, counts, bucket, counts ? row.mass(j) : 0);
        }
        __syncthreads();
        find_bucket(scratch, 1 << width, number, mass);
        prefix = prefix << width | scratch.found;
        number -= scratch.number_before;
        seen += scratch.mass_before;
        if (mass != NO_LIMIT) mass -= scratch.mass_before;
        if (scratch.number_here == 1) break;
    }
    seen += scratch.mass_here;
    if (shift > 0) {  // the only element of its bucket
        __syncthreads();
        for (int j = threadIdx.x; j < V; j += blockDim.x)
            if (row.takes(j) && row.key(j) >> shift == prefix) scratch.answer = row.key(j);
        __syncthreads();
        prefix = scratch.answer;
    }
    return {prefix, seen};
}

struct Values {  // elements without weights
    const float* x;

    DEV_METHOD bool takes(int j) const { return true; }
    DEV_METHOD u64 key(int j) const { return ranked_key(x[j], j); }
    DEV_METHOD u64 mass(int j) const { return 0; }
};

DEV int index_of(u64 key) { return LAST_INDEX - (u32)(key & LAST_INDEX); }

// ---- random numbers ----------------------------------------------------------------------------

// Random number `index` of a seed and an offset, times 2 ** 53; Philox4x32-10, as on the CPU.
DEV u64 uniform(u64 seed, u64 offset, u64 index) {
    u32 c0 = offset, c1 = offset >> 32, c2 = index, c3 = index >> 32, k0 = seed, k1 = seed >> 32;
    for (int round = 0; round < 10; round++) {
        const u64 a = (u64)0xD2511F53u * c0, b = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(b >> 32) ^ c1 ^ k0;
        c1 = (u32)b;
        c2 = (u32)(a >> 32) ^ c3 ^ k1;
        c3 = (u32)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (u64)(c0 >> 5) << 26 | c1 >> 6;
}

DEV double unit(u64 u) { return (double)u / 9007199254740992.0; }

// The smallest mass above the share u / 2 ** 53 of a whole.
DEV u64 passes(u64 u, u64 whole) { return (__umul64hi(u, whole) << 11 | u * whole >> 53) + 1; }

// ---- functions with the bits of the CPU --------------------------------------------------------

// e**x, clamped to [-87, 88].
DEV float exp_of(float x) {
    x = fminf(fmaxf(x, -87.0f), 88.0f);
    const float n = rintf(__fmul_rn(x, 1.4426950408889634f));
    float r = __fmaf_rn(n, -0.693145751953125f, x);
    r = __fmaf_rn(n, -1.4286068203094172e-06f, r);
    float p = 1.0f / 720.0f;
    p = __fmaf_rn(p, r, 1.0f / 120.0f);
    p = __fmaf_rn(p, r, 1.0f / 24.0f);
    p = __fmaf_rn(p, r, 1.0f / 6.0f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    return __fmul_rn(p, __int_as_float(((int)n + 127) << 23));
}

// exp((x - top) * factor), 0 for -inf.
DEV float exp_below(float x, float top, float factor) {
    return x > LOWEST ? exp_of(__fmul_rn(__fsub_rn(x, top), factor)) : 0;
}

// ln x of a normal positive x.
DEV float log_of(float x) {
    const int bits = __float_as_int(x);
    const int exponent = ((bits + (0x3F800000 - 0x3F3504F3)) >> 23) - 127;
    const float m = __int_as_float(bits - (exponent << 23));
    const float s = __fdiv_rn(__fsub_rn(m, 1.0f), __fadd_rn(m, 1.0f)), s2 = __fmul_rn(s, s);
    float p = 2.0f / 9.0f;
    p = __fmaf_rn(p, s2, 2.0f / 7.0f);
    p = __fmaf_rn(p, s2, 2.0f / 5.0f);
    p = __fmaf_rn(p, s2, 2.0f / 3.0f);
    p = __fmaf_rn(p, s2, 2.0f);
    return __fmaf_rn((float)exponent, 0.6931471805599453f, __fmul_rn(p, s));
}

// x rounded up to float32.
DEV float float_at_least(double x) { return __double2float_ru(x); }
