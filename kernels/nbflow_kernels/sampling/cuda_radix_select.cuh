// Which elements of a row a filter keeps, and which one a draw hits, without sorting the row.
//
// A thread block works on a row.  Weights are added as integers: a float32 times a power of two that
// makes the row's largest element 24 + FRACTION bits long.  Integer sums do not depend on the order
// of the additions, so atomics may make them, and results are the same bit for bit every time.
//
// `select` finds an element by its rank or by what the elements up to it weigh: it counts a digit of
// the elements' keys in a histogram, the highest digit first, and goes on among the elements of the
// bucket in which the number or the weight wanted is reached.
#pragma once
#include "cuda/types.cuh"

constexpr float LOWEST = -3.402823466e38f;
constexpr int BUCKETS = 2048;
constexpr int INDEX_BITS = 22;  // the longest row has 2 ** 22 elements
constexpr u32 LAST_INDEX = (1u << INDEX_BITS) - 1;
constexpr u64 NO_LIMIT = ~0ull;
constexpr double SLACK = 1.0 - 1e-13;  // as on the CPU: a sum that misses by rounding has reached

struct Room {  // of a thread block, in shared memory
    u32 counts[BUCKETS];
    u64 masses[BUCKETS];
    u64 of_warps[32];
    u32 counts_of_warps[32];
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

// Every thread gets the value over all threads; the tree is always the same.
template <class Op>
DEV u64 over_block(Room& room, u64 x, Op op) {
    const int lane = threadIdx.x & 31, n_warps = blockDim.x / 32;
    for (int step = 16; step; step >>= 1) x = op(x, __shfl_xor_sync(~0u, x, step));
    __syncthreads();  // what the room was used for before is over
    if (lane == 0) room.of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = room.of_warps[0];
    for (int w = 1; w < n_warps; w++) x = op(x, room.of_warps[w]);
    return x;
}

DEV double sum_of_doubles(Room& room, double x) {
    return __longlong_as_double(over_block(room, __double_as_longlong(x), AddDoubles()));
}

// ---- keys --------------------------------------------------------------------------------------

// An integer in the order of float32; -0 = 0.
DEV u32 key_of(float x) {
    const u32 bits = __float_as_uint(x);
    return (int)bits >= 0 ? 0x80000000u + bits : 0x80000000u - (bits & 0x7fffffffu);
}

DEV float value_of(u32 key) {
    return __uint_as_float(key >= 0x80000000u ? key - 0x80000000u : 0x80000000u | (0x80000000u - key));
}

// Of equal ranks the lowest index is the greatest.
DEV u64 ranked_key(float rank, int j) { return (u64)key_of(rank) << INDEX_BITS | (LAST_INDEX - j); }

DEV u64 index_key(int j) { return LAST_INDEX - j; }

// ---- weights as integers -----------------------------------------------------------------------

DEV float power_of_2(int n) { return __int_as_float((n + 127) << 23); }

struct Scale {
    int top_exponent, fraction;  // the biased exponent of the row's largest element; FRACTION

    DEV_METHOD u64 integer(float x) const {
        const u32 bits = __float_as_uint(x);
        const int exponent = max((int)(bits >> 23), 1);
        const u64 significand = (bits & 0x7fffffu) | (bits >> 23 ? 0x800000u : 0);
        const int shift = fraction - (top_exponent - exponent);
        if (shift >= 0) return significand << shift;
        return shift > -26 ? ((significand >> (-shift - 1)) + 1) >> 1 : 0;  // to nearest
    }
    // The real number that is a sum of integers.
    DEV_METHOD double real(u64 sum) const { return ldexp((double)sum, top_exponent - 150 - fraction); }
    // Sums and elements in units in which the largest element is 1 to 2.
    DEV_METHOD float sum_in_units(u64 sum) const { return (float)sum * power_of_2(-23 - fraction); }
    DEV_METHOD float in_units(float x) const {  // two powers of two: one might be too small
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
    u64 mass;  // of the elements down to it
};

// Find the first bucket, from the top, in which `number` elements or `mass` are reached, else the
// last one that is not empty; the room then tells what comes before it and what it holds.
DEV void find_bucket(Room& room, int n_buckets, u32 number, u64 mass) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    const int each = (n_buckets + blockDim.x - 1) / blockDim.x;
    const int first = n_buckets - 1 - (int)threadIdx.x * each, end = max(first - each, -1);
    u32 n = 0;
    u64 m = 0;
    for (int b = first; b > end; b--) {
        n += room.counts[b];
        m += room.masses[b];
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
        room.counts_of_warps[warp] = n_to;
        room.of_warps[warp] = m_to;
    }
    if (threadIdx.x == 0) room.answer = NO_LIMIT;
    __syncthreads();
    u32 n_all = 0;
    for (int w = 0; w < n_warps; w++) {
        if (w < warp) {
            n_to += room.counts_of_warps[w];
            m_to += room.of_warps[w];
        }
        n_all += room.counts_of_warps[w];
    }
    n = n_to - n;
    m = m_to - m;
    for (int b = first; b > end; b--) {  // the answers of all threads: the one that comes first
        const u32 here = room.counts[b];
        const u64 mass_here = room.masses[b];
        const bool reached = n + here >= number || m + mass_here >= mass || n + here == n_all;
        if (here && reached) {
            atomicMin(&room.answer, (u64)(n_buckets - 1 - b) << 32 | n);
            break;
        }
        n += here;
        m += mass_here;
    }
    __syncthreads();
    const int bucket = n_buckets - 1 - (int)(room.answer >> 32);
    if (first >= bucket && bucket > end) {
        u64 before = m_to;
        for (int b = end + 1; b <= bucket; b++) before -= room.masses[b];
        room.found = bucket;
        room.number_before = (u32)room.answer;
        room.number_here = room.counts[bucket];
        room.mass_before = before;
        room.mass_here = room.masses[bucket];
    }
    __syncthreads();
}

// The first element in falling order of `row.key` with which `number` elements or `mass` are reached;
// the last element there is if neither is.  Elements for which `row.takes` is false do not exist.
// Keys have 32 + INDEX_BITS bits, or INDEX_BITS if `by_index`.
template <class Row>
DEV Selected select(Room& room, const Row& row, int V, bool by_index, u32 number, u64 mass) {
    int shift = by_index ? INDEX_BITS : INDEX_BITS + 32;
    u64 prefix = 0, seen = 0;
    while (shift > 0) {
        const int parent = shift, width = shift == INDEX_BITS + 10 ? 10 : 11;
        shift -= width;
        __syncthreads();
        for (int b = threadIdx.x; b < 1 << width; b += blockDim.x) {
            room.counts[b] = 0;
            room.masses[b] = 0;
        }
        __syncthreads();
        for (int j = threadIdx.x; j < V; j += blockDim.x) {
            if (!row.takes(j)) continue;
            const u64 key = row.key(j);
            if (key >> parent != prefix) continue;
            const int bucket = (key >> shift) & ((1 << width) - 1);
            const u64 weight = row.mass(j);
            atomicAdd(&room.counts[bucket], 1u);
            if (weight) atomicAdd(&room.masses[bucket], weight);
        }
        __syncthreads();
        find_bucket(room, 1 << width, number, mass);
        prefix = prefix << width | room.found;
        number -= room.number_before;
        seen += room.mass_before;
        if (mass != NO_LIMIT) mass -= room.mass_before;
        if (room.number_here == 1) break;
    }
    seen += room.mass_here;
    if (shift > 0) {  // the only element of its bucket
        __syncthreads();
        for (int j = threadIdx.x; j < V; j += blockDim.x)
            if (row.takes(j) && row.key(j) >> shift == prefix) room.answer = row.key(j);
        __syncthreads();
        prefix = room.answer;
    }
    return {prefix, seen};
}

struct Values {  // elements that only count
    const float* x;

    DEV_METHOD bool takes(int j) const { return true; }
    DEV_METHOD u64 key(int j) const { return ranked_key(x[j], j); }
    DEV_METHOD u64 mass(int j) const { return 0; }
};

DEV int index_of(u64 key) { return LAST_INDEX - (u32)(key & LAST_INDEX); }

// ---- random numbers ----------------------------------------------------------------------------

// Number `index` of a seed and an offset, times 2 ** 53; Philox4x32-10, as on the CPU.
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

// The mass with which a running sum first passes the share u / 2 ** 53 of a whole.
DEV u64 passes(u64 u, u64 whole) { return (__umul64hi(u, whole) << 11 | u * whole >> 53) + 1; }

// ---- functions with the bits of the CPU's ------------------------------------------------------

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

// The least float32 that is not below x.
DEV float float_at_least(double x) { return __double2float_ru(x); }
