// Attention on tensor cores (mma.m16n8k16), for caches of float16, bfloat16 and block formats.
//
// Two kernels do the same arithmetic on a query vector, in the same order, so a row's result has the
// same bits whichever takes it:
//   attend_few    up to 16 query vectors (decode): four warps share a chunk of 64 keys, each scores 16
//                 of them for all vectors, and adds the values of a quarter of the columns
//   attend_many   up to 64 query vectors (prefill): each warp has 16 of its own
// Keys and values of the next chunks come in (cp.async) while this one is worked on, of two chunks in
// `attend_few`; those of block formats are decoded to float16 on the way.
//
// With EXACT, queries and weights are two numbers each, what 16 bits hold and what they leave: products
// are then those of float32 but for 2**-22 (2**-16 with bfloat16), at twice the multiplications.
#include "attention/cuda/prologue.cuh"

// ---- up to 16 query vectors --------------------------------------------------------------------

template <class K, class V, int D_QK, int D_VO, bool EXACT, bool ONE>
__global__ void __launch_bounds__(THREADS) attend_few(PARAMETERS) {
    typedef typename ElementOf<K::KIND>::Type KE;  // of queries and keys
    typedef typename ElementOf<V::KIND>::Type VE;  // of weights and values
    typedef Cache<K, V, D_QK, D_VO, ONE> Keys;
    constexpr int M = 16, TILES = (D_VO / 8 + WARPS - 1) / WARPS, P_STEP = KEYS + PAD;
    constexpr int COPIES = EXACT ? 2 : 1;
    constexpr bool FAR = TILES > 8;  // sums of the splits before do not fit the registers
    extern __shared__ __align__(16) u8 memory[];
    __shared__ const u8* rows_at[2][2 * KEYS];
    __shared__ float tops[WARPS][M];
    u16* const stages = (u16*)memory;
    u16* const q = stages + 2 * Keys::STAGE;
    u16* const weights = q + COPIES * M * (D_QK + PAD);
    float* const far = (float*)(weights + COPIES * M * (KEYS + PAD)) + threadIdx.x;

    const Work<Keys> w(header, k, v, {k_page, k_token, k_head}, {v_page, v_token, v_head}, cap, M, rows_at);
    const Tile& t = w.t;
    if (t.n_vectors <= 0) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    Rows rows;
    rows.start(t, 0);
    load_queries<KE, M, D_QK, EXACT>(t, queries, q_row_bytes, q_kind, q);
    float o[TILES][4] = {}, run[FAR ? 1 : TILES][4] = {}, total[4] = {};
    const auto before = [&](int n, int e) -> float& {
        return FAR ? far[(4 * n + e) * THREADS] : run[FAR ? 0 : n][e];
    };
    if (FAR && w.several)
        for (int i = 0; i < 4 * TILES; i++) far[i * THREADS] = 0;

    if (w.n_chunks > 0) w.cache.find(w.first_base, 0);
    if (w.n_chunks > 1) w.cache.find(w.first_base + KEYS, 1);
    __syncthreads();
    if (w.n_chunks > 0) w.cache.load(0, stages);
    if (w.n_chunks > 1) w.cache.load(1, stages + Keys::STAGE);
    for (int c = 0; c < w.n_chunks; c++) {
        const int base = w.first_base + c * KEYS;
        u16* const stage = stages + (c & 1) * Keys::STAGE;
        if (c + 1 < w.n_chunks) wait_for_copies<1>();
        else wait_for_copies<0>();
        __syncthreads();  // this chunk is there
        if (c + 2 < w.n_chunks) w.cache.find(base + 2 * KEYS, c + 2);
        float s[2][4], most[2], shrink[2];
        dot_products<KE, 1, M, D_QK, EXACT>(s, q, stage + 16 * warp * Keys::K_STEP);
        rows.finish_scores<2>(t, base + 16 * warp, s);
        greatest<2>(s, most);
        if (lane % 4 == 0)
            tops[warp][lane / 4] = most[0], tops[warp][lane / 4 + 8] = most[1];
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; r++)
            for (int other = 0; other < WARPS; other++)
                most[r] = fmaxf(most[r], tops[other][lane / 4 + 8 * r]);
        rows.raise(most, shrink);
        weigh<2>(s, rows.top);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                u16* to = weights + (lane / 4 + 8 * r) * P_STEP + 16 * warp + 8 * n + lane % 4 * 2;
                u32 rest;
                pack_weights<VE, EXACT>(s[n][2 * r], s[n][2 * r + 1], *(u32*)to, rest);
                if (EXACT) *(u32*)(to + M * P_STEP) = rest;
            }
        __syncthreads();
        u32 p[KEYS / 16][4], rest[KEYS / 16][4];
        const u16* p_at = weights + lane % 16 * P_STEP + lane / 16 * 8;
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            load_matrices(p[i], p_at + 16 * i);
            if (EXACT) load_matrices(rest[i], p_at + M * P_STEP + 16 * i);
        }
        add_values<VE, TILES, D_VO, Keys::V_STEP, EXACT>(
            o, total, p, rest, stage + Keys::VALUES_AT, warp, WARPS, shrink);
        if (c + 2 < w.n_chunks) {
            __syncthreads();  // it has been used, and where the one after the next lies is known
            w.cache.load(c + 2, stage);
        }
        if (w.ends_split(c)) rows.fold_split<TILES>(t, o, total, before);
    }
    rows.finish<TILES>(t, w.several, o, total, before);
    write_rows<TILES, D_VO>(t, 0, rows, o, warp, WARPS, warp == 0, out, out_kind, lse);
    merge_if_last<4>(header, t.item, t.first_vector, t.n_vectors, out, out_kind, lse);
}

// ---- up to 64 query vectors --------------------------------------------------------------------

template <class K, class V, int D_QK, int D_VO, bool EXACT>
__global__ void __launch_bounds__(THREADS) attend_many(PARAMETERS) {
    typedef typename ElementOf<K::KIND>::Type KE;  // of queries and keys
    typedef typename ElementOf<V::KIND>::Type VE;  // of weights and values
    typedef Cache<K, V, D_QK, D_VO> Keys;
    constexpr int M = 16 * WARPS, TILES = D_VO / 8, COPIES = EXACT ? 2 : 1;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ const u8* rows_at[2][2 * KEYS];
    u16* const keys = (u16*)memory;
    u16* const values = keys + KEYS * Keys::K_STEP;
    u16* const q = values + KEYS * Keys::V_STEP;
    // Sums of the splits before, of each thread's own columns.
    float* const far = (float*)(q + COPIES * M * (D_QK + PAD)) + threadIdx.x;

    const Work<Keys> w(header, k, v, {k_page, k_token, k_head}, {v_page, v_token, v_head}, cap, M, rows_at);
    const Tile& t = w.t;
    if (t.n_vectors <= 0) return;
    const int warp = threadIdx.x / 32;
    Rows rows;
    rows.start(t, 16 * warp);
    load_queries<KE, M, D_QK, EXACT>(t, queries, q_row_bytes, q_kind, q);
    const u16* const own = q + 16 * warp * (D_QK + PAD);
    float o[TILES][4] = {}, total[4] = {};
    const auto before = [&](int n, int e) -> float& { return far[(4 * n + e) * THREADS]; };
    if (w.several)
        for (int i = 0; i < 4 * TILES; i++) far[i * THREADS] = 0;

    if (w.n_chunks > 0) w.cache.find(w.first_base, 0);
    __syncthreads();
    if (w.n_chunks > 0) w.cache.load_keys(0, keys);
    for (int c = 0; c < w.n_chunks; c++) {
        const int base = w.first_base + c * KEYS;
        wait_for_copies<0>();
        __syncthreads();  // the keys are there, the values of the chunk before have been used
        w.cache.load_values(c, values);
        if (c + 1 < w.n_chunks) w.cache.find(base + KEYS, c + 1);
        const bool sees = rows.any_sees(base);
        float s[KEYS / 8][4];
        if (sees) dot_products<KE, KEYS / 16, M, D_QK, EXACT>(s, own, keys);
        wait_for_copies<0>();
        __syncthreads();  // the values are there, the keys have been used
        if (c + 1 < w.n_chunks) w.cache.load_keys(c + 1, keys);
        if (sees) {
            float most[2], shrink[2];
            rows.finish_scores<KEYS / 8>(t, base, s);
            greatest<KEYS / 8>(s, most);
            rows.raise(most, shrink);
            u32 p[KEYS / 16][4], rest[KEYS / 16][4];
            weigh<KEYS / 8>(s, rows.top);
            pack_all<VE, EXACT>(s, p, rest);
            add_values<VE, TILES, D_VO, Keys::V_STEP, EXACT>(
                o, total, p, rest, values, 0, 1, shrink);
        }
        if (w.ends_split(c)) rows.fold_split<TILES>(t, o, total, before);
    }
    rows.finish<TILES>(t, w.several, o, total, before);
    write_rows<TILES, D_VO>(t, 16 * warp, rows, o, 0, 1, true, out, out_kind, lse);
    merge_if_last<4>(header, t.item, t.first_vector, t.n_vectors, out, out_kind, lse);
}
