// Radix sort: top-k with values in order, and the typical and tail-free filters.
#include "sampling/cuda_radix_select.cuh"

constexpr int DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS;

// Contiguous range of elements of a warp, which keeps the sort stable.
struct Part {
    int first, end;
};

DEV Part part_of_warp(int n) {
    const int n_warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const int each = (n + 32 * n_warps - 1) / (32 * n_warps) * 32;
    return {min(warp * each, n), min((warp + 1) * each, n)};
}

// Stable LSD radix sort of n keys (and ids, if not null), descending: four passes between `keys` and
// `other_keys`.  `places` has DIGITS entries per warp.
DEV void sort_descending(int n, u32* keys, int* ids, u32* other_keys, int* other_ids, u32* places) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    const Part part = part_of_warp(n);
    for (int shift = 0; shift < 32; shift += DIGIT_BITS) {
        for (int d = threadIdx.x; d < DIGITS * n_warps; d += blockDim.x) places[d] = 0;
        __syncthreads();
        for (int j = part.first + lane; j < part.end; j += 32)
            atomicAdd(&places[(~keys[j] >> shift) % DIGITS * n_warps + warp], 1u);
        __syncthreads();
        if (warp == 0) {  // exclusive scan of the counts
            u32 before = 0;
            for (int d = 0; d < DIGITS * n_warps; d += 32) {
                const u32 here = places[d + lane];
                u32 to = here;
                for (int step = 1; step < 32; step <<= 1) {
                    const u32 other = __shfl_up_sync(~0u, to, step);
                    if (lane >= step) to += other;
                }
                places[d + lane] = before + to - here;
                before += __shfl_sync(~0u, to, 31);
            }
        }
        __syncthreads();
        for (int base = part.first; base < part.end; base += 32) {
            const bool in = base + lane < part.end;
            const u32 key = in ? keys[base + lane] : 0;
            const u32 digit = (~key >> shift) % DIGITS;
            const u32 same = __match_any_sync(~0u, in ? digit : DIGITS + 0u);
            const int rank = __popc(same & ((1u << lane) - 1));
            u32 to = 0;
            if (in) to = places[digit * n_warps + warp] + rank;
            __syncwarp();
            if (in && rank == 0) places[digit * n_warps + warp] = to + __popc(same);
            __syncwarp();
            if (in) {
                other_keys[to] = key;
                if (ids != nullptr) other_ids[to] = ids[base + lane];
            }
        }
        __syncthreads();
        u32* const k = keys;
        int* const i = ids;
        keys = other_keys, other_keys = k;
        ids = other_ids, other_ids = i;
    }
}

// The k largest of each row and their indices, by value or by index; a row with a NaN has -1 as its
// first index.  `work` has 4 k words per row if sorted by value.
extern "C" __global__ void __launch_bounds__(1024)
top_k(const float* x, int k, int in_order, float* values, int* indices, u32* work, int V) {
    extern __shared__ u32 places[];
    __shared__ SharedScratch scratch;
    const i64 i = blockIdx.x;
    const float* row = x + i * V;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    u64 bad = 0;
    for (int j = threadIdx.x; j < V; j += blockDim.x) bad |= row[j] != row[j];
    if (all_reduce_block(scratch, bad, Max())) {
        if (threadIdx.x == 0) indices[i * k] = -1;
        return;
    }
    const u64 cut = select(scratch, Values{row}, V, false, k, NO_LIMIT).key;
    u32* keys = work + 4 * i * k;
    int* ids = (int*)(keys + k);
    const Part part = part_of_warp(V);
    u32 number = 0;
    for (int base = part.first; base < part.end; base += 32) {
        const int j = base + lane;
        number += __popc(__ballot_sync(~0u, j < part.end && ranked_key(row[j], j) >= cut));
    }
    __syncthreads();
    if (lane == 0) scratch.warp_counts[warp] = number;
    __syncthreads();
    u32 to = 0;
    for (int w = 0; w < warp; w++) to += scratch.warp_counts[w];
    for (int base = part.first; base < part.end; base += 32) {
        const int j = base + lane;
        const bool takes = j < part.end && ranked_key(row[j], j) >= cut;
        const u32 all = __ballot_sync(~0u, takes);
        const u32 at = to + __popc(all & ((1u << lane) - 1));
        if (takes && in_order) {
            keys[at] = key_of(row[j]);
            ids[at] = j;
        } else if (takes) {
            values[i * k + at] = row[j];
            indices[i * k + at] = j;
        }
        to += __popc(all);
    }
    if (!in_order) return;
    __syncthreads();
    sort_descending(k, keys, ids, keys + 2 * k, ids + 2 * k, places);
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        const int id = ids[j];
        indices[i * k + j] = id;
        values[i * k + j] = row[id];
    }
}

// -|ln p - mean|, -inf for p = 0; an invalid row becomes -inf.
extern "C" __global__ void __launch_bounds__(1024)
typical_ranks(const float* probs, float* ranks, int V) {
    __shared__ SharedScratch scratch;
    const float tiny = 1.1754943508222875e-38f;  // subnormals count as the smallest normal
    const float* x = probs + (i64)blockIdx.x * V;
    float* to = ranks + (i64)blockIdx.x * V;
    double total = 0, product = 0;
    u64 bad = 0;
    for (int j = threadIdx.x; j < V; j += blockDim.x) {
        bad |= !(x[j] >= 0 && x[j] < infinity());
        total += x[j];
        product += __fmul_rn(x[j], log_of(fmaxf(x[j], tiny)));
    }
    bad = all_reduce_block(scratch, bad, Max());
    total = sum_of_doubles(scratch, total);
    const float mean = sum_of_doubles(scratch, product) / total;
    const bool good = !bad && total > 0;
    for (int j = threadIdx.x; j < V; j += blockDim.x)
        to[j] = good && x[j] > 0 ? -fabsf(log_of(fmaxf(x[j], tiny)) - mean) : -infinity();
}

// Second differences of a descending row, from `first` on, as shares of their sum.
struct SecondDifferences {
    const u32* keys;
    double whole;  // 0: all alike
    int first, V;

    DEV_METHOD double difference(int j) const {
        const double a = value_of(keys[j]), b = value_of(keys[j + 1]), c = value_of(keys[j + 2]);
        return fabs((a - b) - (b - c));
    }
    DEV_METHOD bool takes(int j) const { return j >= first; }
    DEV_METHOD u64 key(int j) const { return index_key(j); }
    DEV_METHOD u64 mass(int j) const {
        const double share = whole > 0 ? difference(j) / whole : 1.0 / V;
        return (u64)(share * 17592186044416.0 + 0.5);  // 2 ** 44
    }
};

// Number of tokens the tail-free filter keeps; infinity for a row that is not filtered or not a
// distribution.  `work` has 2 V words per row.
extern "C" __global__ void __launch_bounds__(1024)
tail_free_counts(const float* probs, const int* rows, int n_rows, const double* z, int first,
                 double* counts, u32* work, int V) {
    extern __shared__ u32 places[];
    __shared__ SharedScratch scratch;
    const i64 i = blockIdx.x;
    const float* x = probs + (i64)rows[i] * V;
    u32* keys = work + 2 * i * V;
    double total = 0;
    u64 bad = 0;
    if (threadIdx.x == 0) counts[i] = infinity();
    if (rows[i] < 0 || rows[i] >= n_rows) return;
    for (int j = threadIdx.x; j < V; j += blockDim.x) {
        bad |= !(x[j] >= 0 && x[j] < infinity());
        total += x[j];
        keys[j] = key_of(x[j]);
    }
    bad = all_reduce_block(scratch, bad, Max());
    total = sum_of_doubles(scratch, total);
    if (bad || !(total > 0) || !(z[i] < 1) || V < 3) return;
    sort_descending(V, keys, nullptr, keys + V, nullptr, places);
    SecondDifferences differences = {keys, 0, first, V};
    double whole = 0;
    for (int j = threadIdx.x; j < V - 2; j += blockDim.x) whole += differences.difference(j);
    whole = sum_of_doubles(scratch, whole);
    if (whole / total > 1e-6) differences.whole = whole;
    u64 sum = 0;
    for (int j = threadIdx.x; j < V - 2; j += blockDim.x)
        if (differences.takes(j)) sum += differences.mass(j);
    sum = all_reduce_block(scratch, sum, Add());
    const u64 wanted = (u64)(z[i] * 17592186044416.0) + 1;  // the first sum above z
    if (sum < wanted) return;
    const Selected last = select(scratch, differences, V - 2, true, ~0u, wanted);
    if (threadIdx.x == 0) {
        const int n = max(index_of(last.key), 1);
        if (n < V - 2) counts[i] = n;
    }
}
