// Fallback without tensor cores: every option, any head size, any formats of keys and values.  Read this kernel first.
//
// A thread block owns `most` query vectors of a work item and one KV head, and walks over the item's keys 32 at a
// time: decode keys to shared memory, score one key per lane, decode values to the same memory, accumulate P V.
// After every SPLIT_KEYS keys the accumulators are merged into those of earlier splits, in the order that
// `merge_if_last` uses, so the bits do not depend on the split.
#include "attention/cuda/split_kv_merge.cuh"

constexpr int KEYS = 32, WARPS = 4, PER_WARP = 4;  // at most WARPS * PER_WARP vectors

// State of a query vector; its accumulator is in `acc`, that of earlier splits in `running`.
struct State {
    float row_max, row_sum, run_max, run_sum;
};

struct Tile {
    const i64* header;
    Item item;
    int kv_head, group, D_qk, D_vo, first_vector, n_vectors;
    int q_stride, row_stride;  // in floats; odd against bank conflicts
    float *q, *rows, *acc, *running;  // in shared memory

    DEV_METHOD int vector_row(int m) const { return (first_vector + m) / group; }
    DEV_METHOD int vector_head(int m) const { return kv_head * group + (first_vector + m) % group; }
    DEV_METHOD i64 vector_place(int m) const {
        return (i64)(item.row + vector_row(m)) * header[QO_HEADS] + vector_head(m);
    }

    // Apply RoPE (half-split pairs) to the vector at x; one warp.
    DEV_METHOD void rotate(float* x, int position) const {
        const float* table = pointer<float>(header, ROPE) + (i64)max(position, 0) * D_qk;
        const int half = D_qk / 2;
        __syncwarp();
        for (int d = threadIdx.x & 31; d < half; d += 32) {
            const float a = x[d], b = x[d + half], c = table[d], s = table[half + d];
            x[d] = __fmaf_rn(a, c, __fmul_rn(b, -s));
            x[d + half] = __fmaf_rn(b, c, __fmul_rn(a, s));
        }
        __syncwarp();
    }

    // Add the bias to a key that is stored before RoPE, and rotate it; one warp.
    DEV_METHOD void finish_key(float* x, int position) const {
        const int lane = threadIdx.x & 31, dim = header[KEY_ROPE_DIM], half = dim / 2;
        const bool is_neox = header[KEY_ROPE_NEOX], biased = header[KEY_BIAS];
        const float* table = pointer<float>(header, KEY_ROPE) + (i64)position * dim;
        const float* bias = pointer<float>(header, KEY_BIAS) + kv_head * ((D_qk + 15) & ~15);
        __syncwarp();
        for (int j = lane; j < half; j += 32) {
            const int first = is_neox ? j : 2 * j, second = first + (is_neox ? half : 1);
            const float a = biased ? __fadd_rn(x[first], bias[first]) : x[first];
            const float b = biased ? __fadd_rn(x[second], bias[second]) : x[second];
            const float c = table[j], s = table[half + j];
            x[first] = __fmaf_rn(a, c, __fmul_rn(b, -s));
            x[second] = __fmaf_rn(b, c, __fmul_rn(a, s));
        }
        if (biased)
            for (int d = dim + lane; d < D_qk; d += 32) x[d] = __fadd_rn(x[d], bias[d]);
        __syncwarp();
    }

    DEV_METHOD void load_queries(const u8* queries, i64 row_bytes, int kind) const {
        const int size = kind == F32 ? 4 : 2;
        for (int m = threadIdx.x / 32; m < n_vectors; m += WARPS) {
            const int head = vector_head(m);
            const float factor = pointer<float>(header, SCORE_FACTORS)[head];
            const u8* from =
                queries + (item.row + vector_row(m)) * row_bytes + (i64)head * D_qk * size;
            for (int d = threadIdx.x & 31; d < D_qk; d += 32)
                q[m * q_stride + d] = __fmul_rn(load_float(from + d * size, kind), factor);
            if (header[ROPE]) rotate(q + m * q_stride, item.position + vector_row(m));
        }
    }

    // Decode rows [first, last) of n numbers to `rows`, starting at column `to`.
    template <class F>
    DEV_METHOD void load_rows(const u8* cache, Strides strides, int first, int last, int n,
                              int to) const {
        const int page_size = header[PAGE_SIZE];
        const int* pages = pointer<int>(header, KV_INDICES)
            + pointer<int>(header, KV_INDPTR)[item.request];
        for (int j = first + threadIdx.x / 32; j < last; j += WARPS) {
            const u8* row = cache + pages[j / page_size] * strides.page
                + j % page_size * strides.token + kv_head * strides.head;
            float* target = rows + (j - first) * row_stride + to;
            for (int d = threadIdx.x & 31; d < n; d += 32) target[d] = load_number<F>(row, d);
        }
    }

    DEV_METHOD float dot(int m, int lane) const {
        const float *a = q + m * q_stride, *b = rows + lane * row_stride;
        float sums[4] = {0, 0, 0, 0};  // four chains: instruction parallelism and a smaller error
        int d = 0;
        for (; d + 4 <= D_qk; d += 4)
            for (int i = 0; i < 4; i++) sums[i] = __fmaf_rn(a[d + i], b[d + i], sums[i]);
        for (; d < D_qk; d++) sums[0] = __fmaf_rn(a[d], b[d], sums[0]);
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
};

DEV float warp_sum(float x) {
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// At most 5 thread blocks per multiprocessor: for a sixth the compiler would spill registers.
template <class K, class V>
__global__ void __launch_bounds__(32 * WARPS, 5)
attention(const i64* header, const u8* queries, i64 q_row_bytes, int q_kind, const u8* k,
       const u8* v, i64 k_page, i64 k_token, i64 k_head, i64 v_page, i64 v_token, i64 v_head,
       float cap, u8* out, int out_kind, float* lse, int most) {
    extern __shared__ float memory[];
    Tile t;
    t.header = header;
    t.item = pointer<Item>(header, ITEMS)[blockIdx.x];
    t.kv_head = blockIdx.y;
    t.group = header[QO_HEADS] / header[KV_HEADS];
    t.D_qk = header[DIM_QK];
    t.D_vo = header[DIM_VO];
    t.first_vector = blockIdx.z * most;
    t.n_vectors = min(most, t.item.n_rows * t.group - t.first_vector);
    if (t.n_vectors <= 0) return;
    t.q_stride = t.D_qk;
    t.row_stride = max(t.D_qk, t.D_vo) | 1;
    t.q = memory;
    t.rows = t.q + most * t.q_stride;
    t.acc = t.rows + KEYS * t.row_stride;
    t.running = t.acc + most * t.D_vo;

    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const bool latent = header[LATENT];
    const int split = header[SPLIT_KEYS];
    const Item& item = t.item;
    const bool multi_split = item.end_key > (item.first_key / split + 1) * split;
    t.load_queries(queries, q_row_bytes, q_kind);
    State state[PER_WARP];
    VisibleKeys seen[PER_WARP];
    for (int i = 0; i < PER_WARP; i++) {
        const int m = warp + i * WARPS;
        state[i] = {MASKED, 0, MASKED, 0};
        if (m >= t.n_vectors) continue;
        seen[i] = visible_keys(header, item, t.vector_row(m));
        for (int d = lane; d < t.D_vo; d += 32) t.acc[m * t.D_vo + d] = 0;
    }

    int key = item.first_key;
    while (key < item.end_key) {
        const int stop = min(min(key / KEYS * KEYS + KEYS, item.end_key), (key / split + 1) * split);
        __syncthreads();  // values of the previous tile are consumed
        if (latent) {  // MLA: a key is (ckv, kpe), its value is ckv
            t.load_rows<K>(k, {k_page, k_token, k_head}, key, stop, t.D_vo, 0);
            t.load_rows<V>(v, {v_page, v_token, v_head}, key, stop, t.D_qk - t.D_vo, t.D_vo);
        } else {
            t.load_rows<K>(k, {k_page, k_token, k_head}, key, stop, t.D_qk, 0);
        }
        if (header[ROPE])  // each warp rotates the rows it loaded
            for (int j = key + warp; j < stop; j += WARPS)
                t.rotate(t.rows + (j - key) * t.row_stride, j);
        if (header[KEY_ROPE])
            for (int j = key + warp; j < stop; j += WARPS)
                t.finish_key(t.rows + (j - key) * t.row_stride, j);
        __syncthreads();

        float weights[PER_WARP], rescale[PER_WARP];
        for (int i = 0; i < PER_WARP; i++) {
            const int m = warp + i * WARPS, j = key + lane;
            if (m >= t.n_vectors) break;
            const int head = t.vector_head(m);
            bool visible = j < stop && j >= seen[i].low && j < seen[i].high;
            if (visible && header[MASK]) visible = mask_bit(header, seen[i].mask + j);
            float score = 0;
            if (visible) {
                const int distance = j - (item.position + t.vector_row(m));
                score = biased_score(header, t.dot(m, lane), distance, head, cap);
            }
            const float row_max = fmaxf(state[i].row_max, scaled_max(warp_max(visible ? score : MASKED)));
            weights[i] = visible ? weight(score, row_max) : 0;
            rescale[i] = exp2_fast(state[i].row_max - row_max);
            state[i].row_sum = __fmaf_rn(state[i].row_sum, rescale[i], warp_sum(weights[i]));
            state[i].row_max = row_max;
        }
        if (!latent) {
            __syncthreads();  // keys are consumed
            t.load_rows<V>(v, {v_page, v_token, v_head}, key, stop, t.D_vo, 0);
            __syncthreads();
        }
        for (int i = 0; i < PER_WARP; i++) {
            const int m = warp + i * WARPS;
            if (m >= t.n_vectors) break;
            const int first = max(seen[i].low, key), last = min(seen[i].high, stop);
            for (int base = 0; base < t.D_vo; base += 32) {
                const int d = base + lane;
                float sum = d < t.D_vo ? __fmul_rn(t.acc[m * t.D_vo + d], rescale[i]) : 0;
                for (int j = first; j < last; j++) {
                    const float w = __shfl_sync(~0u, weights[i], j - key);
                    if (d < t.D_vo)
                        sum = __fmaf_rn(w, t.rows[(j - key) * t.row_stride + d], sum);
                }
                if (d < t.D_vo) t.acc[m * t.D_vo + d] = sum;
            }
            if (multi_split && (stop == item.end_key || stop % split == 0)) {
                State& s = state[i];
                const bool is_first = s.run_max == MASKED && s.run_sum == 0;
                const MergedState f = merge_partial(s.run_max, s.run_sum, s.row_max, s.row_sum);
                for (int d = lane; d < t.D_vo; d += 32) {
                    const int at = m * t.D_vo + d;
                    t.running[at] = merge_column(f, is_first ? 0 : t.running[at], t.acc[at]);
                    t.acc[at] = 0;
                }
                s = {MASKED, 0, f.row_max, f.row_sum};
            }
        }
        key = stop;
    }

    for (int i = 0; i < PER_WARP; i++) {
        const int m = warp + i * WARPS;
        if (m >= t.n_vectors) break;
        const float* sums = (multi_split ? t.running : t.acc) + m * t.D_vo;
        const float row_max = multi_split ? state[i].run_max : state[i].row_max;
        const float row_sum = multi_split ? state[i].run_sum : state[i].row_sum;
        if (item.partial >= 0) {
            float* to = partial_at(header, item.partial + t.first_vector + m, t.kv_head);
            for (int d = lane; d < t.D_vo; d += 32) to[d] = sums[d];
            if (lane == 0) {
                to[t.D_vo] = row_max;
                to[t.D_vo + 1] = row_sum;
            }
            continue;
        }
        const FinalScale end = final_scale(header, row_max, row_sum, t.vector_head(m));
        const i64 place = t.vector_place(m);
        const int size = out_kind == F32 ? 4 : 2;
        for (int d = lane; d < t.D_vo; d += 32)
            store_float(out + (place * t.D_vo + d) * size, __fmul_rn(sums[d], end.factor), out_kind);
        if (lse != nullptr && lane == 0) lse[place] = end.lse;
    }
    merge_if_last<1>(header, item, t.first_vector, t.n_vectors, out, out_kind, lse);
}
