// FlashAttention for prefill by mma.m16n8k16: up to 64 query vectors, 16 per warp.
//
// Caches of float16, bfloat16 and block formats (decoded to float16).  Keys of the next tile and values of
// this one load (cp.async) while scores are computed.  EXACT and the order of additions are those of
// `flash_decode` (`flash_decode_mma.cu`).
#include "attention/cuda/prologue.cuh"

template <class K, class V, int D_QK, int D_VO, bool EXACT>
__global__ void __launch_bounds__(THREADS) flash_prefill(PARAMETERS) {
    typedef typename ElementOf<K::KIND>::Type KE;  // of queries and keys
    typedef typename ElementOf<V::KIND>::Type VE;  // of weights and values
    typedef KvTileLoader<K, V, D_QK, D_VO> Keys;
    constexpr int M = 16 * WARPS, TILES = D_VO / 8, COPIES = EXACT ? 2 : 1;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ const u8* rows_at[2][2 * KEYS];
    u16* const keys = (u16*)memory;
    u16* const values = keys + KEYS * Keys::K_STEP;
    u16* const q = values + KEYS * Keys::V_STEP;
    // Accumulators of earlier splits, per thread.
    float* const far = (float*)(q + COPIES * M * (D_QK + PAD)) + threadIdx.x;

    const Prologue<Keys> w(header, k, v, {k_page, k_token, k_head}, {v_page, v_token, v_head}, cap, M, rows_at);
    const Tile& t = w.t;
    if (t.n_vectors <= 0) return;
    const int warp = threadIdx.x / 32;
    RowState rows;
    rows.start(t, 16 * warp);
    load_queries<KE, M, D_QK, EXACT>(t, queries, q_row_bytes, q_kind, q);
    const u16* const own = q + 16 * warp * (D_QK + PAD);
    float o[TILES][4] = {}, row_sum[4] = {};
    const auto before = [&](int n, int e) -> float& { return far[(4 * n + e) * THREADS]; };
    if (w.multi_split)
        for (int i = 0; i < 4 * TILES; i++) far[i * THREADS] = 0;

    if (w.n_chunks > 0) w.loader.find(w.first_base, 0);
    __syncthreads();
    if (w.n_chunks > 0) w.loader.load_keys(0, keys);
    for (int c = 0; c < w.n_chunks; c++) {
        const int base = w.first_base + c * KEYS;
        wait_for_copies<0>();
        __syncthreads();  // keys have arrived, values of the previous tile are consumed
        w.loader.load_values(c, values);
        if (c + 1 < w.n_chunks) w.loader.find(base + KEYS, c + 1);
        const bool sees = rows.any_visible(base);
        float s[KEYS / 8][4];
        if (sees) qk_scores<KE, KEYS / 16, M, D_QK, EXACT>(s, own, keys);
        wait_for_copies<0>();
        __syncthreads();  // values have arrived, keys are consumed
        if (c + 1 < w.n_chunks) w.loader.load_keys(c + 1, keys);
        if (sees) {
            float most[2], rescale[2];
            rows.bias_and_mask<KEYS / 8>(t, base, s);
            tile_row_max<KEYS / 8>(s, most);
            rows.raise(most, rescale);
            u32 p[KEYS / 16][4], rest[KEYS / 16][4];
            softmax_weights<KEYS / 8>(s, rows.row_max);
            pack_all<VE, EXACT>(s, p, rest);
            accumulate_pv<VE, TILES, D_VO, Keys::V_STEP, EXACT>(
                o, row_sum, p, rest, values, 0, 1, rescale);
        }
        if (w.ends_split(c)) rows.merge_split<TILES>(t, o, row_sum, before);
    }
    rows.final_scale<TILES>(t, w.multi_split, o, row_sum, before);
    write_rows<TILES, D_VO>(t, 16 * warp, rows, o, 0, 1, true, out, out_kind, lse);
    merge_if_last<4>(header, t.item, t.first_vector, t.n_vectors, out, out_kind, lse);
}
