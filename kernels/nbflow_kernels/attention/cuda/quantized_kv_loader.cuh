// A warp's own keys and values, from their pages to shared memory as the bytes they are, by copies that
// nobody waits for.
#pragma once
#include "attention/cuda/quantized_operands.cuh"
#include "attention/cuda/plan.cuh"
#include "cuda/sm90.cuh"

// How rows are copied: 16 neighbouring ones as one piece of memory, or each for itself, aligned to so many
// bytes.
constexpr int RUNS = 0;
#if __CUDA_ARCH__ >= 900
constexpr bool HAS_BULK_COPIES = true;
#else
constexpr bool HAS_BULK_COPIES = false;
#endif

template <int BYTES>
DEV void copy_piece(u8* to, const u8* from) {
    if constexpr (BYTES == 16) copy_16(shared_address(to), from);
    else if constexpr (BYTES == 2) *(u16*)to = *(const u16*)from;
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                     "n"(BYTES)
                     : "memory");
}

// N keys of a warp at a time, of K_PARTS and V_PARTS times 32 numbers, every EACH keys; STAGES of them lie
// in shared memory.
template <class K, class V, int K_PARTS, int V_PARTS, int N, int EACH, int STAGES, int COPY>
struct Stream {
    static constexpr int K_ROW = Codes<K>::row_bytes(K_PARTS), V_ROW = Codes<V>::row_bytes(V_PARTS);
    static constexpr int RUN = COPY == RUNS ? 16 : 1, UNITS = N / RUN;
    static constexpr int VALUES_AT = N * K_ROW, STAGE = N * (K_ROW + V_ROW);
    static constexpr bool BULK = COPY == RUNS && HAS_BULK_COPIES;

    struct Spot {  // a unit's page, as an index into the request's, and its first row there
        unsigned page, slot;
    };
    struct Room {  // of a warp, in shared memory
        const u8* places[2][UNITS];  // where units of keys and of values lie
        u64 barriers[STAGES];
        Spot first, last;  // of the item
        Spot each, rest;   // how far steps are apart, the last one of a split if it is a part of one
    };

    Room& room;
    u8* const stages;
    const u8 *k, *v;  // of the thread block's head
    unsigned k_page, k_token, v_page, v_token;
    const int* pages;
    unsigned page_size;
    int first, end, key;  // the first of this lane's unit, of the step that is looked up next
    Spot here;
    int page, slot;  // where the unit that was looked up lies

    DEV_METHOD Stream(const i64* header, const Item& item, const u8* keys, const u8* values, Strides ks,
                      Strides vs, Room& room, u8* stages, int base)
        : room(room), stages(stages), k(keys), v(values), k_page(ks.page), k_token(ks.token),
          v_page(vs.page), v_token(vs.token),
          pages(pointer<int>(header, KV_INDICES) + pointer<int>(header, KV_INDPTR)[item.request]),
          page_size(header[PAGE_SIZE]), first(item.first_key), end(item.end_key),
          key(base + threadIdx.x % UNITS * RUN), here(spot(key)), page(0), slot(0) {
        if (threadIdx.x % 32 == 0) {
            room.first = spot(first / RUN * RUN), room.last = spot((end - 1) / RUN * RUN);
            room.each = spot(EACH), room.rest = spot((int)header[SPLIT_KEYS] % EACH);
#pragma unroll
            for (int i = 0; BULK && i < STAGES; i++) start_barrier(shared_address(&room.barriers[i]), 1);
            if (BULK) publish_barriers();
        }
        __syncwarp();
    }
    DEV_METHOD Spot spot(unsigned at) const {
        const unsigned mask = page_size - 1;
        if (page_size & mask) return {at / page_size, at % page_size};
        return {at >> __popc(mask), at & mask};
    }

    // Look up where a step's keys are (for those outside the item: its first or last unit), and go on to
    // the step `keys` behind it.
    DEV_METHOD void look_up(int keys) {
        Spot at = here;
        if (key < first / RUN * RUN || key >= end) at = *(key < end ? &room.first : &room.last);
        page = pages[at.page], slot = at.slot;
        key += keys;
        const Spot more = *(keys == EACH ? &room.each : &room.rest);
        here.page += more.page, here.slot += more.slot;
        if (here.slot >= page_size) here.slot -= page_size, here.page++;
    }

    // Start the copies of what was looked up, to stage i.
    DEV_METHOD void copy(int i) const {
        u8* const stage = stages + i * STAGE;
        const u8* const from_k = k + (u64)(u32)page * k_page + (u64)(u32)slot * k_token;
        const u8* const from_v = v + (u64)(u32)page * v_page + (u64)(u32)slot * v_token;
        if constexpr (BULK) {  // a lane for each unit of keys, and for each of values
            const int lane = threadIdx.x & 31, unit = lane % UNITS;
            const u32 barrier = shared_address(&room.barriers[i]), to = shared_address(stage);
            if (lane == 0) arrive_expecting(barrier, STAGE);
            __syncwarp();
            const bool is_key = lane < UNITS;
            const u32 n_bytes = RUN * (is_key ? K_ROW : V_ROW);
            if (lane < 2 * UNITS)
                copy_bulk(to + (is_key ? 0 : VALUES_AT) + unit * n_bytes, is_key ? from_k : from_v, n_bytes,
                          barrier);
        } else {
            const int unit = threadIdx.x % UNITS;
            room.places[0][unit] = from_k, room.places[1][unit] = from_v;
            __syncwarp();
            copy_rows<K_ROW>(room.places[0], stage);
            copy_rows<V_ROW>(room.places[1], stage + VALUES_AT);
        }
    }
    // What follows the copies of a step, or follows none behind the last one.
    DEV_METHOD void end_step() const {
        if (!BULK) end_copies();
    }
    // Wait for step `number`, which lies in stage number % STAGES.
    DEV_METHOD void wait(int number) const {
        if (BULK) wait_for_phase(shared_address(&room.barriers[number % STAGES]), number / STAGES & 1);
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
            copy_piece<PIECE>(to + i * PIECE, from[i / OF_UNIT] + i % OF_UNIT * PIECE);
        }
    }

    // Let the values of keys outside the item be zeros: what lies there may be NaN.
    DEV_METHOD void clear_outside(int base, u8* stage) const {
        if (base >= first && base + N <= end) return;
        const int n = threadIdx.x & 31;
        if (n < N && (base + n < first || base + n >= end))
            for (int i = 0; i < V_ROW; i += 2) *(u16*)(stage + VALUES_AT + n * V_ROW + i) = 0;
        if (BULK) publish_lines();  // before the next copy to this place
        __syncwarp();
    }
};
