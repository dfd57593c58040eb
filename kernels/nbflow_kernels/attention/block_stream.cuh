// A warp's own keys and values, from their pages to shared memory as the bytes they are, by copies that
// nobody waits for.
#pragma once
#include "attention/block_codes.cuh"
#include "attention/plan.cuh"

// How rows are copied: 16 neighbouring ones as one piece of memory, or each for itself, aligned to so many
// bytes.
constexpr int RUNS = 0;

template <int BYTES>
DEV void copy_piece(u8* to, const u8* from) {
    if constexpr (BYTES == 16) copy_16(shared_address(to), from);
    else if constexpr (BYTES == 2) *(u16*)to = *(const u16*)from;
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                     "n"(BYTES));
}

// N keys of a warp at a time, of K_PARTS and V_PARTS times 32 numbers.
template <class K, class V, int K_PARTS, int V_PARTS, int N, int COPY>
struct Stream {
    static constexpr int K_ROW = Codes<K>::row_bytes(K_PARTS), V_ROW = Codes<V>::row_bytes(V_PARTS);
    static constexpr int RUN = COPY == RUNS ? 16 : 1, UNITS = N / RUN;
    static constexpr int VALUES_AT = N * K_ROW, STAGE = N * (K_ROW + V_ROW);

    const u8 *k, *v;  // of the thread block's head
    Strides k_strides, v_strides;
    const int* pages;
    unsigned page_size;
    int first, end;
    const u8* (*places)[UNITS];  // in shared memory: where units of keys and of values lie
    int page, slot;              // of the unit that this lane has found

    DEV_METHOD Stream(const i64* header, const Item& item, int head, const u8* keys, const u8* values,
                      Strides ks, Strides vs, const u8* (*room)[UNITS])
        : k(keys + head * ks.head), v(values + head * vs.head), k_strides(ks), v_strides(vs),
          pages(pointer<int>(header, KV_INDICES) + pointer<int>(header, KV_INDPTR)[item.request]),
          page_size(header[PAGE_SIZE]), first(item.first_key), end(item.end_key), places(room),
          page(0), slot(0) {}

    // Look up where the keys from `base` on are; for those outside the item, its first or last unit.
    DEV_METHOD void find(int base) {
        const unsigned key = min(max(base + (int)(threadIdx.x % UNITS) * RUN, first), end - 1);
        const unsigned unit = key / RUN * RUN;
        page = pages[unit / page_size];
        slot = unit % page_size;
    }

    // Start the copies of what was found.
    DEV_METHOD void copy(u8* stage) const {
        const int unit = threadIdx.x % UNITS;
        places[0][unit] = k + page * k_strides.page + slot * k_strides.token;
        places[1][unit] = v + page * v_strides.page + slot * v_strides.token;
        __syncwarp();
        copy_rows<K_ROW>(places[0], stage);
        copy_rows<V_ROW>(places[1], stage + VALUES_AT);
    }

    template <int ROW>
    DEV_METHOD void copy_rows(const u8* const* from, u8* to) const {
        constexpr int WIDTH = ROW & -ROW, PIECE = COPY == RUNS ? 16 : WIDTH < COPY ? WIDTH : COPY;
        constexpr int EACH = RUN * ROW / PIECE, ALL = UNITS * EACH;
#pragma unroll (ALL <= 640 ? ALL / 32 + 1 : 4)
        for (int n = 0; n < ALL; n += 32) {
            const int i = n + (threadIdx.x & 31);
            if (ALL % 32 && i >= ALL) break;
            copy_piece<PIECE>(to + i * PIECE, from[i / EACH] + i % EACH * PIECE);
        }
    }

    // Let the values of keys outside the item be zeros: what lies there may be NaN.
    DEV_METHOD void clear_outside(int base, u8* stage) const {
        if (base >= first && base + N <= end) return;
        const int n = threadIdx.x & 31;
        if (n < N && (base + n < first || base + n >= end))
            for (int i = 0; i < V_ROW; i += 2) *(u16*)(stage + VALUES_AT + n * V_ROW + i) = 0;
        __syncwarp();
    }
};
