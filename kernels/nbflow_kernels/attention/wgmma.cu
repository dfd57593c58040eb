// Attention of many query vectors by `wgmma` (compute capability 9.0), for columns in whole 64.
//
// The twin of `attend_many` in `tensor_cores.cu`, with the same arithmetic in the same order: 64 query
// vectors are a warpgroup's rows.  Queries are operands in registers for all keys, weights become such
// where they are, and keys and values are read from shared memory once for all 64 vectors, which is what
// bounds `mma.sync`: there each warp reads them for 16.
#include "attention/work.cuh"
#include "cuda/hopper.cuh"

constexpr int LINE = 128, BLOCK = KEYS * LINE;  // bytes of 64 columns of a key, and of all keys of a chunk

// Copy a chunk's rows, or decode them, to lines as `describe_lines` says.
template <class F, int D>
DEV void copy_lines(const u8* const* from, u8* to) {
    constexpr int PIECES = D / 8, ROUNDS = KEYS * PIECES / THREADS;
#pragma unroll (F::FLOAT ? ROUNDS : 2)
    for (int n = 0; n < ROUNDS; n++) {
        const int slot = (n * THREADS + threadIdx.x) / PIECES, piece = (n * THREADS + threadIdx.x) % PIECES;
        u8* const target = to + piece / 8 * BLOCK + slot * LINE + 16 * ((piece ^ slot) & 7);
        if constexpr (F::FLOAT) {
            copy_16(shared_address(target), from[slot] + 16 * piece);
        } else {
            u32 pairs[4];
            for (int p = 0; p < 4; p++)
                pairs[p] = Half::pack(load_number<F>(from[slot], 8 * piece + 2 * p),
                                      load_number<F>(from[slot], 8 * piece + 2 * p + 1));
            *(uint4*)target = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
    end_copies();
}

template <class K, class V, int D_QK, int D_VO, bool EXACT>
__global__ void __launch_bounds__(THREADS) attend_many(PARAMETERS, int with_far) {
    typedef typename ElementOf<K::KIND>::Type KE;  // of queries and keys
    typedef typename ElementOf<V::KIND>::Type VE;  // of weights and values
    typedef Product<K::KIND == BF16 ? BF16_KIND : F16_KIND, KEYS> Scores;
    typedef Product<V::KIND == BF16 ? BF16_KIND : F16_KIND, D_VO, true> Sums;
    constexpr int M = 16 * WARPS, TILES = D_VO / 8, COPIES = EXACT ? 2 : 1, Q_STEP = D_QK + PAD;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ const u8* rows_at[2][2 * KEYS];
    u8* const keys = memory + (-shared_address(memory) & 1023);
    u8* const values = keys + D_QK / 64 * BLOCK;
    u16* const q = (u16*)(values + D_VO / 64 * BLOCK);
    // Sums of the splits before, of each thread's own columns; then room for scores.
    float* const far = (float*)(q + COPIES * M * Q_STEP) + threadIdx.x;
    float* const room = far - threadIdx.x + (with_far ? 4 * TILES * THREADS : 0);

    const Work<Cache<K, V, D_QK, D_VO>> w(header, k, v, {k_page, k_token, k_head},
                                          {v_page, v_token, v_head}, cap, M, rows_at);
    const Tile& t = w.t;
    if (t.n_vectors <= 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    Rows rows;
    rows.start(t, 16 * warp);
    load_queries<KE, M, D_QK, EXACT>(t, queries, q_row_bytes, q_kind, q);
    if (w.n_chunks > 0) w.cache.find(w.first_base, 0);
    __syncthreads();
    u32 query[D_QK / 16][4], query_rest[D_QK / 16][4];
#pragma unroll
    for (int i = 0; i < D_QK / 16; i++) {
        const u16* at = q + (16 * warp + lane % 16) * Q_STEP + lane / 16 * 8 + 16 * i;
        load_matrices(query[i], at);
        if (EXACT) load_matrices(query_rest[i], at + M * Q_STEP);
    }
    float o[TILES * 4] = {}, total[4] = {};
    float (*const columns)[4] = (float (*)[4])o;
    const auto before = [&](int n, int e) -> float& { return far[(4 * n + e) * THREADS]; };
    if (w.several)
        for (int i = 0; i < 4 * TILES; i++) far[i * THREADS] = 0;

    if (w.n_chunks > 0) copy_lines<K, D_QK>(rows_at[0], keys);
    for (int c = 0; c < w.n_chunks; c++) {
        const int base = w.first_base + c * KEYS;
        wait_for_copies<0>();
        publish_lines();
        // the keys are there, the values of the chunk before have been used
        const bool sees = __syncthreads_or(rows.any_sees(base));
        copy_lines<V, D_VO>(rows_at[c & 1] + KEYS, values);
        if (c + 1 < w.n_chunks) w.cache.find(base + KEYS, c + 1);
        float s[KEYS / 2] = {};
        if (sees) {
            hold(s);
            start_products();
#pragma unroll
            for (int i = 0; i < D_QK / 16; i++) {
                const u64 lines = describe_lines(shared_address(keys) + i / 4 * BLOCK + i % 4 * 32);
                if (EXACT) Scores::run(s, query_rest[i], lines, i > 0);
                Scores::run(s, query[i], lines, EXACT || i > 0);
            }
            end_products();
            wait_for_products();
            hold(s);
        }
        wait_for_copies<0>();
        publish_lines();
        __syncthreads();  // the values are there, the keys have been used
        if (c + 1 < w.n_chunks) copy_lines<K, D_QK>(rows_at[c + 1 & 1], keys);
        if (sees) {
            float most[2], shrink[2];
            float (*const scores)[4] = (float (*)[4])s;
            rows.finish_scores<KEYS / 8>(t, base, scores, room);
            greatest<KEYS / 8>(scores, most);
            rows.raise(most, shrink);
            u32 p[KEYS / 16][4], rest[KEYS / 16][4];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int at = n % 2 * 2 + r;
                    weigh<VE, EXACT>(scores[n][2 * r], scores[n][2 * r + 1], rows.top[r], p[n / 2][at],
                                     rest[n / 2][at]);
                }
            add_weights<VE, EXACT>(total, p, rest, shrink);
#pragma unroll
            for (int i = 0; i < 4 * TILES; i++) o[i] = __fmul_rn(o[i], shrink[i / 2 % 2]);
            hold(o);
            start_products();
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) {
                const u64 lines = describe_lines(shared_address(values) + i * 16 * LINE, BLOCK);
                Sums::run(o, p[i], lines, true);
                if (EXACT) Sums::run(o, rest[i], lines, true);
            }
            end_products();
            wait_for_products();
            hold(o);
        }
        if (w.ends_split(c)) rows.fold_split<TILES>(columns, total, before);
    }
    rows.finish<TILES>(w.several, columns, total, before);
    write_rows<TILES, D_VO>(t, 16 * warp, rows, columns, 0, 1, true, out, out_kind, lse);
    merge_if_last<4>(header, t.item, t.first_vector, t.n_vectors, out, out_kind, lse);
}
