// Per-warp asynchronous loads of quantized K/V rows from pages to shared memory, undecoded.
#pragma once
#include "attention/cuda/quantized_operands.cuh"
#include "attention/cuda/plan.cuh"
#include "cuda/sm90.cuh"

// Copy mode: RUNS copies 16 neighbouring rows as one block; other values copy row by row, aligned to that many bytes.
constexpr int RUNS = 0;
#if __CUDA_ARCH__ >= 900
constexpr bool HAS_BULK_COPIES = true;
#else
constexpr bool HAS_BULK_COPIES = false;
#endif

template <int BYTES>
DEV void copy_vector(u8* to, const u8* from) {
    if constexpr (BYTES == 16) copy_16(shared_address(to), from);
    else if constexpr (BYTES == 2) *(u16*)to = *(const u16*)from;
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                     "n"(BYTES)
                     : "memory");
}

// Multi-stage stream of a warp's rows: N keys per step, one step every EACH keys, rows of K_PARTS and V_PARTS times
// 32 numbers, STAGES steps in shared memory.
template <class K, class V, int K_PARTS, int V_PARTS, int N, int EACH, int STAGES, int COPY>
struct Stream {
    static constexpr int K_ROW = Codes<K>::row_bytes(K_PARTS), V_ROW = Codes<V>::row_bytes(V_PARTS);
    static constexpr int RUN = COPY == RUNS ? 16 : 1, UNITS = N / RUN;
    static constexpr int VALUES_AT = N * K_ROW, STAGE = N * (K_ROW + V_ROW);
    static constexpr bool BULK = COPY == RUNS && HAS_BULK_COPIES;

    struct PageSlot {  // index into the request's pages, and row in the page
        unsigned page, slot;
    };
    struct Scratch {  // per warp, in shared memory
        const u8* places[2][UNITS];  // addresses of units of keys and of values
        u64 barriers[STAGES];
        PageSlot first, last;  // bounds of the item
        PageSlot each, rest;   // increments of a full step, and of the last step of a split
    };

    Scratch& scratch;
    u8* const stages;
    const u8 *k, *v;  // of the thread block's KV head
    unsigned k_page, k_token, v_page, v_token;
    const int* pages;
    unsigned page_size;
    int first, end, key;  // `key`: first key of this lane's unit in the step to locate next
    PageSlot here;
    int page, slot;  // location of the current unit

    DEV_METHOD Stream(const i64* header, const Item& item, const u8* keys, const u8* values, Strides ks,
                      Strides vs, Scratch& scratch, u8* stages, int base)
        : scratch(scratch), stages(stages), k(keys), v(values), k_page(ks.page), k_token(ks.token),
          v_page(vs.page), v_token(vs.token),
          pages(pointer<int>(header, KV_INDICES) + pointer<int>(header, KV_INDPTR)[item.request]),
          page_size(header[PAGE_SIZE]), first(item.first_key), end(item.end_key),
          key(base + threadIdx.x % UNITS * RUN), here(page_slot(key)), page(0), slot(0) {
        if (threadIdx.x % 32 == 0) {
            scratch.first = page_slot(first / RUN * RUN), scratch.last = page_slot((end - 1) / RUN * RUN);
            scratch.each = page_slot(EACH), scratch.rest = page_slot((int)header[SPLIT_KEYS] % EACH);
#pragma unroll
            for (int i = 0; BULK && i < STAGES; i++) start_barrier(shared_address(&scratch.barriers[i]), 1);
            if (BULK) publish_barriers();
        }
        __syncwarp();
    }
    DEV_METHOD PageSlot page_slot(unsigned at) const {
        const unsigned mask = page_size - 1;
        if (page_size & mask) return {at / page_size, at % page_size};
        return {at >> __popc(mask), at & mask};
    }

    // Locate this step's keys (clamped to the item's first and last unit), and advance by `keys`.
    DEV_METHOD void locate(int keys) {
        PageSlot at = here;
        if (key < first / RUN * RUN || key >= end) at = *(key < end ? &scratch.first : &scratch.last);
        page = pages[at.page], slot = at.slot;
        key += keys;
        const PageSlot more = *(keys == EACH ? &scratch.each : &scratch.rest);
        here.page += more.page, here.slot += more.slot;
        if (here.slot >= page_size) here.slot -= page_size, here.page++;
    }

    // Start the copies of the located keys to stage i.
    DEV_METHOD void copy(int i) const {
        u8* const stage = stages + i * STAGE;
        const u8* const from_k = k + (u64)(u32)page * k_page + (u64)(u32)slot * k_token;
        const u8* const from_v = v + (u64)(u32)page * v_page + (u64)(u32)slot * v_token;
        if constexpr (BULK) {  // one lane per unit of keys, one per unit of values
            const int lane = threadIdx.x & 31, unit = lane % UNITS;
            const u32 barrier = shared_address(&scratch.barriers[i]), to = shared_address(stage);
            if (lane == 0) arrive_expecting(barrier, STAGE);
            __syncwarp();
            const bool is_key = lane < UNITS;
            const u32 n_bytes = RUN * (is_key ? K_ROW : V_ROW);
            if (lane < 2 * UNITS)
                copy_bulk(to + (is_key ? 0 : VALUES_AT) + unit * n_bytes, is_key ? from_k : from_v, n_bytes,
                          barrier);
        } else {
            const int unit = threadIdx.x % UNITS;
            scratch.places[0][unit] = from_k, scratch.places[1][unit] = from_v;
            __syncwarp();
            copy_rows<K_ROW>(scratch.places[0], stage);
            copy_rows<V_ROW>(scratch.places[1], stage + VALUES_AT);
        }
    }
    // Close the copy group of a step (empty after the last step).
    DEV_METHOD void end_step() const {
        if (!BULK) end_copies();
    }
    // Wait for step `number` (stage number % STAGES).
    DEV_METHOD void wait(int number) const {
        if (BULK) wait_for_phase(shared_address(&scratch.barriers[number % STAGES]), number / STAGES & 1);
        else wait_for_copies<STAGES - 1>();
        __syncwarp();
    }

    template <int ROW>
    DEV_METHOD void copy_rows(const u8* const* from, u8* to) const {
        constexpr int WIDTH = ROW & -ROW, PIECE = COPY == RUNS ? 16 : WIDTH < COPY ? WIDTH : COPY;
        constexpr int OF_UNIT = RUN * ROW / PIECE, ALL = UNITS * OF_UNIT;
#pragma unroll (ALL <= 640 ? ALL / 32 + 1 : 4)
        for (int n = 0; n < ALL; n += 32) {
            const int i = n + (threadIdx.x & 31);
            if (ALL % 32 && i >= ALL) break;
            copy_vector<PIECE>(to + i * PIECE, from[i / OF_UNIT] + i % OF_UNIT * PIECE);
        }
    }

    // Zero the values of keys outside the item: uninitialized rows may decode to NaN.
    DEV_METHOD void clear_outside(int base, u8* stage) const {
        if (base >= first && base + N <= end) return;
        const int n = threadIdx.x & 31;
        if (n < N && (base + n < first || base + n >= end))
            for (int i = 0; i < V_ROW; i += 2) *(u16*)(stage + VALUES_AT + n * V_ROW + i) = 0;
        if (BULK) publish_lines();  // before the next copy to this stage
        __syncwarp();
    }
};
