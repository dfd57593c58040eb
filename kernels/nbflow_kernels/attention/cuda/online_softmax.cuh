// Query vectors on tensor cores: their scores of a chunk of keys, weights, and sums of values.
#pragma once
#include "attention/cuda/kv_tile_loader.cuh"

// Up to `most` query vectors of the thread block's item and key/value head.
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

// Queries times their factors as 16-bit numbers, with EXACT the rest in a second copy; zeros for
// vectors that do not exist.  `place(copy, vector, column)` is where two columns go.
template <class E, int M, int D, bool EXACT, class Place>
DEV void load_queries(const Tile& t, const u8* queries, i64 row_bytes, int kind, Place place) {
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
        else  // what 16 bits do not hold is NaN, as with the rest: an infinity could hide in a weight of 0
            both = E::pack(E::low(both) + 0 * E::low(both), E::high(both) + 0 * E::high(both));
        *place(0, m, d) = both;
    }
}

// The same in rows for `dot_products`.
template <class E, int M, int D, bool EXACT>
DEV void load_queries(const Tile& t, const u8* queries, i64 row_bytes, int kind, u16* q) {
    const auto place = [&](int copy, int m, int d) { return (u32*)(q + (copy * M + m) * (D + PAD) + d); };
    load_queries<E, M, D, EXACT>(t, queries, row_bytes, kind, place);
}

// Scores of 16 query vectors and 16 * GROUPS keys, in mma's order.
template <class E, int GROUPS, int M, int D, bool EXACT>
DEV void dot_products(float (*s)[4], const u16* q, const u16* k) {
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

// What the two rows of a lane (g and g + 8 of 16) see, and what they have summed up.
struct Rows {
    int first_vector;     // of the warp's 16
    int low[2], high[2];  // the keys of the item that a row sees
    float top[2], run_top[2], run_total[2];  // tops are exponents of two, see `top_of`
    bool plain;  // no bias, cap or mask: scores stay as they are, visible keys are a range

    // Begin with vectors [first_vector, first_vector + 16).  Those behind the last one see what it
    // sees, so that they hide nothing; if all are, they see nothing.
    DEV_METHOD void start(const Tile& t, int first_of_16) {
        first_vector = first_of_16;
        plain = !t.header[SLOPES] && !t.header[BIAS] && !t.header[MASK] && t.cap == 0;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const Seen seen = seen_by(t.header, t.item, t.row(vector(t, r)));
            low[r] = max(seen.low, t.item.first_key);
            high[r] = first_vector < t.n_vectors ? min(seen.high, t.item.end_key) : 0;
            top[r] = run_top[r] = HIDDEN;
            run_total[r] = 0;
        }
    }
    DEV_METHOD bool exists(const Tile& t, int r) const {
        return first_vector + (int)(threadIdx.x & 31) / 4 + 8 * r < t.n_vectors;
    }
    // The vector of row r, or the last one.
    DEV_METHOD int vector(const Tile& t, int r) const {
        return min(first_vector + (int)(threadIdx.x & 31) / 4 + 8 * r, t.n_vectors - 1);
    }
    // Finish the scores of 8 * N keys from `base` on: HIDDEN for what a row does not see, which is
    // nothing but at the borders of what the rows see.
    // ALWAYS_PLAIN: there are no biases, caps and masks, and no code for them.
    template <int N, bool ALWAYS_PLAIN = false>
    DEV_METHOD void finish_scores(const Tile& t, int base, float (*s)[4]) const {
        if (!ALWAYS_PLAIN && !plain) change_scores<N>(t, base, s);
        const bool sees_all = max(low[0], low[1]) <= base && min(high[0], high[1]) >= base + 8 * N;
        if (__all_sync(~0u, sees_all)) return;
        const int column = base + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            const int r = i / 2 % 2, j = column + i / 4 * 8 + i % 2;
            if (j < low[r] || j >= high[r]) s[i / 4][i % 4] = HIDDEN;
        }
    }
    // Apply biases, caps and masks to 8 * N scores; a row's place is found again, as this is rare.
    template <int N>
    DEV_METHOD void change_scores(const Tile& t, int base, float (*s)[4]) const {
        const int column = base + (threadIdx.x & 3) * 2;
        const int rows[2] = {t.row(vector(t, 0)), t.row(vector(t, 1))};
        if (t.header[SLOPES] || t.header[BIAS] || t.cap > 0) {
            const int heads[2] = {t.head(vector(t, 0)), t.head(vector(t, 1))};
            for_each_score<N>(s, [&](float& x, int i, int r) {
                x = final_score(t.header, x, column + i - (t.item.position + rows[r]), heads[r], t.cap);
            });
        }
        if (!t.header[MASK]) return;
        const i64 masks[2] = {seen_by(t.header, t.item, rows[0]).mask, seen_by(t.header, t.item, rows[1]).mask};
        for_each_score<N>(s, [&](float& x, int i, int r) {
            const int j = column + i;
            if (j >= low[r] && j < high[r] && !mask_shows(t.header, masks[r] + j)) x = HIDDEN;
        });
    }
    // Call `change(score, column, row)`.  Unrolled, it would fill the registers, so scores pass through
    // the first four: each round handles those and turns the others on by four.
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
    // Let `most` be among the greatest scores so far; `shrink`: what sums are multiplied with.
    DEV_METHOD void raise(const float most[2], float shrink[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float before = top[r];
            top[r] = fmaxf(before, top_of(most[r]));
            shrink[r] = exp2_fast(before - top[r]);
        }
    }
    // Add a split's sums to those of the splits before it, `before(n, e)`, and let them start anew.
    template <int TILES, class Before>
    DEV_METHOD void fold_split(const Tile& t, float (*o)[4], float* total, Before before) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (!exists(t, r)) continue;
            const Folded f = fold(run_top[r], run_total[r], top[r], total[2 * r]);
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    before(n, e) = fold_column(f, before(n, e), o[n][e]);
                    o[n][e] = 0;
                }
            run_top[r] = f.top;
            run_total[r] = f.total;
            top[r] = HIDDEN;
            total[2 * r] = total[2 * r + 1] = 0;
        }
    }
    // Let `run_top` and `run_total` be those of the whole item, and `o` its sums.
    template <int TILES, class Before>
    DEV_METHOD void finish(const Tile& t, bool several, float (*o)[4], const float* total, Before before) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            run_top[r] = several ? run_top[r] : top[r];
            run_total[r] = several ? run_total[r] : total[2 * r];
        }
        if (!several) return;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (!exists(t, r)) continue;
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) o[n][e] = before(n, e);
        }
    }
    // Whether any row of the warp's 16 sees a key of [base, base + KEYS).
    DEV_METHOD bool any_sees(int base) const {
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

// The greatest of a row's scores in its four lanes, of the two rows of a lane.
template <int N>
DEV void greatest(const float (*s)[4], float most[2]) {
    most[0] = most[1] = HIDDEN;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) most[e / 2] = fmaxf(most[e / 2], s[n][e]);
    most[0] = quad_max(most[0]), most[1] = quad_max(most[1]);
}

// Scores of 8 * N keys become weights.
template <int N>
DEV void weigh(float (*s)[4], const float* top) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) s[i / 4][i % 4] = weight(s[i / 4][i % 4], top[i / 2 % 2]);
}

// Two neighbouring weights as 16-bit numbers, and with EXACT what these leave.
template <class E, bool EXACT>
DEV void pack_weights(float x, float y, u32& both, u32& rest) {
    both = E::pack(x, y);
    if (EXACT) rest = E::pack(x - E::low(both), y - E::high(both));
}

// Those of 16 vectors and 64 keys, in the order of a first operand.
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

// Add weights times one: the sums of 64 keys' weights.
template <class E, bool EXACT>
DEV void add_weights(float* total, const u32 (*p)[4], const u32 (*rest)[4], const float* shrink) {
#pragma unroll
    for (int e = 0; e < 4; e++) total[e] = __fmul_rn(total[e], shrink[e / 2]);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        E::mma(total, p[i], E::ONES, E::ONES);
        if (EXACT) E::mma(total, rest[i], E::ONES, E::ONES);
    }
}

// Add weights times values, and times one for the sum of weights: 16 vectors, 64 keys, columns
// 8 * (first + i * step) for i < TILES that exist; V_STEP elements from value to value.
template <class E, int TILES, int D, int V_STEP, bool EXACT>
DEV void add_values(float (*o)[4], float* total, const u32 (*p)[4], const u32 (*rest)[4],
                    const u16* v, int first, int step, const float* shrink) {
    const int lane = threadIdx.x & 31;
    add_weights<E, EXACT>(total, p, rest, shrink);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const int column = 8 * (first + n * step);
        if (column >= D) break;
#pragma unroll
        for (int e = 0; e < 4; e++) o[n][e] = __fmul_rn(o[n][e], shrink[e / 2]);
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

// Two neighbouring columns of a result.
DEV void store_pair(u8* out, i64 element, int kind, float x, float y) {
    if (kind == F32) *(float2*)(out + 4 * element) = make_float2(x, y);
    else *(u32*)(out + 2 * element) = Half::pack(x, y);
}

// Write the sums of a lane's two rows: partial results, or results and LSE.
template <int TILES, int D>
DEV void write_rows(const Tile& t, int first_row, const Rows& rows, const float (*o)[4], int first,
                    int step, bool with_sums, u8* out, int out_kind, float* lse) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int m = first_row + lane / 4 + 8 * r;
        if (m >= t.n_vectors) continue;
        float* partial = nullptr;
        Finish end = {1, 0};
        if (t.item.partial >= 0)
            partial = partial_at(t.header, t.item.partial + t.first_vector + m, t.kv_head);
        else
            end = finish(t.header, rows.run_top[r], rows.run_total[r], t.head(m));
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
        if (partial) *(float2*)(partial + D) = make_float2(rows.run_top[r], rows.run_total[r]);
        else if (lse != nullptr) lse[place] = end.lse;
    }
}
