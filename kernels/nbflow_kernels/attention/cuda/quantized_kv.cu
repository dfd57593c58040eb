// Attention over caches in block formats on tensor cores, for any number of query vectors.
//
// A thread block has M = 4 * NT query vectors of an item.  Each of its four warps takes every fourth group of
// 32 keys (16 of wide heads), for which it needs nobody else: it copies their bytes into its own two stages
// of shared memory, scores them, turns scores into weights and adds values.  Where a split ends the four
// warps' sums are added in order, and then to those of the splits before.
//
// Codes are operands as they are (`quantized_operands.cuh`).  Scales of keys multiply sums of 32 products, those of
// values the weights: all but the sums is exact to 2**-22.  The order of additions for a vector depends on
// the sequence alone, not on NT.
#include "attention/cuda/quantized_online_softmax.cuh"
#include "attention/cuda/prologue.cuh"

// The steps of a sequence: KEYS_EACH keys, counted from where a split begins.
template <int KEYS_EACH>
struct Steps {
    int base, split_end, split, end;

    DEV_METHOD Steps(const i64* header, const Item& item) : split(header[SPLIT_KEYS]), end(item.end_key) {
        const int start = item.first_key / split * split;
        base = start + (item.first_key - start) / KEYS_EACH * KEYS_EACH;
        split_end = start + split;
    }
    DEV_METHOD bool there() const { return base < end; }
    // Keys to the next step.
    DEV_METHOD int keys() const { return min(KEYS_EACH, split_end - base); }
    DEV_METHOD bool ends_split() const { return base + KEYS_EACH >= min(split_end, end); }
    DEV_METHOD void next() {
        base += keys();
        if (base == split_end) split_end += split;
    }
};

// Sums of a thread block's vectors, in shared memory: of this split, and of all before.
template <int M, int COLUMNS>
struct Sums {
    static constexpr int STEP = COLUMNS + 1;
    float tops[WARPS][M], totals[WARPS][M], run_top[M], run_total[M];
    Folded folded[M];
    float split[M * STEP], run[M * STEP];

    DEV_METHOD void start() {
        if (threadIdx.x < M) run_top[threadIdx.x] = HIDDEN, run_total[threadIdx.x] = 0;
        for (int m = threadIdx.x / 32; m < M; m += WARPS)
            for (int d = threadIdx.x % 32; d < COLUMNS; d += 32) run[m * STEP + d] = 0;
    }
    // The greatest score of a vector in a split.
    DEV_METHOD float top_of(int m) const {
        float most = tops[0][m];
#pragma unroll
        for (int w = 1; w < WARPS; w++) most = fmaxf(most, tops[w][m]);
        return most;
    }
    // Thread m: add the warps' sums of weights of a split.
    DEV_METHOD void add_totals(int m) {
        const float most = top_of(m);
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total = __fmaf_rn(totals[w][m], exp2_fast(tops[w][m] - most), total);
        folded[m] = fold(run_top[m], run_total[m], most, total);
        run_top[m] = folded[m].top, run_total[m] = folded[m].total;
    }
    // Add a split's sums to those before.
    DEV_METHOD void add_split() {
        for (int m = threadIdx.x / 32; m < M; m += WARPS) {
            const Folded f = folded[m];
#pragma unroll
            for (int d = threadIdx.x % 32; d < COLUMNS; d += 32)
                run[m * STEP + d] = fold_column(f, run[m * STEP + d], split[m * STEP + d]);
        }
    }
};

// Add the four warps' sums of a split in order, and let them start anew.
template <class V, int PARTS, int NT>
DEV void end_split(Sums<4 * NT, 32 * PARTS>& sums, Vectors<NT>& vectors, float (*o)[2 * PARTS][4],
                   float (*bases)[PARTS]) {
    typedef Codes<V> Of;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float total = sum_of_keys(vectors.total[n]);
        if (g == 0) sums.tops[warp][4 * n + t] = vectors.top[n], sums.totals[warp][4 * n + t] = total;
#pragma unroll
        for (int b = 0; b < PARTS; b++)
            bases[n][b] = sum_of_keys(bases[n][b]) * (Of::BASE ? 1.0f : -(float)Of::ZERO);
    }
    __syncthreads();
    if (threadIdx.x < 4 * NT) sums.add_totals(threadIdx.x);
#pragma unroll 1
    for (int w = 0; w < WARPS; w++) {
        if (w == warp)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const float factor = exp2_fast(vectors.top[n] - sums.top_of(4 * n + t));
#pragma unroll
                for (int i = 0; i < 4 * PARTS; i++) {
                    const int b = i / 4, j = i % 4;
                    const float* both = o[n][i / 2] + j % 2 * 2;
                    const float value = __fmaf_rn(__fmaf_rn(both[1], 1 / REST, both[0]),
                                                  1 / Of::UNIT / (1 << Of::shift(j)), bases[n][b]);
                    float& to = sums.split[(4 * n + t) * sums.STEP + 32 * b + Of::column(g, j)];
                    to = __fmaf_rn(value, factor, w == 0 ? 0.0f : to);
                }
            }
        __syncthreads();
    }
    sums.add_split();
    vectors.restart();
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 8 * PARTS; i++) o[n][i / 4][i % 4] = 0;
#pragma unroll
        for (int b = 0; b < PARTS; b++) bases[n][b] = 0;
    }
}

// Write a thread block's sums: partial results, or results and LSE.
template <int M, int COLUMNS>
DEV void write_sums(const Tile& t, const Sums<M, COLUMNS>& sums, u8* out, int out_kind, float* lse) {
    const int D = t.header[DIM_VO], size = out_kind == F32 ? 4 : 2;
    for (int m = threadIdx.x / 32; m < t.n_vectors && m < M; m += WARPS) {
        const float* const from = sums.run + m * sums.STEP;
        const float top = sums.run_top[m], total = sums.run_total[m];
        const int lane = threadIdx.x & 31;
        if (t.item.partial >= 0) {
            float* to = partial_at(t.header, t.item.partial + t.first_vector + m, t.kv_head);
            for (int d = lane; d < D; d += 32) to[d] = from[d];
            if (lane == 0) to[D] = top, to[D + 1] = total;
        } else {
            const Finish end = finish(t.header, top, total, t.head(m));
            u8* to = out + t.place(m) * D * size;
            for (int d = lane; d < D; d += 32)
                store_float(to + d * size, __fmul_rn(from[d], end.factor), out_kind);
            if (lane == 0 && lse != nullptr) lse[t.place(m)] = end.lse;
        }
    }
}

template <class K, class V, int K_PARTS, int V_PARTS, int NT, int COPY>
__global__ void __launch_bounds__(THREADS) attend_blocks(PARAMETERS) {
    constexpr int M = 4 * NT, TILES = K_PARTS + V_PARTS > 8 ? 1 : 2, N = 16 * TILES;
    constexpr int STAGES = 2, WEIGHTS = TILES * V_PARTS * NT * WEIGHT_BYTES;
    typedef Stream<K, V, K_PARTS, V_PARTS, N, WARPS * N, STAGES, COPY> Keys;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ typename Keys::Room rooms[WARPS];
    __shared__ float4 query_sums[M * K_PARTS];
    __shared__ Range ranges[M];
    const int warp = threadIdx.x / 32;
    u8* const q = memory;
    u8* const weights = q + NT * K_PARTS * 512 + warp * WEIGHTS;
    u8* const stages = q + NT * K_PARTS * 512 + WARPS * WEIGHTS + warp * STAGES * Keys::STAGE;
    Sums<M, 32 * V_PARTS>& sums =
        *(Sums<M, 32 * V_PARTS>*)(q + NT * K_PARTS * 512 + WARPS * (WEIGHTS + STAGES * Keys::STAGE));
    float* const room = (float*)(&sums + 1);  // where scores are not plain

    const Tile t(header, M, cap);
    if (t.n_vectors <= 0) return;
    Steps<WARPS * N> step(header, t.item), ahead = step;
    Keys keys(header, t.item, k + t.kv_head * k_head, v + t.kv_head * v_head, {k_page, k_token, k_head},
              {v_page, v_token, v_head}, rooms[warp], stages, step.base + N * warp);
    for (int i = 0; i < STAGES; i++) {
        if (ahead.there()) {
            keys.look_up(ahead.keys());
            keys.copy(i);
            __syncwarp();
        }
        keys.end_step();
        ahead.next();
    }
    sums.start();
    stage_queries<K, K_PARTS, NT>(t, queries, q_row_bytes, q_kind, q, query_sums, ranges);
    __syncthreads();
    Vectors<NT> vectors(t, ranges);
    float o[NT][2 * V_PARTS][4] = {}, bases[NT][V_PARTS] = {};

    for (int number = 0; step.there(); number++) {
        const int base = step.base + N * warp, end = min(step.split_end, step.end);
        u8* const stage = stages + number % STAGES * Keys::STAGE;
        const bool copies = ahead.there();
        if (copies) keys.look_up(ahead.keys());
        keys.wait(number);
        if (vectors.any_sees(base, min(base + N, end))) {
            float s[NT][2 * TILES], shrink[NT];
            keys.clear_outside(base, stage);
            score_keys<K, K_PARTS, NT, TILES>(s, stage, q, query_sums);
            vectors.finish_scores<TILES>(header, cap, base, end, s, room);
            vectors.weigh_keys<TILES>(s, shrink);
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int i = 0; i < 8 * V_PARTS; i++)
                    o[n][i / 4][i % 4] = __fmul_rn(o[n][i / 4][i % 4], shrink[n]);
#pragma unroll
                for (int b = 0; b < V_PARTS; b++) bases[n][b] = __fmul_rn(bases[n][b], shrink[n]);
            }
            store_weights<V, V_PARTS, NT, TILES>(s, stage + Keys::VALUES_AT, weights, bases);
            __syncwarp();
            add_coded_values<V, V_PARTS, NT, TILES>(o, stage + Keys::VALUES_AT, weights);
        }
        __syncwarp();  // the stage has been used
        if (copies) keys.copy(number % STAGES);
        keys.end_step();
        ahead.next();
        if (step.ends_split()) end_split<V, V_PARTS, NT>(sums, vectors, o, bases);
        step.next();
    }
    const Tile again(header, M, cap);  // rather than keep it in registers
    write_sums(again, sums, out, out_kind, lse);
    merge_if_last<4>(header, again.item, again.first_vector, again.n_vectors, out, out_kind, lse);
}
