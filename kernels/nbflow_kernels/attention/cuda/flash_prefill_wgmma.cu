// FlashAttention for prefill by wgmma (Hopper, compute capability 9.0); head sizes in multiples of 64.
//
// Same arithmetic and order per query vector as `flash_prefill` of `flash_prefill_mma.cu`, so the same bits.
// A warpgroup owns 64 query vectors and keeps its softmax weights in registers as MMA operands; K/V tiles in
// swizzled shared memory serve all 64, and two warpgroups share them.  P V of a tile overlaps the softmax of
// the next one.
#include "attention/cuda/swizzled_smem.cuh"

// Double-buffered K/V tiles.  `next(c)` returns when keys of tile c + 1 and values of tile c have arrived, with
// keys of c + 2 and values of c + 1 in flight.  These overwrite keys of c and values of c - 1, so all threads
// must have consumed those.
template <class K, class V, int D_QK, int D_VO, int COPIERS>
struct KvPipeline {
    typedef KvTileLoader<K, V, D_QK, D_VO, false, 4> Keys;
    static constexpr int K_BYTES = KEYS * D_QK * 2, V_BYTES = KEYS * D_VO * 2, BYTES = 2 * (K_BYTES + V_BYTES);
    const Keys& loader;
    u8* const lines;
    const int first_base, n_chunks;
    SwizzledCopy<COPIERS> copies;

    DEV_METHOD KvPipeline(const Prologue<Keys>& w, u8* lines)
        : loader(w.loader), lines(lines), first_base(w.first_base), n_chunks(shared_by_warp(w.n_chunks)) {}
    DEV_METHOD u8* keys(u32 c) const { return lines + c % 2 * K_BYTES; }
    DEV_METHOD u8* values(u32 c) const { return lines + 2 * K_BYTES + c % 2 * V_BYTES; }
    DEV_METHOD void find(u32 c) const {
        if (c < n_chunks && threadIdx.x < 2 * KEYS) loader.find(first_base + c * KEYS, c);
    }
    DEV_METHOD void load_keys(u32 c) const {
        if (c < n_chunks) copies.template copy<K, D_QK>(loader.keys_of(c), keys(c));
    }
    DEV_METHOD void load_values(u32 c) const {
        if (c < n_chunks) copies.template copy<V, D_VO>(loader.values_of(c), values(c));
    }
    DEV_METHOD void start() const {
        for (u32 c = 0; c < 3; c++) find(c);
        __syncthreads();
        load_keys(0);
        end_copies();
        load_keys(1);
        load_values(0);
        end_copies();
        wait_for_copies<1>();
        publish_lines();
        __syncthreads();
    }
    DEV_METHOD void next(u32 c) const {
        wait_for_copies<0>();
        publish_lines();
        __syncthreads();
        load_keys(c + 2);
        load_values(c + 1);
        end_copies();
        find(c + 3);
    }
};

// Range of tiles with keys visible to any row of a warpgroup; `scratch` holds one pair per warp.  Warp
// reductions tell the compiler that the values are warp-uniform.
struct Chunks {
    u32 begin, end;

    DEV_METHOD Chunks(const RowState& rows, int first_base, int2* scratch) {
        const int low = __reduce_min_sync(~0u, min(rows.low[0], rows.low[1]));
        const int high = __reduce_max_sync(~0u, max(rows.high[0], rows.high[1]));
        if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = make_int2(low, high);
        __syncthreads();
        const int2 own = scratch[threadIdx.x / 128 * 4 + threadIdx.x % 4];
        const int first = __reduce_min_sync(~0u, own.x), last = __reduce_max_sync(~0u, own.y);
        begin = last > first ? shared_by_warp((first - first_base) / KEYS) : 0;
        end = last > first ? shared_by_warp((last - first_base + KEYS - 1) / KEYS) : 0;
    }
};

// Accumulators of earlier splits, for a thread's rows and columns.
template <int D, int COUNT, bool FAR>
struct EarlierSplits {
    float *first, *second;  // one per row

    DEV_METHOD EarlierSplits(const Tile& t, const RowState& rows, float* near, float* far) {
        const int column = (threadIdx.x & 3) * 2;
        first = FAR ? far + t.place(rows.vector(t, 0)) * D + column : near + threadIdx.x;
        second = FAR ? far + t.place(rows.vector(t, 1)) * D + column : first;
    }
    DEV_METHOD float& operator()(int n, int e) const {
        return (e < 2 ? first : second)[FAR ? 8 * n + e % 2 : (4 * n + e) * COUNT];
    }
};

// PLAIN: compiled without biases, caps and masks, which would spill registers.  Accumulators of earlier splits
// lie in shared memory for up to 128 value columns, else in global memory at `earlier` (shape of `out`).
template <class K, class V, int D_QK, int D_VO, bool EXACT, int WARPGROUPS, bool PLAIN>
__global__ void __launch_bounds__(128 * WARPGROUPS, 1) flash_prefill(PARAMETERS, float* earlier) {
    typedef typename ElementOf<K::KIND>::Type KE;  // of queries and keys
    typedef typename ElementOf<V::KIND>::Type VE;  // of weights and values
    constexpr int M = 64 * WARPGROUPS, TILES = D_VO / 8, COUNT = 128 * WARPGROUPS;
    constexpr bool FAR = D_VO > 128, KEPT = (EXACT ? 2 : 1) * D_QK <= 128;
    constexpr bool OVERLAP = !FAR || (PLAIN && !EXACT);  // otherwise registers spill
    typedef KvPipeline<K, V, D_QK, D_VO, COUNT> Lines;
    typedef Queries<KE, K::KIND, M, D_QK, EXACT, KEPT> Vectors;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ const u8* rows_at[4][2 * KEYS];
    __shared__ int2 seen[4 * WARPGROUPS];
    u8* const lines = memory + (-shared_address(memory) & 1023);
    u8* const query_lines = lines + Lines::BYTES;
    float* const near = (float*)(query_lines + Vectors::BYTES);

    const Prologue<typename Lines::Keys> w(header, k, v, {k_page, k_token, k_head}, {v_page, v_token, v_head},
                                       cap, M, rows_at);
    const Tile& t = w.t;
    if (t.n_vectors <= 0) return;
    const int warp = threadIdx.x / 32;
    RowState rows;
    rows.start(t, 16 * warp);
    Vectors::fill(t, queries, q_row_bytes, q_kind, query_lines);
    publish_lines();
    const Chunks chunks(rows, w.first_base, seen);
    const Lines ring(w, lines);
    ring.start();
    Vectors vectors;
    vectors.start(query_lines, shared_by_warp(warp / 4));
    float o[TILES * 4] = {}, row_sum[4] = {}, s[KEYS / 2], rescale[2];
    float (*const columns)[4] = (float (*)[4])o;
    float (*const scores)[4] = (float (*)[4])s;
    u32 p[KEYS / 16][4], rest[KEYS / 16][4];
    const auto before = [&]() { return EarlierSplits<D_VO, COUNT, FAR>(t, rows, near, earlier); };
    if (w.multi_split)
        for (int i = 0; i < 4 * TILES; i++)
            if (rows.exists(t, i / 2 % 2)) before()(i / 4, i % 4) = 0;
    // Softmax weights of tile c from its scores.
    const auto softmax_tile = [&](int c) {
        float most[2];
        rows.bias_and_mask<KEYS / 8, PLAIN>(t, w.first_base + c * KEYS, scores);
        tile_row_max<KEYS / 8>(scores, most);
        rows.raise(most, rescale);
        softmax_weights<KEYS / 8>(scores, rows.row_max);
    };
    const auto rescale_and_pack = [&]() {
        pack_all<VE, EXACT>(scores, p, rest);
        accumulate_row_sum<VE, EXACT>(row_sum, p, rest, rescale);
#pragma unroll
        for (int i = 0; i < 4 * TILES; i++) o[i] = __fmul_rn(o[i], rescale[i / 2 % 2]);
    };

    u32 c = 0;
    while (c < chunks.begin) ring.next(c++);
    while (c < chunks.end) {  // one split per iteration
        const u32 stop = min(chunks.end, shared_by_warp(w.split_end(c)));
        vectors.score(s, ring.keys(c));
        wait_for_products();
        hold(s);
        softmax_tile(c);
        rescale_and_pack();
        for (c++; c < stop; c++) {
            ring.next(c - 1);
            if (OVERLAP) vectors.score(s, ring.keys(c));
            accumulate_pv_wgmma<V::KIND, D_VO, EXACT>(o, p, rest, ring.values(c - 1));
            wait_for_products<OVERLAP ? 1 : 0>();
            if (!OVERLAP) {
                hold(o);
                vectors.score(s, ring.keys(c));
                wait_for_products();
            }
            hold(s);
            softmax_tile(c);
            if (OVERLAP) {
                hold(s);
                stay_in_front();
                wait_for_products();
                hold(o);
            }
            rescale_and_pack();
        }
        ring.next(c - 1);
        accumulate_pv_wgmma<V::KIND, D_VO, EXACT>(o, p, rest, ring.values(c - 1));
        wait_for_products();
        hold(o);
        if (w.multi_split) rows.merge_split<TILES>(t, columns, row_sum, before());
    }
    while (c < ring.n_chunks) ring.next(c++);
    rows.final_scale<TILES>(t, w.multi_split, columns, row_sum, before());
    write_rows<TILES, D_VO>(t, 16 * warp, rows, columns, 0, 1, true, out, out_kind, lse);
    merge_if_last<4>(header, t.item, t.first_vector, t.n_vectors, out, out_kind, lse);
}
