// Parameters and common prologue of the tensor-core kernels.
#pragma once
#include "attention/cuda/split_kv_merge.cuh"
#include "attention/cuda/online_softmax.cuh"

#define PARAMETERS                                                                               \
    const i64 *header, const u8 *queries, i64 q_row_bytes, int q_kind, const u8 *k, const u8 *v, \
        i64 k_page, i64 k_token, i64 k_head, i64 v_page, i64 v_token, i64 v_head, float cap,     \
        u8 *out, int out_kind, float *lse

// Query tile, K/V loader and number of 64-key tiles of a thread block.
template <class Keys>
struct Prologue {
    Tile t;
    Keys loader;
    int split, first_base, n_chunks;
    bool multi_split;  // the item covers more than one split

    DEV_METHOD Prologue(const i64* header, const u8* k, const u8* v, Strides ks, Strides vs, float cap, int most,
                    const u8* (*rows_at)[2 * KEYS])
        : t(header, most, cap) {
        const Item& item = t.item;
        split = header[SPLIT_KEYS], first_base = item.first_key / KEYS * KEYS;
        n_chunks = (item.end_key - first_base + KEYS - 1) / KEYS;
        multi_split = item.end_key > (item.first_key / split + 1) * split;
        loader.start(header, item, t.kv_head, k, v, ks, vs, rows_at);
    }
    // First tile after the split of tile `c`.
    DEV_METHOD int split_end(int c) const {
        return (((first_base + c * KEYS) / split + 1) * split - first_base) / KEYS;
    }
    // True if a split ends after tile `c`.
    DEV_METHOD bool ends_split(int c) const {
        return multi_split && (c + 1 == n_chunks || (first_base + (c + 1) * KEYS) % split == 0);
    }
};
