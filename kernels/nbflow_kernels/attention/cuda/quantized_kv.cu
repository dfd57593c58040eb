// FlashAttention over block-quantized KV caches by mma.m16n8k16, decode and prefill.
//
// A thread block owns M = 4 * NT query vectors of a work item.  Its four warps take groups of 32 keys (16 for wide
// heads) in turn and run independently: each copies the quantized bytes to its own two shared-memory stages,
// computes scores and softmax weights, and accumulates P V.  At the end of a split the warps' accumulators are
// reduced in order and merged into those of earlier splits.
//
// Quantized codes are MMA operands as they are (`quantized_operands.cuh`).  Key scales multiply sums of 32
// products, value scales the weights.  Sums over keys are cut where codes are subnormal, to 2**-14 (Hopper: 2**-15)
// of code 1 times the largest weight of 16 keys; other steps are exact to 2**-22.  The order of additions per query
// vector depends on the sequence only, never on NT.
#include "attention/cuda/quantized_online_softmax.cuh"
#include "attention/cuda/prologue.cuh"

// Iteration over a sequence in steps of KEYS_EACH keys, aligned to the start of the split.
template <int KEYS_EACH>
struct Steps {
    int base, split_end, split, end;

    DEV_METHOD Steps(const i64* header, const Item& item) : split(header[SPLIT_KEYS]), end(item.end_key) {
        const int start = item.first_key / split * split;
        base = start + (item.first_key - start) / KEYS_EACH * KEYS_EACH;
        split_end = start + split;
    }
    DEV_METHOD bool valid() const { return base < end; }
    // Number of keys of this step.
    DEV_METHOD int keys() const { return min(KEYS_EACH, split_end - base); }
    DEV_METHOD bool ends_split() const { return base + KEYS_EACH >= min(split_end, end); }
    DEV_METHOD void next() {
        base += keys();
        if (base == split_end) split_end += split;
    }
};

// Accumulators of a thread block in shared memory: this split's, and those of earlier splits.
template <int M, int COLUMNS>
struct Sums {
    static constexpr int STEP = COLUMNS + 1;
    float row_maxes[WARPS][M], row_sums[WARPS][M], run_max[M], run_sum[M];
    MergedState merged[M];
    float split[M * STEP], run[M * STEP];

    DEV_METHOD void start() {
        if (threadIdx.x < M) run_max[threadIdx.x] = MASKED, run_sum[threadIdx.x] = 0;
        for (int m = threadIdx.x / 32; m < M; m += WARPS)
            for (int d = threadIdx.x % 32; d < COLUMNS; d += 32) run[m * STEP + d] = 0;
    }
    // Largest score of a vector in a split.
    DEV_METHOD float split_max(int m) const {
        float most = row_maxes[0][m];
#pragma unroll
        for (int w = 1; w < WARPS; w++) most = fmaxf(most, row_maxes[w][m]);
        return most;
    }
    // Reduce the warps' softmax sums of a split; called by thread m.
    DEV_METHOD void add_totals(int m) {
        const float most = split_max(m);
        float row_sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) row_sum = __fmaf_rn(row_sums[w][m], exp2_fast(row_maxes[w][m] - most), row_sum);
        merged[m] = merge_partial(run_max[m], run_sum[m], most, row_sum);
        run_max[m] = merged[m].row_max, run_sum[m] = merged[m].row_sum;
    }
    // Merge a split's accumulators into those of earlier splits.
    DEV_METHOD void add_split() {
        for (int m = threadIdx.x / 32; m < M; m += WARPS) {
            const MergedState f = merged[m];
#pragma unroll
            for (int d = threadIdx.x % 32; d < COLUMNS; d += 32)
                run[m * STEP + d] = merge_column(f, run[m * STEP + d], split[m * STEP + d]);
        }
    }
};

// Reduce the four warps' accumulators of a split in order, and reset them.
template <class V, int PARTS, int NT>
DEV void end_split(Sums<4 * NT, 32 * PARTS>& sums, Vectors<NT>& vectors, float (*o)[2 * PARTS][4],
                   float (*bases)[PARTS]) {
    typedef Codes<V> Of;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float row_sum = sum_over_keys(vectors.row_sum[n]);
        if (g == 0) sums.row_maxes[warp][4 * n + t] = vectors.row_max[n], sums.row_sums[warp][4 * n + t] = row_sum;
#pragma unroll
        for (int b = 0; b < PARTS; b++)
            bases[n][b] = sum_over_keys(bases[n][b]) * (Of::BASE ? 1.0f : -(float)Of::ZERO);
    }
    __syncthreads();
    if (threadIdx.x < 4 * NT) sums.add_totals(threadIdx.x);
#pragma unroll 1
    for (int w = 0; w < WARPS; w++) {
        if (w == warp)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const float factor = exp2_fast(vectors.row_max[n] - sums.split_max(4 * n + t));
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

// Write partial results, or final results and LSE.
template <int M, int COLUMNS>
DEV void write_sums(const Tile& t, const Sums<M, COLUMNS>& sums, u8* out, int out_kind, float* lse) {
    const int D = t.header[DIM_VO], size = out_kind == F32 ? 4 : 2;
    for (int m = threadIdx.x / 32; m < t.n_vectors && m < M; m += WARPS) {
        const float* const from = sums.run + m * sums.STEP;
        const float row_max = sums.run_max[m], row_sum = sums.run_sum[m];
        const int lane = threadIdx.x & 31;
        if (t.item.partial >= 0) {
            float* to = partial_at(t.header, t.item.partial + t.first_vector + m, t.kv_head);
            for (int d = lane; d < D; d += 32) to[d] = from[d];
            if (lane == 0) to[D] = row_max, to[D + 1] = row_sum;
        } else {
            const FinalScale end = final_scale(t.header, row_max, row_sum, t.head(m));
            u8* to = out + t.place(m) * D * size;
            for (int d = lane; d < D; d += 32)
                store_float(to + d * size, __fmul_rn(from[d], end.factor), out_kind);
            if (lane == 0 && lse != nullptr) lse[t.place(m)] = end.lse;
        }
    }
}

template <class K, class V, int K_PARTS, int V_PARTS, int NT, int COPY>
__global__ void __launch_bounds__(THREADS) flash_quantized_kv(PARAMETERS) {
    constexpr int M = 4 * NT, TILES = K_PARTS + V_PARTS > 8 ? 1 : 2, N = 16 * TILES;
    constexpr int STAGES = 2, WEIGHTS = TILES * V_PARTS * NT * WEIGHT_BYTES;
    typedef Stream<K, V, K_PARTS, V_PARTS, N, WARPS * N, STAGES, COPY> Keys;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ typename Keys::Scratch scratches[WARPS];
    __shared__ float4 query_sums[M * K_PARTS];
    __shared__ Range ranges[M];
    const int warp = threadIdx.x / 32;
    u8* const q = memory;
    u8* const weights = q + NT * K_PARTS * 512 + warp * WEIGHTS;
    u8* const stages = q + NT * K_PARTS * 512 + WARPS * WEIGHTS + warp * STAGES * Keys::STAGE;
    Sums<M, 32 * V_PARTS>& sums =
        *(Sums<M, 32 * V_PARTS>*)(q + NT * K_PARTS * 512 + WARPS * (WEIGHTS + STAGES * Keys::STAGE));
    float* const scratch = (float*)(&sums + 1);  // for scores with biases, caps or masks

    const Tile t(header, M, cap);
    if (t.n_vectors <= 0) return;
    Steps<WARPS * N> step(header, t.item), ahead = step;
    Keys keys(header, t.item, k + t.kv_head * k_head, v + t.kv_head * v_head, {k_page, k_token, k_head},
              {v_page, v_token, v_head}, scratches[warp], stages, step.base + N * warp);
    for (int i = 0; i < STAGES; i++) {
        if (ahead.valid()) {
            keys.locate(ahead.keys());
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

    for (int number = 0; step.valid(); number++) {
        const int base = step.base + N * warp, end = min(step.split_end, step.end);
        u8* const stage = stages + number % STAGES * Keys::STAGE;
        const bool copies = ahead.valid();
        if (copies) keys.locate(ahead.keys());
        keys.wait(number);
        if (vectors.any_visible(base, min(base + N, end))) {
            float s[NT][2 * TILES], rescale[NT];
            keys.clear_outside(base, stage);
            quantized_qk_scores<K, K_PARTS, NT, TILES>(s, stage, q, query_sums);
            vectors.bias_and_mask<TILES>(header, cap, base, end, s, scratch);
            vectors.softmax_weights<TILES>(s, rescale);
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int i = 0; i < 8 * V_PARTS; i++)
                    o[n][i / 4][i % 4] = __fmul_rn(o[n][i / 4][i % 4], rescale[n]);
#pragma unroll
                for (int b = 0; b < V_PARTS; b++) bases[n][b] = __fmul_rn(bases[n][b], rescale[n]);
            }
            store_weights<V, V_PARTS, NT, TILES>(s, stage + Keys::VALUES_AT, weights, bases);
            __syncwarp();
            accumulate_quantized_pv<V, V_PARTS, NT, TILES>(o, stage + Keys::VALUES_AT, weights);
        }
        __syncwarp();  // the stage is consumed
        if (copies) keys.copy(number % STAGES);
        keys.end_step();
        ahead.next();
        if (step.ends_split()) end_split<V, V_PARTS, NT>(sums, vectors, o, bases);
        step.next();
    }
    const Tile again(header, M, cap);  // rebuilt to save registers
    write_sums(again, sums, out, out_kind, lse);
    merge_if_last<4>(header, again.item, again.first_vector, again.n_vectors, out, out_kind, lse);
}
