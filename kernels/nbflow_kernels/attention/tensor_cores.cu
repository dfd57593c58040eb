// Attention on tensor cores (mma.m16n8k16), for caches of float16, bfloat16 and block formats.
//
// Two kernels do the same arithmetic on a query vector, in the same order, so a row's result has the
// same bits whichever takes it:
//   attend_few    up to 16 query vectors (decode): four warps share a chunk of 64 keys, each scores 16
//                 of them for all vectors, and adds the values of a quarter of the columns
//   attend_many   up to 64 query vectors (prefill): each warp has 16 of its own
// Keys and values of the next chunk come in (cp.async) while this one is worked on; those of block
// formats are decoded to float16 on the way.
//
// With EXACT, queries and weights are two numbers each, what 16 bits hold and what they leave: products
// are then those of float32 but for 2**-22 (2**-16 with bfloat16), at twice the multiplications.
#include "attention/fragments.cuh"
#include "attention/splits.cuh"

constexpr int KEYS = 64, WARPS = 4, THREADS = 32 * WARPS;
constexpr int PAD = 8;  // elements behind a row in shared memory: 16-byte units an odd step apart

// ---- keys and values of a chunk ----------------------------------------------------------------

template <class K, class V, int D_QK, int D_VO>
struct Cache {
    static constexpr int K_STEP = D_QK + PAD, V_STEP = D_VO + PAD;
    static constexpr int STAGE = KEYS * (K_STEP + V_STEP);  // elements of 16 bits

    const u8 *k, *v;
    Strides k_strides, v_strides;
    const int* pages;
    int page_size, first, end;
    i64 (*offsets)[2 * KEYS];  // in shared memory, of two chunks: of keys, then of values

    // Write where the rows of a chunk are, -1 for those outside the item.
    DEV_METHOD void find(int base, int number) const {
        const int slot = threadIdx.x % KEYS, j = base + slot;
        const i64 page = threadIdx.x < KEYS ? k_strides.page : v_strides.page;
        const i64 token = threadIdx.x < KEYS ? k_strides.token : v_strides.token;
        offsets[number & 1][threadIdx.x] = j >= first && j < end
            ? pages[j / page_size] * page + j % page_size * token
            : -1;
    }

    template <class F, int D>
    DEV_METHOD void copy(const u8* cache, const i64* rows, u16* to) const {
        constexpr int UNITS = D / 8;
        for (int i = threadIdx.x; i < KEYS * UNITS; i += THREADS) {
            const int slot = i / UNITS, d = i % UNITS * 8;
            const i64 offset = rows[slot];
            u16* target = to + slot * (D + PAD) + d;
            if constexpr (F::FLOAT) {
                copy_16(target, cache + (offset < 0 ? 0 : offset + 2 * d), offset >= 0);
            } else {
                u32 pairs[4] = {0, 0, 0, 0};
                if (offset >= 0)
                    for (int p = 0; p < 4; p++)
                        pairs[p] = Half::pack(load_number<F>(cache + offset, d + 2 * p),
                                              load_number<F>(cache + offset, d + 2 * p + 1));
                *(uint4*)target = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }

    DEV_METHOD void load_keys(int number, u16* to) const {
        copy<K, D_QK>(k, offsets[number & 1], to);
    }
    DEV_METHOD void load_values(int number, u16* to) const {
        copy<V, D_VO>(v, offsets[number & 1] + KEYS, to);
    }
    DEV_METHOD void load(int number, u16* stage) const {
        load_keys(number, stage);
        load_values(number, stage + KEYS * K_STEP);
    }
};

// ---- query vectors -----------------------------------------------------------------------------

struct Tile {
    const i64* header;
    Item item;
    int kv_head, group, first_vector, n_vectors;
    float cap;

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
    // Let `run_top` and `run_total` be those of the whole item.
    DEV_METHOD void finish(bool several, const float* total) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            run_top[r] = several ? run_top[r] : top[r];
            run_total[r] = several ? run_total[r] : total[2 * r];
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

// The weight of a score; exp drops what fmaxf dropped, a NaN or an infinity, times 0 it comes back.
DEV float weight(float score, float top) {
    return score == HIDDEN ? 0 : __fmaf_rn(score, 0.0f, exp_fast(score - top));
}

// Add weights times values, and times one for the sum of weights: 16 vectors, 64 keys, columns
// 8 * (first + i * step) for i < TILES that exist.
template <class E, int TILES, int D, bool EXACT>
DEV void add_values(float (*o)[4], float* total, const u32 (*p)[4], const u32 (*rest)[4],
                    const u16* v, int first, int step, const float* shrink) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int e = 0; e < 4; e++) total[e] = __fmul_rn(total[e], shrink[e / 2]);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        E::mma(total, p[i], E::ONES, E::ONES);
        if (EXACT) E::mma(total, rest[i], E::ONES, E::ONES);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const int column = 8 * (first + n * step);
        if (column >= D) break;
#pragma unroll
        for (int e = 0; e < 4; e++) o[n][e] = __fmul_rn(o[n][e], shrink[e / 2]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 b[4];
            load_transposed(b, v + (32 * half + lane) * (D + PAD) + column);
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

DEV bool start_tile(Tile& t, const i64* header, int most, float cap) {
    t.header = header;
    t.item = pointer<Item>(header, ITEMS)[blockIdx.x];
    t.kv_head = blockIdx.y;
    t.group = header[QO_HEADS] / header[KV_HEADS];
    t.first_vector = blockIdx.z * most;
    t.n_vectors = min(most, t.item.n_rows * t.group - t.first_vector);
    t.cap = cap;
    return t.n_vectors > 0;
}

template <class C>
DEV void start_cache(C& cache, const Tile& t, const u8* k, const u8* v, Strides ks, Strides vs) {
    cache.k = k + t.kv_head * ks.head;
    cache.v = v + t.kv_head * vs.head;
    cache.k_strides = ks;
    cache.v_strides = vs;
    cache.pages =
        pointer<int>(t.header, KV_INDICES) + pointer<int>(t.header, KV_INDPTR)[t.item.request];
    cache.page_size = t.header[PAGE_SIZE];
    cache.first = t.item.first_key;
    cache.end = t.item.end_key;
}

#define PARAMETERS                                                                               \
    const i64 *header, const u8 *queries, i64 q_row_bytes, int q_kind, const u8 *k, const u8 *v, \
        i64 k_page, i64 k_token, i64 k_head, i64 v_page, i64 v_token, i64 v_head, float cap,     \
        u8 *out, int out_kind, float *lse

// ---- up to 16 query vectors --------------------------------------------------------------------

template <class K, class V, int D_QK, int D_VO, bool EXACT>
__global__ void __launch_bounds__(THREADS) attend_few(PARAMETERS) {
    typedef typename ElementOf<K::KIND>::Type KE;  // of queries and keys
    typedef typename ElementOf<V::KIND>::Type VE;  // of weights and values
    typedef Cache<K, V, D_QK, D_VO> Keys;
    constexpr int M = 16, TILES = (D_VO / 8 + WARPS - 1) / WARPS, P_STEP = KEYS + PAD;
    constexpr int COPIES = EXACT ? 2 : 1;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ i64 offsets[2][2 * KEYS];
    __shared__ float tops[WARPS][M];
    u16* const stages = (u16*)memory;
    u16* const q = stages + 2 * Keys::STAGE;
    u16* const weights = q + COPIES * M * (D_QK + PAD);
    float* const room = (float*)(weights + COPIES * M * (KEYS + PAD));  // only where it is not plain

    Tile t;
    if (!start_tile(t, header, M, cap)) return;
    Keys cache;
    start_cache(cache, t, k, v, {k_page, k_token, k_head}, {v_page, v_token, v_head});
    cache.offsets = offsets;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int split = header[SPLIT_KEYS], first_base = t.item.first_key / KEYS * KEYS;
    const int n_chunks = (t.item.end_key - first_base + KEYS - 1) / KEYS;
    const bool several = t.item.end_key > (t.item.first_key / split + 1) * split;
    Rows rows;
    rows.start(t, 0);
    load_queries<KE, M, D_QK, EXACT>(t, queries, q_row_bytes, q_kind, q);
    float o[TILES][4], run[TILES][4], total[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < TILES; n++)
        for (int e = 0; e < 4; e++) o[n][e] = run[n][e] = 0;

    cache.find(first_base, 0);
    cache.find(first_base + KEYS, 1);
    __syncthreads();
    if (n_chunks > 0) cache.load(0, stages);
    for (int c = 0; c < n_chunks; c++) {
        const int base = first_base + c * KEYS;
        const u16* stage = stages + (c & 1) * Keys::STAGE;
        copies_done();
        __syncthreads();  // this chunk is there, the one before has been used
        if (c + 1 < n_chunks) cache.load(c + 1, stages + (c + 1 & 1) * Keys::STAGE);
        if (c + 2 < n_chunks) cache.find(base + 2 * KEYS, c + 2);
        float s[2][4];
        dot_products<KE, 1, M, D_QK, EXACT>(s, q, stage + 16 * warp * Keys::K_STEP);
        float most[2] = {HIDDEN, HIDDEN}, shrink[2];
        rows.finish_scores<2>(t, base + 16 * warp, s, room);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) most[e / 2] = fmaxf(most[e / 2], s[n][e]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            most[r] = quad_max(most[r]);
            if (lane % 4 == 0) tops[warp][lane / 4 + 8 * r] = most[r];
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = rows.top[r];
            for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w][lane / 4 + 8 * r]);
            shrink[r] = exp_fast(rows.top[r] - top);
            rows.top[r] = top;
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float x = weight(s[n][2 * r], rows.top[r]);
                const float y = weight(s[n][2 * r + 1], rows.top[r]);
                u16* to = weights + (lane / 4 + 8 * r) * P_STEP + 16 * warp + 8 * n + lane % 4 * 2;
                const u32 both = VE::pack(x, y);
                *(u32*)to = both;
                if (EXACT)
                    *(u32*)(to + M * P_STEP) = VE::pack(x - VE::low(both), y - VE::high(both));
            }
        __syncthreads();
        u32 p[KEYS / 16][4], rest[KEYS / 16][4];
        const u16* p_at = weights + lane % 16 * P_STEP + lane / 16 * 8;
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            load_matrices(p[i], p_at + 16 * i);
            if (EXACT) load_matrices(rest[i], p_at + M * P_STEP + 16 * i);
        }
        add_values<VE, TILES, D_VO, EXACT>(o, total, p, rest, stage + KEYS * Keys::K_STEP, warp,
                                          WARPS, shrink);
        if (several && (c + 1 == n_chunks || (base + KEYS) % split == 0)) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const Folded f = fold(rows.run_top[r], rows.run_total[r], rows.top[r], total[2 * r]);
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        run[n][e] = fold_column(f, run[n][e], o[n][e]);
                        o[n][e] = 0;
                    }
                rows.run_top[r] = f.top;
                rows.run_total[r] = f.total;
                rows.top[r] = HIDDEN;
                total[2 * r] = total[2 * r + 1] = 0;
            }
        }
    }
    if (several) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[n][e] = run[n][e];
    }
    rows.finish(several, total);
    write_rows<TILES, D_VO>(t, 0, rows, o, warp, WARPS, warp == 0, out, out_kind, lse);
    merge_if_last(header, t.item, t.first_vector, t.n_vectors, out, out_kind, lse);
}

// ---- up to 64 query vectors --------------------------------------------------------------------

template <class K, class V, int D_QK, int D_VO, bool EXACT>
__global__ void __launch_bounds__(THREADS) attend_many(PARAMETERS, int with_far) {
    typedef typename ElementOf<K::KIND>::Type KE;  // of queries and keys
    typedef typename ElementOf<V::KIND>::Type VE;  // of weights and values
    typedef Cache<K, V, D_QK, D_VO> Keys;
    constexpr int M = 16 * WARPS, TILES = D_VO / 8, COPIES = EXACT ? 2 : 1;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ i64 offsets[2][2 * KEYS];
    u16* const keys = (u16*)memory;
    u16* const values = keys + KEYS * Keys::K_STEP;
    u16* const q = values + KEYS * Keys::V_STEP;
    // Sums of the splits before, of each thread's own columns; then room for scores.
    float* const far = (float*)(q + COPIES * M * (D_QK + PAD)) + threadIdx.x;
    float* const room = far - threadIdx.x + (with_far ? 4 * TILES * THREADS : 0);

    Tile t;
    if (!start_tile(t, header, M, cap)) return;
    Keys cache;
    start_cache(cache, t, k, v, {k_page, k_token, k_head}, {v_page, v_token, v_head});
    cache.offsets = offsets;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int split = header[SPLIT_KEYS], first_base = t.item.first_key / KEYS * KEYS;
    const int n_chunks = (t.item.end_key - first_base + KEYS - 1) / KEYS;
    const bool several = t.item.end_key > (t.item.first_key / split + 1) * split;
    Rows rows;
    rows.start(t, 16 * warp);
    load_queries<KE, M, D_QK, EXACT>(t, queries, q_row_bytes, q_kind, q);
    const u16* const own = q + 16 * warp * (D_QK + PAD);
    float o[TILES][4], total[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            o[n][e] = 0;
            if (several) far[(4 * n + e) * THREADS] = 0;
        }

    cache.find(first_base, 0);
    __syncthreads();
    if (n_chunks > 0) cache.load_keys(0, keys);
    for (int c = 0; c < n_chunks; c++) {
        const int base = first_base + c * KEYS;
        copies_done();
        __syncthreads();  // the keys are there, the values of the chunk before have been used
        cache.load_values(c, values);
        if (c + 1 < n_chunks) cache.find(base + KEYS, c + 1);
        const bool sees = rows.any_sees(base);
        float s[KEYS / 8][4];
        if (sees) dot_products<KE, KEYS / 16, M, D_QK, EXACT>(s, own, keys);
        copies_done();
        __syncthreads();  // the values are there, the keys have been used
        if (c + 1 < n_chunks) cache.load_keys(c + 1, keys);
        if (sees) {
            float most[2] = {HIDDEN, HIDDEN}, shrink[2];
            rows.finish_scores<KEYS / 8>(t, base, s, room);
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) most[e / 2] = fmaxf(most[e / 2], s[n][e]);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float top = fmaxf(rows.top[r], quad_max(most[r]));
                shrink[r] = exp_fast(rows.top[r] - top);
                rows.top[r] = top;
            }
            u32 p[KEYS / 16][4], rest[KEYS / 16][4];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float x = weight(s[n][2 * r], rows.top[r]);
                    const float y = weight(s[n][2 * r + 1], rows.top[r]);
                    const u32 both = VE::pack(x, y);
                    p[n / 2][n % 2 * 2 + r] = both;
                    if (EXACT)
                        rest[n / 2][n % 2 * 2 + r] =
                            VE::pack(x - VE::low(both), y - VE::high(both));
                }
            add_values<VE, TILES, D_VO, EXACT>(o, total, p, rest, values, 0, 1, shrink);
        }
        if (several && (c + 1 == n_chunks || (base + KEYS) % split == 0)) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const Folded f = fold(rows.run_top[r], rows.run_total[r], rows.top[r], total[2 * r]);
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        float& before = far[(4 * n + e) * THREADS];
                        before = fold_column(f, before, o[n][e]);
                        o[n][e] = 0;
                    }
                rows.run_top[r] = f.top;
                rows.run_total[r] = f.total;
                rows.top[r] = HIDDEN;
                total[2 * r] = total[2 * r + 1] = 0;
            }
        }
    }
    if (several) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                o[n][e] = far[(4 * n + e) * THREADS];
    }
    rows.finish(several, total);
    write_rows<TILES, D_VO>(t, 16 * warp, rows, o, 0, 1, true, out, out_kind, lse);
    merge_if_last(header, t.item, t.first_vector, t.n_vectors, out, out_kind, lse);
}
