// Query vectors on tensor cores: their scores of a chunk of keys, weights, and sums of values.
#pragma once
#include "attention/chunks.cuh"

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

// Queries times their factors as 16-bit numbers, with EXACT the rest behind them; zeros for vectors
// that do not exist.
template <class E, int M, int D, bool EXACT>
DEV void load_queries(const Tile& t, const u8* queries, i64 row_bytes, int kind, u16* q) {
    const int size = kind == F32 ? 4 : 2;
    for (int i = threadIdx.x; i < M * (D / 2); i += THREADS) {
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
        const u32 both = E::pack(x, y);
        *(u32*)(q + m * (D + PAD) + d) = both;
        if (EXACT)
            *(u32*)(q + (M + m) * (D + PAD) + d) = E::pack(x - E::low(both), y - E::high(both));
    }
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
    Seen seen[2];
    int low[2], high[2];  // the keys of the item that a row sees
    int head[2], here[2];
    float top[2], run_top[2], run_total[2];
    bool plain;  // no bias, cap or mask: scores stay as they are, visible keys are a range

    DEV_METHOD void start(const Tile& t, int first) {
        const int g = (threadIdx.x & 31) / 4;
        plain = !t.header[SLOPES] && !t.header[BIAS] && !t.header[MASK] && t.cap == 0;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int m = first + g + 8 * r;
            seen[r] = {0, 0, 0};
            head[r] = here[r] = 0;
            if (m < t.n_vectors) {
                seen[r] = seen_by(t.header, t.item, t.row(m));
                head[r] = t.head(m);
                here[r] = t.item.position + t.row(m);
            }
            low[r] = max(seen[r].low, t.item.first_key);
            high[r] = min(seen[r].high, t.item.end_key);
            top[r] = run_top[r] = HIDDEN;
            run_total[r] = 0;
        }
    }
    // Finish the scores of 8 * N keys from `base` on: HIDDEN for what a row does not see.  Biases,
    // caps and masks are rare, and would fill the registers if they were unrolled: those scores go
    // through `room`, 4 * N numbers apart by THREADS.
    template <int N>
    DEV_METHOD void finish_scores(const Tile& t, int base, float (*s)[4], float* room) const {
        const int column = base + (threadIdx.x & 3) * 2;
        if (!plain) {
#pragma unroll
            for (int i = 0; i < 4 * N; i++) room[i * THREADS + threadIdx.x] = s[i / 4][i % 4];
#pragma unroll 1
            for (int i = 0; i < 4 * N; i++) {
                const bool second = i & 2;
                const int j = column + i / 4 * 8 + (i & 1);
                const int first = second ? low[1] : low[0], last = second ? high[1] : high[0];
                const i64 mask = second ? seen[1].mask : seen[0].mask;
                float& x = room[i * THREADS + threadIdx.x];
                if (j < first || j >= last) continue;
                if (t.header[MASK] && !mask_shows(t.header, mask + j)) x = HIDDEN;
                else x = final_score(t.header, x, j - (second ? here[1] : here[0]),
                                     second ? head[1] : head[0], t.cap);
            }
#pragma unroll
            for (int i = 0; i < 4 * N; i++) s[i / 4][i % 4] = room[i * THREADS + threadIdx.x];
        }
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            const int r = i / 2 % 2, j = column + i / 4 * 8 + i % 2;
            if (j < low[r] || j >= high[r]) s[i / 4][i % 4] = HIDDEN;
        }
    }
    // Let `most` be among the greatest scores so far; `shrink`: what sums are multiplied with.
    DEV_METHOD void raise(const float most[2], float shrink[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float before = top[r];
            top[r] = fmaxf(before, most[r]);
            shrink[r] = exp_fast(before - top[r]);
        }
    }
    // Add a split's sums to those of the splits before it, `before(n, e)`, and let them start anew.
    template <int TILES, class Before>
    DEV_METHOD void fold_split(float (*o)[4], float* total, Before before) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
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
    DEV_METHOD void finish(bool several, float (*o)[4], const float* total, Before before) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            run_top[r] = several ? run_top[r] : top[r];
            run_total[r] = several ? run_total[r] : total[2 * r];
        }
        if (!several) return;
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[n][e] = before(n, e);
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

// The weight of a score; exp drops what fmaxf dropped, a NaN or an infinity, times 0 it comes back.
DEV float weight(float score, float top) {
    return score == HIDDEN ? 0 : __fmaf_rn(score, 0.0f, exp_fast(score - top));
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

// Weights of two neighbouring scores as 16-bit numbers, and with EXACT what these leave.
template <class E, bool EXACT>
DEV void weigh(float first, float second, float top, u32& both, u32& rest) {
    const float x = weight(first, top), y = weight(second, top);
    both = E::pack(x, y);
    if (EXACT) rest = E::pack(x - E::low(both), y - E::high(both));
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
