// Softmax, argmax, filters and draws, a thread block per row; see `cuda_radix_select.cuh`.
#include "sampling/cuda_radix_select.cuh"

// Index of each filter parameter, as in `cpu_filters.py`.
enum Limit { TOP_K, TOP_P, MIN_P, FLOOR, BY_RANK, N_LIMITS };

// ---- rows --------------------------------------------------------------------------------------

struct Probabilities {
    const float *ranks, *probs;
    Scale scale;

    DEV_METHOD float weight(int j) const { return probs[j]; }
    DEV_METHOD float rank(int j) const { return ranks[j]; }
};

// Unnormalized softmax; elements below `cut` have weight 0.
struct Softmax {
    const float* logits;
    float top, factor;
    u64 cut;
    Scale scale;

    DEV_METHOD float weight(int j) const {
        if (cut && ranked_key(logits[j], j) < cut) return 0;
        return exp_below(logits[j], top, factor);
    }
    DEV_METHOD float rank(int j) const { return weight(j); }
};

// max(target - draft, 0)
struct Excess {
    const float *target, *draft;
    Scale scale;

    DEV_METHOD float weight(int j) const { return fmaxf(target[j] - draft[j], 0.0f); }
    DEV_METHOD float rank(int j) const { return weight(j); }
};

// View of a row for `select`, ordered by rank.
template <class Row>
struct ByRank {
    const Row& row;

    DEV_METHOD bool takes(int j) const { return true; }
    DEV_METHOD u64 key(int j) const { return ranked_key(row.rank(j), j); }
    DEV_METHOD u64 mass(int j) const { return row.scale.integer(row.weight(j)); }
};

// View of the elements from `cut` on, ordered by index.
template <class Row>
struct ByIndex {
    const Row& row;
    u64 cut;

    DEV_METHOD bool takes(int j) const { return !cut || ranked_key(row.rank(j), j) >= cut; }
    DEV_METHOD u64 key(int j) const { return index_key(j); }
    DEV_METHOD u64 mass(int j) const { return row.scale.integer(row.weight(j)); }
};

template <class Row>
DEV u64 mass_from(SharedScratch& scratch, const Row& row, int V, u64 cut) {
    const ByIndex<Row> kept = {row, cut};
    u64 sum = 0;
    for (int j = threadIdx.x; j < V; j += blockDim.x)
        if (kept.takes(j)) sum += kept.mass(j);
    return all_reduce_block(scratch, sum, Add());
}

// Largest element; NaN if one is negative, infinite or NaN, or all are 0.
DEV float top_of_probs(SharedScratch& scratch, const float* probs, int V) {
    u64 top = 0, bad = 0;
    for (int j = threadIdx.x; j < V; j += blockDim.x) {
        const float x = probs[j];
        bad |= !(x >= 0 && x < infinity());
        top = max(top, (u64)key_of(x));
    }
    top = all_reduce_block(scratch, bad << 32 | top, Max());
    const float largest = value_of((u32)top);
    return top >> 32 || largest == 0 ? nan32() : largest;
}

// Largest element; NaN if one is NaN.
DEV float top_of_logits(SharedScratch& scratch, const float* logits, int V) {
    u64 top = 0, bad = 0;
    for (int j = threadIdx.x; j < V; j += blockDim.x) {
        const float x = logits[j];
        bad |= x != x;
        top = max(top, (u64)key_of(x));
    }
    top = all_reduce_block(scratch, bad << 32 | top, Max());
    return top >> 32 ? nan32() : value_of((u32)top);
}

// ---- filters -----------------------------------------------------------------------------------

struct Kept {
    u64 cut, mass;  // key of the last kept element, 0 for all; sum of the kept weights
};

DEV u64 mass_of_share(double share, u64 whole) {
    return min(max((u64)ceil(share * SLACK * (double)whole), 1ull), whole);
}

// Combine all filters; see `cpu_filters.filter_row`.
template <class Row>
DEV Kept filter(SharedScratch& scratch, const Row& row, int V, const double* limits, bool k_first, float top) {
    const ByRank<Row> elements = {row};
    const u64 total = mass_from(scratch, row, V, 0);
    const bool counts = limits[TOP_K] < V, shares = limits[TOP_P] < 1;
    const u32 number = counts ? (u32)limits[TOP_K] : V;
    Kept kept = {0, total};
    if (counts || shares) {
        u64 mass = shares ? mass_of_share(limits[TOP_P], total) : NO_LIMIT;
        if (k_first && counts && shares) {
            const Selected first = select(scratch, elements, V, false, number, NO_LIMIT);
            mass = mass_of_share(limits[TOP_P], first.mass);
        }
        const Selected last = select(scratch, elements, V, false, number, mass);
        kept = {last.key, last.mass};
    }
    const double floor = fmin(limits[FLOOR] * row.scale.real(total), (double)top);
    const float bound = float_at_least(fmax(limits[MIN_P] * (double)top, floor));
    if (bound > 0) {
        const u64 cut = (u64)key_of(bound) << INDEX_BITS;
        if (cut > kept.cut) kept = {cut, mass_from(scratch, row, V, cut)};
    }
    return kept;
}

template <class Row>
DEV int draw(SharedScratch& scratch, const Row& row, int V, Kept kept, u64 u) {
    const ByIndex<Row> elements = {row, kept.cut};
    return index_of(select(scratch, elements, V, true, ~0u, passes(u, kept.mass)).key);
}

// ---- kernels -----------------------------------------------------------------------------------

// Invalid rows become NaN.
DEV bool row_is_valid(bool good, int* valid, float* out, int V) {
    if (threadIdx.x == 0) *valid = good;
    if (!good)
        for (int j = threadIdx.x; j < V; j += blockDim.x) out[j] = nan32();
    return good;
}

extern "C" __global__ void __launch_bounds__(1024)
sample(const float* ranks, const float* probs, const int* rows, const double* limits,
       int top_k_first, const u64* seeds, const u64* offsets, int* out, double* shares,
       int n_rows, int V, int fraction) {
    __shared__ SharedScratch scratch;
    const int i = blockIdx.x;
    const i64 at = (i64)rows[i] * V;
    const bool exists = rows[i] >= 0 && rows[i] < n_rows;
    const float top = exists ? top_of_probs(scratch, probs + at, V) : nan32();
    if (top != top) {
        if (threadIdx.x == 0) {
            out[i] = -1;
            shares[i] = 0;
        }
        return;
    }
    const Probabilities row = {ranks + at, probs + at, scale_of(top, fraction)};
    const Kept kept = filter(scratch, row, V, limits + N_LIMITS * i, top_k_first, top);
    const int chosen = draw(scratch, row, V, kept, uniform(seeds[i], offsets[i], 0));
    if (threadIdx.x == 0) {
        out[i] = chosen;
        shares[i] = (double)row.weight(chosen) / row.scale.real(kept.mass);
    }
}

extern "C" __global__ void __launch_bounds__(1024)
sample_logits(const float* logits, const int* rows, const float* temperature,
              const double* limits, int top_k_first, const u64* seeds, const u64* offsets, int* out,
              int n_rows, int V, int fraction) {
    __shared__ SharedScratch scratch;
    const int i = blockIdx.x;
    const float* x = logits + (i64)rows[i] * V;
    const bool exists = rows[i] >= 0 && rows[i] < n_rows;
    const float top = exists ? top_of_logits(scratch, x, V) : nan32();
    if (!(top > LOWEST && top < infinity())) {
        if (threadIdx.x == 0) out[i] = -1;
        return;
    }
    Softmax row = {x, top, __fdiv_rn(1.0f, temperature[i]), 0, scale_of(1.0f, fraction)};
    const double* own = limits + N_LIMITS * i;
    double others[N_LIMITS] = {own[TOP_K], own[TOP_P], own[MIN_P], own[FLOOR], own[BY_RANK]};
    if (top_k_first && own[TOP_K] < V) {  // then top-p is a share of what top-k keeps
        row.cut = select(scratch, Values{x}, V, false, (u32)own[TOP_K], NO_LIMIT).key;
        others[TOP_K] = infinity();
    }
    const Kept kept = filter(scratch, row, V, others, top_k_first, 1.0f);
    const int chosen = draw(scratch, row, V, kept, uniform(seeds[i], offsets[i], 0));
    if (threadIdx.x == 0) out[i] = chosen;
}

// Write the kept elements divided by their sum, zeros elsewhere; `out` may be `probs`.
template <class Row>
DEV void write_shares(const Row& row, int V, Kept kept, float* out) {
    const ByIndex<Row> elements = {row, kept.cut};
    const float whole = row.scale.sum_in_units(kept.mass);
    for (int j = threadIdx.x; j < V; j += blockDim.x)
        out[j] = elements.takes(j) ? __fdiv_rn(row.scale.in_units(row.weight(j)), whole) : 0;
}

extern "C" __global__ void __launch_bounds__(1024)
renorm(const float* ranks, const float* probs, const double* limits, float* out, int* valid, int
       V, int fraction) {
    __shared__ SharedScratch scratch;
    const int i = blockIdx.x;
    const i64 at = (i64)i * V;
    const float top = top_of_probs(scratch, probs + at, V);
    if (!row_is_valid(top == top, valid + i, out + at, V)) return;
    const Probabilities row = {ranks + at, probs + at, scale_of(top, fraction)};
    const Kept kept = filter(scratch, row, V, limits + N_LIMITS * i, false, top);
    __syncthreads();
    write_shares(row, V, kept, out + at);
}

// XTC: with a probability, drop all elements above a threshold but the least of them.
extern "C" __global__ void __launch_bounds__(1024)
xtc(const float* probs, const double* parameters, const u64* seeds, const u64* offsets, float*
    out, int* valid, int V, int fraction) {
    __shared__ SharedScratch scratch;
    const int i = blockIdx.x;
    const float* x = probs + (i64)i * V;
    const float top = top_of_probs(scratch, x, V);
    if (!row_is_valid(top == top, valid + i, out + (i64)i * V, V)) return;
    const Probabilities row = {x, x, scale_of(top, fraction)};
    u64 total = mass_from(scratch, row, V, 0), least = NO_LIMIT, survivor = NO_LIMIT;
    if (unit(uniform(seeds[i], offsets[i], 0)) < parameters[2 * i]) {
        const float bound = float_at_least(parameters[2 * i + 1] * row.scale.real(total));
        least = (u64)key_of(bound) << INDEX_BITS;
        for (int j = threadIdx.x; j < V; j += blockDim.x)
            if (ranked_key(x[j], j) >= least) survivor = min(survivor, ranked_key(x[j], j));
        survivor = all_reduce_block(scratch, survivor, Min());  // the last among equals
    }
    u64 sum = 0;
    for (int j = threadIdx.x; j < V; j += blockDim.x) {
        const u64 key = ranked_key(x[j], j);
        if (key < least || key == survivor) sum += row.scale.integer(x[j]);
    }
    const float whole = row.scale.sum_in_units(all_reduce_block(scratch, sum, Add()));
    for (int j = threadIdx.x; j < V; j += blockDim.x) {
        const u64 key = ranked_key(x[j], j);
        const bool stays = key < least || key == survivor;
        out[(i64)i * V + j] = stays ? __fdiv_rn(row.scale.in_units(x[j]), whole) : 0;
    }
}

extern "C" __global__ void __launch_bounds__(1024)
softmax(const float* logits, const float* temperature, float* out, int V, int fraction) {
    __shared__ SharedScratch scratch;
    const int i = blockIdx.x;
    const float* x = logits + (i64)i * V;
    float* to = out + (i64)i * V;
    const float top = top_of_logits(scratch, x, V);
    if (!(top > LOWEST && top < infinity())) {
        for (int j = threadIdx.x; j < V; j += blockDim.x) to[j] = nan32();
        return;
    }
    const Softmax row = {x, top, __fdiv_rn(1.0f, temperature[i]), 0, scale_of(1.0f, fraction)};
    const float whole = row.scale.sum_in_units(mass_from(scratch, row, V, 0));
    const float factor = __fdiv_rn(1.0f, whole);
    for (int j = threadIdx.x; j < V; j += blockDim.x) to[j] = __fmul_rn(row.weight(j), factor);
}

extern "C" __global__ void __launch_bounds__(1024)
argmax(const float* logits, int* out, int V) {
    __shared__ SharedScratch scratch;
    const float* x = logits + (i64)blockIdx.x * V;
    u64 best = 0, bad = 0;
    for (int j = threadIdx.x; j < V; j += blockDim.x) {
        bad |= x[j] != x[j];
        best = max(best, ranked_key(x[j], j));
    }
    best = all_reduce_block(scratch, bad << 63 | best, Max());
    if (threadIdx.x == 0) out[blockIdx.x] = best >> 63 ? -1 : index_of(best);
}

extern "C" __global__ void __launch_bounds__(1024)
top_k_mask(const float* logits, const i64* counts, float* out, int* valid, int V) {
    __shared__ SharedScratch scratch;
    const int i = blockIdx.x;
    const float* x = logits + (i64)i * V;
    const float top = top_of_logits(scratch, x, V);
    if (!row_is_valid(top == top, valid + i, out + (i64)i * V, V)) return;
    const u64 cut = select(scratch, Values{x}, V, false, (u32)counts[i], NO_LIMIT).key;
    __syncthreads();
    for (int j = threadIdx.x; j < V; j += blockDim.x)
        out[(i64)i * V + j] = ranked_key(x[j], j) >= cut ? x[j] : -infinity();
}

extern "C" __global__ void __launch_bounds__(1024)
n_sigma_mask(const float* logits, const double* n, float* out, int* valid, int V) {
    __shared__ SharedScratch scratch;
    const int i = blockIdx.x;
    const float* x = logits + (i64)i * V;
    const float top = top_of_logits(scratch, x, V);
    if (!row_is_valid(top < infinity(), valid + i, out + (i64)i * V, V)) return;
    float cut = -infinity();
    if (top > -infinity() && n[i] > 0) {
        double sum = 0, number = 0, squares = 0;
        for (int j = threadIdx.x; j < V; j += blockDim.x)
            if (x[j] >= LOWEST) {
                sum += x[j];
                number += 1;
            }
        number = sum_of_doubles(scratch, number);
        const float mean = sum_of_doubles(scratch, sum) / number;
        for (int j = threadIdx.x; j < V; j += blockDim.x)
            if (x[j] >= LOWEST) {
                const float difference = x[j] - mean;
                squares += __fmul_rn(difference, difference);
            }
        cut = float_at_least((double)top - n[i] * sqrt(sum_of_doubles(scratch, squares) / number));
    }
    for (int j = threadIdx.x; j < V; j += blockDim.x)
        out[(i64)i * V + j] = x[j] >= cut ? x[j] : -infinity();
}

// Chain speculative sampling; an invalid target row gives emitted -1.
extern "C" __global__ void __launch_bounds__(1024)
chain_speculative(const float* draft_probs, const int* draft_token_ids, const float*
                  target_probs, const u64* seeds, const u64* offsets, int* out, int* accepted,
                  int* emitted, int n, int V, int fraction) {
    __shared__ SharedScratch scratch;
    const i64 b = blockIdx.x;
    int place = 0, passed = 0;
    bool accepting = true;
    for (int i = 0; i < n; i++) {
        const int token = draft_token_ids[b * n + i];
        const bool exists = token >= 0 && token < V;
        const double u = unit(uniform(seeds[b], offsets[b], i));
        const bool good = exists
            && u * draft_probs[(b * n + i) * V + token] < target_probs[(b * (n + 1) + i) * V + token];
        passed += good;
        accepting = accepting && good;
        place += accepting;
        if (threadIdx.x == 0) out[b * (n + 1) + i] = accepting ? token : -1;
    }
    const float* target = target_probs + (b * (n + 1) + place) * V;
    const float top = top_of_probs(scratch, target, V);
    int chosen = -1;
    if (top == top) {
        const u64 u = uniform(seeds[b], offsets[b], n);
        Excess excess = {target, target, scale_of(1.0f, fraction)};
        u64 best = 0;
        if (place < n) {
            excess.draft = draft_probs + (b * n + place) * V;
            for (int j = threadIdx.x; j < V; j += blockDim.x)
                best = max(best, (u64)__float_as_uint(excess.weight(j)));
            best = all_reduce_block(scratch, best, Max());
        }
        if (best) {
            excess.scale = scale_of(__uint_as_float((u32)best), fraction);
            const u64 whole = mass_from(scratch, excess, V, 0);
            chosen = draw(scratch, excess, V, {0, whole}, u);
        } else {
            const Probabilities row = {target, target, scale_of(top, fraction)};
            chosen = draw(scratch, row, V, {0, mass_from(scratch, row, V, 0)}, u);
        }
    }
    if (threadIdx.x == 0) {
        if (place < n || n == 0) out[b * (n + 1) + n] = -1;
        out[b * (n + 1) + place] = chosen;
        accepted[b] = passed;
        emitted[b] = top == top ? place : -1;
    }
}
