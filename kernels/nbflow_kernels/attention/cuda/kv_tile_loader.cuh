// Loads of 64-key K/V tiles from pages to shared memory (cp.async).
#pragma once
#include "attention/cuda/mma.cuh"
#include "attention/cuda/plan.cuh"

constexpr int KEYS = 64, WARPS = 4, THREADS = 32 * WARPS;
constexpr int PAD = 8;  // 16-bit elements after each row, against bank conflicts

// Division of 31-bit numbers by an invariant: one product and one shift.
struct Divider {
    u32 factor, shift;

    DEV_METHOD void start(u32 by) {
        shift = by > 1 ? 32 - __clz(by - 1) : 0;  // by <= 2^shift
        factor = ((1ull << 32) * ((1ull << shift) - by)) / by + 1;
    }
    DEV_METHOD u32 divide(u32 n) const { return (__umulhi(n, factor) + n) >> shift; }
};

// Loader of K/V tiles of KEYS keys.  V_IN_K: values are the first columns of keys (latent attention).  Row addresses
// of CHUNKS tiles (a power of two) are kept.
template <class K, class V, int D_QK, int D_VO, bool V_IN_K = false, int CHUNKS = 2>
struct KvTileLoader {
    static constexpr int K_STEP = D_QK + PAD, V_STEP = V_IN_K ? K_STEP : D_VO + PAD;
    static constexpr int VALUES_AT = V_IN_K ? 0 : KEYS * K_STEP;
    static constexpr int STAGE = KEYS * K_STEP + (V_IN_K ? 0 : KEYS * V_STEP);  // elements of 16 bits

    const u8* own;  // keys for the first KEYS threads, values for the others
    i64 page, token;
    const int* pages;
    u32 page_size;
    Divider by_page_size;
    int first, end;
    const u8* (*rows)[2 * KEYS];  // in shared memory, per tile: addresses of keys, then of values

    // Bind to a work item and a KV head.
    DEV_METHOD void start(const i64* header, const Item& item, int head, const u8* k, const u8* v,
                          Strides ks, Strides vs, const u8* (*scratch)[2 * KEYS]) {
        const bool is_key = threadIdx.x < KEYS;
        own = is_key ? k + head * ks.head : v + head * vs.head;
        page = is_key ? ks.page : vs.page;
        token = is_key ? ks.token : vs.token;
        pages = pointer<int>(header, KV_INDICES) + pointer<int>(header, KV_INDPTR)[item.request];
        page_size = header[PAGE_SIZE];
        by_page_size.start(page_size);
        first = item.first_key, end = item.end_key;
        rows = scratch;
    }

    // Write the row addresses of a tile; keys outside the item repeat its first or last one and are masked later.
    // Called by the first 2 * KEYS threads.
    DEV_METHOD void find(int base, u32 number) const {
        const u32 j = min(max(base + (int)threadIdx.x % KEYS, first), end - 1);
        const u32 n = by_page_size.divide(j);
        rows[number % CHUNKS][threadIdx.x] = own + pages[n] * page + (j - n * page_size) * token;
    }

    DEV_METHOD const u8* const* keys_of(u32 number) const { return rows[number % CHUNKS]; }
    DEV_METHOD const u8* const* values_of(u32 number) const { return rows[number % CHUNKS] + KEYS; }

    // Copy or decode a tile's rows; neighbouring threads take neighbouring 16-byte vectors.
    template <class F, int D>
    DEV_METHOD void copy(const u8* const* from, u16* to) const {
        constexpr unsigned PIECES = D / 8, ROUNDS = KEYS * PIECES / THREADS;
        const unsigned thread = threadIdx.x % THREADS;
#pragma unroll (!F::FLOAT ? 2 : THREADS % PIECES ? 6 : ROUNDS)
        for (unsigned n = 0; n < ROUNDS; n++) {
            unsigned slot = n * (THREADS / PIECES) + thread / PIECES, d = thread % PIECES * 8;
            if (THREADS % PIECES) {
                slot = (n * THREADS + thread) / PIECES;
                d = (n * THREADS + thread) % PIECES * 8;
            }
            u16* target = to + slot * (D + PAD) + d;
            if constexpr (F::FLOAT) {
                copy_16(shared_address(target), from[slot] + 2 * d);
            } else {
                u32 pairs[4];
                for (int p = 0; p < 4; p++)
                    pairs[p] = Half::pack(load_number<F>(from[slot], d + 2 * p),
                                          load_number<F>(from[slot], d + 2 * p + 1));
                *(uint4*)target = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }

    // Start loads of a tile's keys, values, or both; each is one cp.async group.
    DEV_METHOD void load_keys(int number, u16* to) const {
        copy<K, D_QK>(keys_of(number), to);
        end_copies();
    }
    DEV_METHOD void load_values(int number, u16* to) const {
        copy<V, D_VO>(values_of(number), to);
        end_copies();
    }
    DEV_METHOD void load(int number, u16* stage) const {
        copy<K, D_QK>(keys_of(number), stage);
        if (!V_IN_K) copy<V, D_VO>(values_of(number), stage + VALUES_AT);
        end_copies();
    }
};
