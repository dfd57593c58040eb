// FlashAttention for decode by mma.m16n8k16: up to 16 query vectors (query rows x heads of a GQA group).
//
// Caches of float16, bfloat16 and block formats (decoded to float16).  Four warps share a tile of 64 keys:
// each scores 16 of them for all vectors and accumulates a quarter of the value columns.  K/V tiles are
// double-buffered in shared memory (cp.async).
//
// The arithmetic per query vector and its order are those of `flash_prefill`, so both give the same bits.
//
// EXACT splits queries and weights into a 16-bit number and a 16-bit remainder: products are off by 2**-22
// (2**-16 with bfloat16) at twice the MMA instructions.
#include "attention/cuda/prologue.cuh"

template <class K, class V, int D_QK, int D_VO, bool EXACT, bool V_IN_K>
__global__ void __launch_bounds__(THREADS) flash_decode(PARAMETERS) {
    typedef typename ElementOf<K::KIND>::Type KE;  // of queries and keys
    typedef typename ElementOf<V::KIND>::Type VE;  // of weights and values
    typedef KvTileLoader<K, V, D_QK, D_VO, V_IN_K> Keys;
    constexpr int M = 16, TILES = (D_VO / 8 + WARPS - 1) / WARPS, P_STEP = KEYS + PAD;
    constexpr int COPIES = EXACT ? 2 : 1;
    constexpr bool FAR = TILES > 8;  // accumulators of earlier splits exceed the register file
    extern __shared__ __align__(16) u8 memory[];
    __shared__ const u8* rows_at[2][2 * KEYS];
    __shared__ float row_maxes[WARPS][M];
    u16* const stages = (u16*)memory;
    u16* const q = stages + 2 * Keys::STAGE;
    u16* const weights = q + COPIES * M * (D_QK + PAD);
    float* const far = (float*)(weights + COPIES * M * (KEYS + PAD)) + threadIdx.x;

    const Prologue<Keys> w(header, k, v, {k_page, k_token, k_head}, {v_page, v_token, v_head}, cap, M, rows_at);
    const Tile& t = w.t;
    if (t.n_vectors <= 0) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    RowState rows;
    rows.start(t, 0);
    load_queries<KE, M, D_QK, EXACT>(t, queries, q_row_bytes, q_kind, q);
    float o[TILES][4] = {}, run[FAR ? 1 : TILES][4] = {}, row_sum[4] = {};
    const auto before = [&](int n, int e) -> float& {
        return FAR ? far[(4 * n + e) * THREADS] : run[FAR ? 0 : n][e];
    };
    if (FAR && w.multi_split)
        for (int i = 0; i < 4 * TILES; i++) far[i * THREADS] = 0;

    if (w.n_chunks > 0) w.loader.find(w.first_base, 0);
    if (w.n_chunks > 1) w.loader.find(w.first_base + KEYS, 1);
    __syncthreads();
    if (w.n_chunks > 0) w.loader.load(0, stages);
    if (w.n_chunks > 1) w.loader.load(1, stages + Keys::STAGE);
    for (int c = 0; c < w.n_chunks; c++) {
        const int base = w.first_base + c * KEYS;
        u16* const stage = stages + (c & 1) * Keys::STAGE;
        if (c + 1 < w.n_chunks) wait_for_copies<1>();
        else wait_for_copies<0>();
        __syncthreads();  // tile c has arrived
        if (c + 2 < w.n_chunks) w.loader.find(base + 2 * KEYS, c + 2);
        float s[2][4], most[2], rescale[2];
        qk_scores<KE, 1, M, D_QK, EXACT>(s, q, stage + 16 * warp * Keys::K_STEP);
        rows.bias_and_mask<2>(t, base + 16 * warp, s);
        tile_row_max<2>(s, most);
        if (lane % 4 == 0)
            row_maxes[warp][lane / 4] = most[0], row_maxes[warp][lane / 4 + 8] = most[1];
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; r++)
            for (int other = 0; other < WARPS; other++)
                most[r] = fmaxf(most[r], row_maxes[other][lane / 4 + 8 * r]);
        rows.raise(most, rescale);
        softmax_weights<2>(s, rows.row_max);
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
        accumulate_pv<VE, TILES, D_VO, Keys::V_STEP, EXACT>(
            o, row_sum, p, rest, stage + Keys::VALUES_AT, warp, WARPS, rescale);
        if (c + 2 < w.n_chunks) {
            __syncthreads();  // tile c is consumed; row addresses of tile c + 2 are written
            w.loader.load(c + 2, stage);
        }
        if (w.ends_split(c)) rows.merge_split<TILES>(t, o, row_sum, before);
    }
    rows.final_scale<TILES>(t, w.multi_split, o, row_sum, before);
    write_rows<TILES, D_VO>(t, 0, rows, o, warp, WARPS, warp == 0, out, out_kind, lse);
    merge_if_last<4>(header, t.item, t.first_vector, t.n_vectors, out, out_kind, lse);
}
