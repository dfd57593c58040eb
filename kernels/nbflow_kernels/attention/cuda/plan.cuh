// What all attention kernels share: the plan's header, work items, what a row sees, partial results.
//
// The twin of `layout.py`: the header has the same places, its addresses are those of the device.
#pragma once
#include "kv_cache/cuda_codec.cuh"

enum Place {
    QO_HEADS, KV_HEADS, DIM_QK, DIM_VO, PAGE_SIZE, WINDOW, CAUSAL, SPLIT_KEYS, MOST, N_MERGES,
    ITEM_ROOM, MERGE_ROOM, ITEMS, MERGES, SHARES, QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS,
    PARTIALS, MASK, MASK_BITS, MASK_STARTS, SCORE_FACTORS, OUT_FACTORS, SLOPES, SINKS, ROPE,
    LSE_NATURAL, MAY_SPLIT, LATENT, BIAS, BIAS_BYTES, ARRIVED
};

constexpr float HIDDEN = -1e30f;  // a score that is not seen, and the top of a row without keys
constexpr float LOG2_E = 1.44269504f;
constexpr float LN_2 = 0.693147182f;

// A tile of query vectors (rows x heads of a group, for every key/value head) and a range of keys.
struct Item {
    int request, row, n_rows, position;  // position of the first row in its sequence
    int first_key, end_key;
    int partial;  // number of the first partial result, -1 for a final one
    int merge;    // number of the row of MERGES that the partial results go to
};

struct Merge {
    int row, n_rows, partial, n_splits;
};

template <class T>
DEV T* pointer(const i64* header, int place) {
    return (T*)header[place];
}

// Bytes from page to page, token to token and head to head.
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

// The top that a greatest score gives: tops are exponents of two.
DEV float top_of(float score) { return __fmul_rn(score, LOG2_E); }

// The weight of a score, for all attention kernels: 2^(score * log2 e - top).  The product is exact
// inside of fma and the difference t is rounded once, so large scores lose nothing: the error is
// 2^-25 |t| plus 2^-22 of ex2.approx, of the weight.  That of `top` is the same for all weights of
// a row, and of its LSE, which begins with the rounded top.  LOG2_E is 2^-26 of itself away from
// log2 e.  HIDDEN gives 0, with a top of HIDDEN too; NaN and infinity give NaN, -infinity gives 0.
DEV float weight(float score, float top) { return exp2_fast(__fmaf_rn(score, LOG2_E, -top)); }

DEV float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// cap * tanh(x / cap): tanh y = 1 - 2 / (e^2y + 1), and y itself for small y, where that cancels.
// There the error is some roundings of x, elsewhere 2^-23 cap, below four roundings of x.
DEV float soft_capped(float x, float cap) {
    const float y = __fmul_rn(x, reciprocal_fast(cap)), y2 = y * y;
    const float far = __fmaf_rn(-2.0f, reciprocal_fast(exp2_fast(y * (2 * LOG2_E)) + 1.0f), 1.0f);
    const float near =  // Taylor to y^9: the next term is below 2e-8 y at 0.25
        y * (1.0f + y2 * (-1.0f / 3 + y2 * (2.0f / 15 + y2 * (-17.0f / 315 + y2 * (62.0f / 2835)))));
    return cap * (y2 < 0.0625f ? near : far);
}

// ---- what a query vector sees ------------------------------------------------------------------

struct Seen {
    int low, high;   // keys by causality, window and the end of the sequence
    i64 mask;        // index of key 0 in the mask
};

DEV Seen seen_by(const i64* header, const Item& item, int row_in_tile) {
    const int here = item.position + row_in_tile;
    Seen seen = {0, pointer<int>(header, KV_LENS)[item.request], 0};
    if (header[MASK]) {
        const int row = item.row + row_in_tile - pointer<int>(header, QO_INDPTR)[item.request];
        seen.mask = pointer<i64>(header, MASK_STARTS)[item.request] + (i64)row * seen.high;
    }
    if (header[WINDOW] >= 0) seen.low = max(0, here - (int)header[WINDOW]);
    if (header[CAUSAL]) seen.high = max(0, min(seen.high, here + 1));
    return seen;
}

DEV bool mask_shows(const i64* header, i64 index) {
    const u8* mask = pointer<u8>(header, MASK);
    return header[MASK_BITS] ? (mask[index >> 3] >> (index & 7)) & 1 : mask[index];
}

// A dot product times its factor, with what is added by distance and the soft cap.
DEV float final_score(const i64* header, float score, int distance, int qo_head, float cap) {
    if (header[SLOPES]) score = __fmaf_rn(pointer<float>(header, SLOPES)[qo_head], distance, score);
    if (header[BIAS]) {
        const u8* biases = pointer<u8>(header, BIAS) + qo_head * header[BIAS_BYTES];
        score += ((const float*)biases)[distance];
    }
    return cap > 0 ? soft_capped(score, cap) : score;
}

// ---- results -----------------------------------------------------------------------------------

// The factors of two partial results in their sum, and its top and sum of weights.
struct Folded {
    float a, b, top, total;
};

DEV Folded fold(float top, float total, float new_top, float new_total) {
    if (new_total == 0 && new_top == HIDDEN) return {1, 0, top, total};
    if (total == 0 && top == HIDDEN) return {0, 1, new_top, new_total};
    const float both = fmaxf(top, new_top);
    const float a = exp2_fast(top - both), b = exp2_fast(new_top - both);
    return {a, b, both, __fmaf_rn(new_total, b, __fmul_rn(total, a))};
}

// A column of the sum; a factor of 0 leaves a NaN behind that belongs to no key.
DEV float fold_column(const Folded& f, float old, float added) {
    const float a = f.a == 0 ? 0 : old, b = f.b == 0 ? 0 : added;
    return __fmaf_rn(b, f.b, __fmul_rn(a, f.a));
}

// Where a partial result lies: DIM_VO columns, top, sum of weights, padding.
DEV i64 partial_floats(const i64* header) { return (header[DIM_VO] + 3) / 4 * 4 + 4; }

DEV float* partial_at(const i64* header, int number, int kv_head) {
    const i64 place = (i64)number * header[KV_HEADS] + kv_head;
    return pointer<float>(header, PARTIALS) + place * partial_floats(header);
}

// What an accumulator is multiplied with, and the LSE.
struct Finish {
    float factor, lse;
};

DEV Finish finish(const i64* header, float top, float total, int qo_head) {
    float factor = header[OUT_FACTORS] ? pointer<float>(header, OUT_FACTORS)[qo_head] : 1.0f;
    if (header[SINKS]) {
        const float sink = top_of(pointer<float>(header, SINKS)[qo_head]), both = fmaxf(top, sink);
        const float shrink = exp2_fast(top - both);
        total = __fmaf_rn(total, shrink, exp2_fast(sink - both));
        factor *= shrink;
        top = both;
    }
    const float log2_sum = top + log2_fast(total);
    const float lse = header[LSE_NATURAL] ? __fmul_rn(LN_2, log2_sum) : log2_sum;
    return {total != 0 ? __fdiv_rn(factor, total) : 0, total != 0 ? lse : -infinity()};
}
