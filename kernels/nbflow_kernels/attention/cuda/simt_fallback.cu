// Attention with every option, any head size and any formats of keys and values: the kernel to read.
//
// A thread block takes `most` query vectors of an item and one key/value head, and walks
// over the item's keys 32 at a time: keys are decoded to shared memory, a warp gives each lane one of
// them to score, values are decoded to the same place, and a warp adds them to its vectors' sums.
// After every SPLIT_KEYS keys the sums start anew and are added to those before, in order: whether
// that happens here or in `merge_if_last`, the additions are the same.
#include "attention/cuda/split_kv_merge.cuh"

constexpr int KEYS = 32, WARPS = 4, PER_WARP = 4;  // at most WARPS * PER_WARP vectors

// A query vector's state; its sums lie in `acc`, those of the splits before in `running`.
struct State {
    float top, total, run_top, run_total;
};

struct Tile {
    const i64* header;
    Item item;
    int kv_head, group, D_qk, D_vo, first_vector, n_vectors;
    int q_stride, row_stride;  // floats from vector to vector, key to key: odd, so lanes differ
    float *q, *rows, *acc, *running;  // in shared memory

    DEV_METHOD int vector_row(int m) const { return (first_vector + m) / group; }
    DEV_METHOD int vector_head(int m) const { return kv_head * group + (first_vector + m) % group; }
    DEV_METHOD i64 vector_place(int m) const {
        return (i64)(item.row + vector_row(m)) * header[QO_HEADS] + vector_head(m);
    }

    // Rotate the vector at x by the halves' angles of a position; one warp.
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

    // Decode rows of keys (or values) [first, last), n numbers each, to `rows` from column `to` on.
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
        float sums[4] = {0, 0, 0, 0};  // four chains: quicker, and closer to the true sum
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

// Five thread blocks on a multiprocessor: for a sixth, the compiler would keep numbers in memory.
template <class K, class V>
__global__ void __launch_bounds__(32 * WARPS, 5)
attend(const i64* header, const u8* queries, i64 q_row_bytes, int q_kind, const u8* k,
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
    const bool several = item.end_key > (item.first_key / split + 1) * split;
    t.load_queries(queries, q_row_bytes, q_kind);
    State state[PER_WARP];
    Seen seen[PER_WARP];
    for (int i = 0; i < PER_WARP; i++) {
        const int m = warp + i * WARPS;
        state[i] = {HIDDEN, 0, HIDDEN, 0};
        if (m >= t.n_vectors) continue;
        seen[i] = seen_by(header, item, t.vector_row(m));
        for (int d = lane; d < t.D_vo; d += 32) t.acc[m * t.D_vo + d] = 0;
    }

    int key = item.first_key;
    while (key < item.end_key) {
        const int stop = min(min(key / KEYS * KEYS + KEYS, item.end_key), (key / split + 1) * split);
        __syncthreads();  // the values of the chunk before have been used
        if (latent) {  // a key is a row of k and one of v, its value the first part
            t.load_rows<K>(k, {k_page, k_token, k_head}, key, stop, t.D_vo, 0);
            t.load_rows<V>(v, {v_page, v_token, v_head}, key, stop, t.D_qk - t.D_vo, t.D_vo);
        } else {
            t.load_rows<K>(k, {k_page, k_token, k_head}, key, stop, t.D_qk, 0);
        }
        if (header[ROPE])  // a warp rotates the rows it has loaded
            for (int j = key + warp; j < stop; j += WARPS)
                t.rotate(t.rows + (j - key) * t.row_stride, j);
        __syncthreads();

        float weights[PER_WARP], shrink[PER_WARP];
        for (int i = 0; i < PER_WARP; i++) {
            const int m = warp + i * WARPS, j = key + lane;
            if (m >= t.n_vectors) break;
            const int head = t.vector_head(m);
            bool visible = j < stop && j >= seen[i].low && j < seen[i].high;
            if (visible && header[MASK]) visible = mask_shows(header, seen[i].mask + j);
            float score = 0;
            if (visible) {
                const int distance = j - (item.position + t.vector_row(m));
                score = final_score(header, t.dot(m, lane), distance, head, cap);
            }
            const float top = fmaxf(state[i].top, top_of(warp_max(visible ? score : HIDDEN)));
            weights[i] = visible ? weight(score, top) : 0;
            shrink[i] = exp2_fast(state[i].top - top);
            state[i].total = __fmaf_rn(state[i].total, shrink[i], warp_sum(weights[i]));
            state[i].top = top;
        }
        if (!latent) {
            __syncthreads();  // the keys have been used
            t.load_rows<V>(v, {v_page, v_token, v_head}, key, stop, t.D_vo, 0);
            __syncthreads();
        }
        for (int i = 0; i < PER_WARP; i++) {
            const int m = warp + i * WARPS;
            if (m >= t.n_vectors) break;
            const int first = max(seen[i].low, key), last = min(seen[i].high, stop);
            for (int base = 0; base < t.D_vo; base += 32) {
                const int d = base + lane;
                float sum = d < t.D_vo ? __fmul_rn(t.acc[m * t.D_vo + d], shrink[i]) : 0;
                for (int j = first; j < last; j++) {
                    const float w = __shfl_sync(~0u, weights[i], j - key);
                    if (d < t.D_vo)
                        sum = __fmaf_rn(w, t.rows[(j - key) * t.row_stride + d], sum);
                }
                if (d < t.D_vo) t.acc[m * t.D_vo + d] = sum;
            }
            if (several && (stop == item.end_key || stop % split == 0)) {
                State& s = state[i];
                const bool is_first = s.run_top == HIDDEN && s.run_total == 0;
                const Folded f = fold(s.run_top, s.run_total, s.top, s.total);
                for (int d = lane; d < t.D_vo; d += 32) {
                    const int at = m * t.D_vo + d;
                    t.running[at] = fold_column(f, is_first ? 0 : t.running[at], t.acc[at]);
                    t.acc[at] = 0;
                }
                s = {HIDDEN, 0, f.top, f.total};
            }
        }
        key = stop;
    }

    for (int i = 0; i < PER_WARP; i++) {
        const int m = warp + i * WARPS;
        if (m >= t.n_vectors) break;
        const float* sums = (several ? t.running : t.acc) + m * t.D_vo;
        const float top = several ? state[i].run_top : state[i].top;
        const float total = several ? state[i].run_total : state[i].total;
        if (item.partial >= 0) {
            float* to = partial_at(header, item.partial + t.first_vector + m, t.kv_head);
            for (int d = lane; d < t.D_vo; d += 32) to[d] = sums[d];
            if (lane == 0) {
                to[t.D_vo] = top;
                to[t.D_vo + 1] = total;
            }
            continue;
        }
        const Finish end = finish(header, top, total, t.vector_head(m));
        const i64 place = t.vector_place(m);
        const int size = out_kind == F32 ? 4 : 2;
        for (int d = lane; d < t.D_vo; d += 32)
            store_float(out + (place * t.D_vo + d) * size, __fmul_rn(sums[d], end.factor), out_kind);
        if (lse != nullptr && lane == 0) lse[place] = end.lse;
    }
    merge_if_last<1>(header, item, t.first_vector, t.n_vectors, out, out_kind, lse);
}
