// Plan header, work items, masking and partial results, shared by all attention kernels.
//
// The header has the fields of `plan_layout.py`, with device addresses.
#pragma once
#include "kv_cache/cuda_codec.cuh"

enum HeaderField {
    QO_HEADS, KV_HEADS, DIM_QK, DIM_VO, PAGE_SIZE, WINDOW, CAUSAL, SPLIT_KEYS, MAX_VECTORS, N_MERGES,
    ITEM_CAPACITY, MERGE_CAPACITY, ITEMS, MERGES, SHARES, QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS,
    PARTIALS, MASK, MASK_BITS, MASK_STARTS, SCORE_FACTORS, OUT_FACTORS, SLOPES, SINKS, ROPE,
    LSE_NATURAL, MAY_SPLIT, LATENT, BIAS, BIAS_BYTES, ARRIVED, ATTENTION_CHUNK,
    MAY_SHARE, SCORES_HOOK, OUTPUT_HOOK, HOOK_PARAMS, NO_SOFTMAX, RANGE_HOOK,
    KEY_ROPE, KEY_ROPE_DIM, KEY_ROPE_NEOX, KEY_BIAS
};

constexpr float MASKED = -1e30f;  // score of a masked key, and row maximum without keys
constexpr float LOG2_E = 1.44269504f;
constexpr float LN_2 = 0.693147182f;

// Work item: a tile of query vectors (rows x heads of a group, for every KV head) and a range of keys.
struct Item {
    int request, row, n_rows, position;  // position of the first row in its sequence
    int first_key, end_key;
    int partial;  // index of the first partial result, -1 for a final result
    int merge;    // row of MERGES
};

struct Merge {
    int row, n_rows, partial, n_splits;
};

template <class T>
DEV T* pointer(const i64* header, int place) {
    return (T*)header[place];
}

// Strides in bytes.
struct Strides {
    i64 page, token, head;
};

DEV float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEV float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Row maximum in units of log2 from a maximal score.
DEV float scaled_max(float score) { return __fmul_rn(score, LOG2_E); }

// Softmax weight of a score: 2^(score * log2 e - row_max).  The fma computes the product exactly and rounds the
// difference t once, so large scores lose nothing: the relative error is 2^-25 |t| plus 2^-22 of ex2.approx.
// The error of `row_max` is common to all weights of a row and to its LSE.  LOG2_E has a relative error of 2^-26.
// MASKED gives 0, also where row_max is MASKED; NaN and infinity give NaN, -infinity gives 0.
DEV float weight(float score, float row_max) { return exp2_fast(__fmaf_rn(score, LOG2_E, -row_max)); }

DEV float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// cap * tanh(x / cap), by tanh y = 1 - 2 / (e^2y + 1); a Taylor series for small y, where that cancels.  The error is
// a few roundings of x there, elsewhere 2^-23 cap, below four roundings of x.
DEV float soft_capped(float x, float cap) {
    const float y = __fmul_rn(x, reciprocal_fast(cap)), y2 = y * y;
    const float far = __fmaf_rn(-2.0f, reciprocal_fast(exp2_fast(y * (2 * LOG2_E)) + 1.0f), 1.0f);
    const float near =  // to y^9: the next term is below 2e-8 y at 0.25
        y * (1.0f + y2 * (-1.0f / 3 + y2 * (2.0f / 15 + y2 * (-17.0f / 315 + y2 * (62.0f / 2835)))));
    return cap * (y2 < 0.0625f ? near : far);
}

// ---- masking -------------------------------------------------------------------------------------

struct VisibleKeys {
    int low, high;   // key range by causality, window, chunk and sequence length
    i64 mask;        // index of key 0 in the mask
};

DEV VisibleKeys visible_keys(const i64* header, const Item& item, int row_in_tile) {
    const int here = item.position + row_in_tile;
    VisibleKeys seen = {0, pointer<int>(header, KV_LENS)[item.request], 0};
    if (header[MASK]) {
        const int row = item.row + row_in_tile - pointer<int>(header, QO_INDPTR)[item.request];
        seen.mask = pointer<i64>(header, MASK_STARTS)[item.request] + (i64)row * seen.high;
    }
    if (header[WINDOW] >= 0) seen.low = max(0, here - (int)header[WINDOW]);
    if (header[ATTENTION_CHUNK]) {
        const int chunk = (int)header[ATTENTION_CHUNK], begin = max(0, here) / chunk * chunk;
        seen.low = max(seen.low, begin);
        seen.high = min(seen.high, begin + chunk);
    }
    if (header[CAUSAL]) seen.high = max(0, min(seen.high, here + 1));
    return seen;
}

DEV bool mask_bit(const i64* header, i64 index) {
    const u8* mask = pointer<u8>(header, MASK);
    return header[MASK_BITS] ? (mask[index >> 3] >> (index & 7)) & 1 : mask[index];
}

// Scaled dot product plus ALiBi or relative bias, then the soft cap.
DEV float biased_score(const i64* header, float score, int distance, int qo_head, float cap) {
    if (header[SLOPES]) score = __fmaf_rn(pointer<float>(header, SLOPES)[qo_head], distance, score);
    if (header[BIAS]) {
        const u8* biases = pointer<u8>(header, BIAS) + qo_head * header[BIAS_BYTES];
        score += ((const float*)biases)[distance];
    }
    return cap > 0 ? soft_capped(score, cap) : score;
}

// ---- results -----------------------------------------------------------------------------------

// Merge of two partial results: their factors, and the merged maximum and sum.
struct MergedState {
    float a, b, row_max, row_sum;
};

DEV MergedState merge_partial(float row_max, float row_sum, float new_top, float new_total) {
    if (new_total == 0 && new_top == MASKED) return {1, 0, row_max, row_sum};
    if (row_sum == 0 && row_max == MASKED) return {0, 1, new_top, new_total};
    const float both = fmaxf(row_max, new_top);
    const float a = exp2_fast(row_max - both), b = exp2_fast(new_top - both);
    return {a, b, both, __fmaf_rn(new_total, b, __fmul_rn(row_sum, a))};
}

// Merged column; a factor of 0 also drops NaN.
DEV float merge_column(const MergedState& f, float old, float added) {
    const float a = f.a == 0 ? 0 : old, b = f.b == 0 ? 0 : added;
    return __fmaf_rn(b, f.b, __fmul_rn(a, f.a));
}

// Partial result: DIM_VO columns, row maximum, softmax sum, padding.
DEV i64 partial_floats(const i64* header) { return (header[DIM_VO] + 3) / 4 * 4 + 4; }

DEV float* partial_at(const i64* header, int number, int kv_head) {
    const i64 place = (i64)number * header[KV_HEADS] + kv_head;
    return pointer<float>(header, PARTIALS) + place * partial_floats(header);
}

// Factor of an accumulator, and the LSE.
struct FinalScale {
    float factor, lse;
};

DEV FinalScale final_scale(const i64* header, float row_max, float row_sum, int qo_head) {
    float factor = header[OUT_FACTORS] ? pointer<float>(header, OUT_FACTORS)[qo_head] : 1.0f;
    if (header[SINKS]) {
        const float sink = scaled_max(pointer<float>(header, SINKS)[qo_head]), both = fmaxf(row_max, sink);
        const float rescale = exp2_fast(row_max - both);
        row_sum = __fmaf_rn(row_sum, rescale, exp2_fast(sink - both));
        factor *= rescale;
        row_max = both;
    }
    const float log2_sum = row_max + log2_fast(row_sum);
    const float lse = header[LSE_NATURAL] ? __fmul_rn(LN_2, log2_sum) : log2_sum;
    return {row_sum != 0 ? __fdiv_rn(factor, row_sum) : 0, row_sum != 0 ? lse : -infinity()};
}
