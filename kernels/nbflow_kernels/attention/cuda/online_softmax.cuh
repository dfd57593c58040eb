// Tensor-core attention of a 64-key tile: Q K^T, online softmax, P V.
#pragma once
#include "attention/cuda/kv_tile_loader.cuh"

// Query vectors of a thread block: up to `most` of its work item and KV head.
struct Tile {
    const i64* header;
    Item item;
    int kv_head, group, first_vector, n_vectors;
    float cap;

    DEV_METHOD Tile(const i64* header, int most, float cap)
        : header(header), item(pointer<Item>(header, ITEMS)[blockIdx.x]), kv_head(blockIdx.y),
          group(header[QO_HEADS] / header[KV_HEADS]), first_vector(blockIdx.z * most),
          n_vectors(min(most, item.n_rows * group - first_vector)), cap(cap) {}

    DEV_METHOD int row(int m) const { return (first_vector + m) / group; }
    DEV_METHOD int head(int m) const { return kv_head * group + (first_vector + m) % group; }
    DEV_METHOD i64 place(int m) const { return (i64)(item.row + row(m)) * header[QO_HEADS] + head(m); }
};

// Load queries times their factors as 16-bit numbers, with EXACT the remainders as a second copy; zeros for
// padding vectors.  `place(copy, vector, column)` is the address of two columns.
template <class E, int M, int D, bool EXACT, class HeaderField>
DEV void load_queries(const Tile& t, const u8* queries, i64 row_bytes, int kind, HeaderField place) {
    const int size = kind == F32 ? 4 : 2;
    for (int i = threadIdx.x; i < M * (D / 2); i += blockDim.x) {
        const int m = i / (D / 2), d = i % (D / 2) * 2;
        float x = 0, y = 0;
        if (m < t.n_vectors) {
            const int head = t.head(m);
            const float factor = pointer<float>(t.header, SCORE_FACTORS)[head];
            const u8* from =
                queries + (t.item.row + t.row(m)) * row_bytes + ((i64)head * D + d) * size;
            x = __fmul_rn(load_float(from, kind), factor);
            y = __fmul_rn(load_float(from + size, kind), factor);
        }
        u32 both = E::pack(x, y);
        if (EXACT)
            *place(1, m, d) = E::pack(x - E::low(both), y - E::high(both));
        else  // overflow gives NaN, as with EXACT: an infinity times a weight of 0 could pass unseen
            both = E::pack(E::low(both) + 0 * E::low(both), E::high(both) + 0 * E::high(both));
        *place(0, m, d) = both;
    }
}

// The same, to row-major shared memory for `qk_scores`.
template <class E, int M, int D, bool EXACT>
DEV void load_queries(const Tile& t, const u8* queries, i64 row_bytes, int kind, u16* q) {
    const auto place = [&](int copy, int m, int d) { return (u32*)(q + (copy * M + m) * (D + PAD) + d); };
    load_queries<E, M, D, EXACT>(t, queries, row_bytes, kind, place);
}

// Scores of 16 query vectors and 16 * GROUPS keys, in MMA accumulator layout.
template <class E, int GROUPS, int M, int D, bool EXACT>
DEV void qk_scores(float (*s)[4], const u16* q, const u16* k) {
    const int lane = threadIdx.x & 31;
    const u16* q_at = q + lane % 16 * (D + PAD) + lane / 16 * 8;
    const u16* k_at = k + (lane / 16 * 8 + lane % 8) * (D + PAD) + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < 2 * GROUPS; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        u32 a[4], rest[4];
        load_matrices(a, q_at + d);
        if (EXACT) load_matrices(rest, q_at + M * (D + PAD) + d);
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            u32 b[4];
            load_matrices(b, k_at + 16 * n * (D + PAD) + d);
            if (EXACT) {
                E::mma(s[2 * n], rest, b[0], b[1]);
                E::mma(s[2 * n + 1], rest, b[2], b[3]);
            }
            E::mma(s[2 * n], a, b[0], b[1]);
            E::mma(s[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Online-softmax state and visible key range of a lane's two rows (g and g + 8 of 16).
struct RowState {
    int first_vector;     // of this warp's 16
    int low[2], high[2];  // visible keys of the item
    float row_max[2], run_max[2], run_sum[2];  // maxima are in units of log2, see `scaled_max`
    bool plain;  // no bias, cap or mask

    // Bind vectors [first_vector, first_vector + 16).  Padding rows copy the last valid row's bounds so that they
    // never force masking; all-padding warps get an empty range.
    DEV_METHOD void start(const Tile& t, int first_of_16) {
        first_vector = first_of_16;
        plain = !t.header[SLOPES] && !t.header[BIAS] && !t.header[MASK] && t.cap == 0;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const VisibleKeys seen = visible_keys(t.header, t.item, t.row(vector(t, r)));
            low[r] = max(seen.low, t.item.first_key);
            high[r] = first_vector < t.n_vectors ? min(seen.high, t.item.end_key) : 0;
            row_max[r] = run_max[r] = MASKED;
            run_sum[r] = 0;
        }
    }
    DEV_METHOD bool exists(const Tile& t, int r) const {
        return first_vector + (int)(threadIdx.x & 31) / 4 + 8 * r < t.n_vectors;
    }
    // Index of the vector of row r, clamped to the last one.
    DEV_METHOD int vector(const Tile& t, int r) const {
        return min(first_vector + (int)(threadIdx.x & 31) / 4 + 8 * r, t.n_vectors - 1);
    }
    // Apply biases, caps and masks to the scores of 8 * N keys from `base` on; keys outside a row's range become MASKED.
    // ALWAYS_PLAIN drops the code for biases, caps and masks.
    template <int N, bool ALWAYS_PLAIN = false>
    DEV_METHOD void bias_and_mask(const Tile& t, int base, float (*s)[4]) const {
        if (!ALWAYS_PLAIN && !plain) apply_bias_cap_mask<N>(t, base, s);
        const bool sees_all = max(low[0], low[1]) <= base && min(high[0], high[1]) >= base + 8 * N;
        if (__all_sync(~0u, sees_all)) return;
        const int column = base + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            const int r = i / 2 % 2, j = column + i / 4 * 8 + i % 2;
            if (j < low[r] || j >= high[r]) s[i / 4][i % 4] = MASKED;
        }
    }
    // Apply biases, caps and masks to 8 * N scores.
    template <int N>
    DEV_METHOD void apply_bias_cap_mask(const Tile& t, int base, float (*s)[4]) const {
        const int column = base + (threadIdx.x & 3) * 2;
        const int rows[2] = {t.row(vector(t, 0)), t.row(vector(t, 1))};
        if (t.header[SLOPES] || t.header[BIAS] || t.cap > 0) {
            const int heads[2] = {t.head(vector(t, 0)), t.head(vector(t, 1))};
            for_each_score<N>(s, [&](float& x, int i, int r) {
                x = biased_score(t.header, x, column + i - (t.item.position + rows[r]), heads[r], t.cap);
            });
        }
        if (!t.header[MASK]) return;
        const i64 masks[2] = {visible_keys(t.header, t.item, rows[0]).mask, visible_keys(t.header, t.item, rows[1]).mask};
        for_each_score<N>(s, [&](float& x, int i, int r) {
            const int j = column + i;
            if (j >= low[r] && j < high[r] && !mask_bit(t.header, masks[r] + j)) x = MASKED;
        });
    }
    // Call `change(score, column, row)`.  Full unrolling would spill registers, so each iteration handles the first
    // four scores and rotates the others down.
    template <int N, class Change>
    DEV_METHOD void for_each_score(float (*s)[4], Change change) const {
#pragma unroll 1
        for (int n = 0; n < N; n++) {
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; e++) change(x[e] = s[0][e], 8 * n + e % 2, e / 2);
#pragma unroll
            for (int i = 0; i < 4 * N; i++) s[i / 4][i % 4] = i < 4 * N - 4 ? s[i / 4 + 1][i % 4] : x[i % 4];
        }
    }
    // Raise the running maxima to at least `most`; `rescale` receives the factors of the accumulators.
    DEV_METHOD void raise(const float most[2], float rescale[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float before = row_max[r];
            row_max[r] = fmaxf(before, scaled_max(most[r]));
            rescale[r] = exp2_fast(before - row_max[r]);
        }
    }
    // Merge a split's accumulators into those of earlier splits, `before(n, e)`, and reset them.
    template <int TILES, class Before>
    DEV_METHOD void merge_split(const Tile& t, float (*o)[4], float* row_sum, Before before) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (!exists(t, r)) continue;
            const MergedState f = merge_partial(run_max[r], run_sum[r], row_max[r], row_sum[2 * r]);
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    before(n, e) = merge_column(f, before(n, e), o[n][e]);
                    o[n][e] = 0;
                }
            run_max[r] = f.row_max;
            run_sum[r] = f.row_sum;
            row_max[r] = MASKED;
            row_sum[2 * r] = row_sum[2 * r + 1] = 0;
        }
    }
    // Set `run_max`, `run_sum` and `o` to the results of the whole item.
    template <int TILES, class Before>
    DEV_METHOD void final_scale(const Tile& t, bool multi_split, float (*o)[4], const float* row_sum, Before before) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            run_max[r] = multi_split ? run_max[r] : row_max[r];
            run_sum[r] = multi_split ? run_sum[r] : row_sum[2 * r];
        }
        if (!multi_split) return;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (!exists(t, r)) continue;
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) o[n][e] = before(n, e);
        }
    }
    // True if any of the warp's 16 rows sees a key of [base, base + KEYS).
    DEV_METHOD bool any_visible(int base) const {
        bool sees = false;
#pragma unroll
        for (int r = 0; r < 2; r++) sees = sees || (low[r] < base + KEYS && high[r] > base);
        return __any_sync(~0u, sees);
    }
};

DEV float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Row maxima over the four lanes of a row, for both rows of a lane.
template <int N>
DEV void tile_row_max(const float (*s)[4], float most[2]) {
    most[0] = most[1] = MASKED;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) most[e / 2] = fmaxf(most[e / 2], s[n][e]);
    most[0] = quad_max(most[0]), most[1] = quad_max(most[1]);
}

// Softmax weights from the scores of 8 * N keys.
template <int N>
DEV void softmax_weights(float (*s)[4], const float* row_max) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) s[i / 4][i % 4] = weight(s[i / 4][i % 4], row_max[i / 2 % 2]);
}

// Pack two weights to 16 bits, with EXACT also their remainders.
template <class E, bool EXACT>
DEV void pack_weights(float x, float y, u32& both, u32& rest) {
    both = E::pack(x, y);
    if (EXACT) rest = E::pack(x - E::low(both), y - E::high(both));
}

// Pack weights of 16 vectors and 64 keys as MMA operand A.
template <class E, bool EXACT>
DEV void pack_all(const float (*s)[4], u32 (*p)[4], u32 (*rest)[4]) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int at = n % 2 * 2 + r;
            pack_weights<E, EXACT>(s[n][2 * r], s[n][2 * r + 1], p[n / 2][at], rest[n / 2][at]);
        }
}

// Add 64 weights per row to the softmax sums (an MMA with ones).
template <class E, bool EXACT>
DEV void accumulate_row_sum(float* row_sum, const u32 (*p)[4], const u32 (*rest)[4], const float* rescale) {
#pragma unroll
    for (int e = 0; e < 4; e++) row_sum[e] = __fmul_rn(row_sum[e], rescale[e / 2]);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        E::mma(row_sum, p[i], E::ONES, E::ONES);
        if (EXACT) E::mma(row_sum, rest[i], E::ONES, E::ONES);
    }
}

// Accumulate P V and the softmax sums: 16 vectors, 64 keys, columns 8 * (first + i * step) for i < TILES;
// V_STEP is the row stride of values in elements.
template <class E, int TILES, int D, int V_STEP, bool EXACT>
DEV void accumulate_pv(float (*o)[4], float* row_sum, const u32 (*p)[4], const u32 (*rest)[4],
                    const u16* v, int first, int step, const float* rescale) {
    const int lane = threadIdx.x & 31;
    accumulate_row_sum<E, EXACT>(row_sum, p, rest, rescale);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const int column = 8 * (first + n * step);
        if (column >= D) break;
#pragma unroll
        for (int e = 0; e < 4; e++) o[n][e] = __fmul_rn(o[n][e], rescale[e / 2]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 b[4];
            load_transposed(b, v + (32 * half + lane) * V_STEP + column);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                E::mma(o[n], p[2 * half + i], b[2 * i], b[2 * i + 1]);
                if (EXACT) E::mma(o[n], rest[2 * half + i], b[2 * i], b[2 * i + 1]);
            }
        }
    }
}

// Store two neighbouring columns of a result.
DEV void store_pair(u8* out, i64 element, int kind, float x, float y) {
    if (kind == F32) *(float2*)(out + 4 * element) = make_float2(x, y);
    else *(u32*)(out + 2 * element) = Half::pack(x, y);
}

// Write partial results, or final results and LSE, of a lane's two rows.
template <int TILES, int D>
DEV void write_rows(const Tile& t, int first_row, const RowState& rows, const float (*o)[4], int first,
                    int step, bool with_sums, u8* out, int out_kind, float* lse) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int m = first_row + lane / 4 + 8 * r;
        if (m >= t.n_vectors) continue;
        float* partial = nullptr;
        FinalScale end = {1, 0};
        if (t.item.partial >= 0)
            partial = partial_at(t.header, t.item.partial + t.first_vector + m, t.kv_head);
        else
            end = final_scale(t.header, rows.run_max[r], rows.run_sum[r], t.head(m));
        const i64 place = t.place(m);
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const int column = 8 * (first + n * step) + lane % 4 * 2;
            if (column >= D) break;
            const float x = o[n][2 * r], y = o[n][2 * r + 1];
            if (partial) *(float2*)(partial + column) = make_float2(x, y);
            else
                store_pair(out, place * D + column, out_kind, __fmul_rn(x, end.factor),
                           __fmul_rn(y, end.factor));
        }
        if (!with_sums || lane % 4) continue;
        if (partial) *(float2*)(partial + D) = make_float2(rows.run_max[r], rows.run_sum[r]);
        else if (lse != nullptr) lse[place] = end.lse;
    }
}
