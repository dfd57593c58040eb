// What the kernels on tensor cores begin with.
#pragma once
#include "attention/cuda/split_kv_merge.cuh"
#include "attention/cuda/online_softmax.cuh"

#define PARAMETERS                                                                               \
    const i64 *header, const u8 *queries, i64 q_row_bytes, int q_kind, const u8 *k, const u8 *v, \
        i64 k_page, i64 k_token, i64 k_head, i64 v_page, i64 v_token, i64 v_head, float cap,     \
        u8 *out, int out_kind, float *lse

// What both kernels begin with: query vectors, keys, and in how many chunks these come.
template <class Keys>
struct Work {
    Tile t;
    Keys cache;
    int split, first_base, n_chunks;
    bool several;  // whether sums start anew on the way

    DEV_METHOD Work(const i64* header, const u8* k, const u8* v, Strides ks, Strides vs, float cap, int most,
                    const u8* (*rows_at)[2 * KEYS])
        : t(header, most, cap) {
        const Item& item = t.item;
        split = header[SPLIT_KEYS], first_base = item.first_key / KEYS * KEYS;
        n_chunks = (item.end_key - first_base + KEYS - 1) / KEYS;
        several = item.end_key > (item.first_key / split + 1) * split;
        cache.start(header, item, t.kv_head, k, v, ks, vs, rows_at);
    }
    // The chunk behind the split that chunk `c` belongs to.
    DEV_METHOD int split_end(int c) const {
        return (((first_base + c * KEYS) / split + 1) * split - first_base) / KEYS;
    }
    // Whether a split ends behind chunk `c`.
    DEV_METHOD bool ends_split(int c) const {
        return several && (c + 1 == n_chunks || (first_base + (c + 1) * KEYS) % split == 0);
    }
};
