// K/V tiles and queries in 128-byte-swizzled shared memory, and the wgmma products that read them.
#pragma once
#include "attention/cuda/prologue.cuh"
#include "cuda/sm90.cuh"

constexpr int LINE = 128, BLOCK = KEYS * LINE;  // bytes of a swizzled row (64 columns), and of 64 such rows

// Byte offset of 16-byte vector `piece` of row `row`; blocks of 64 columns are contiguous.
template <int ROWS>
DEV u32 swizzled_offset(int row, int piece) {
    return (piece / 8 * ROWS + row) * LINE + 16 * ((piece ^ row) & 7);
}

// A thread's share of copying a tile to swizzled shared memory; eight threads copy a row's 128 bytes.
template <int COPIERS>
struct SwizzledCopy {
    static constexpr u32 LINES = COPIERS / 8;  // rows copied at once
    u32 line, piece, own;  // `own`: offset of the thread's vector in its first row

    DEV_METHOD SwizzledCopy() {
        const u32 thread = thread_again();
        line = thread / 8, piece = thread % 8;
        own = line * LINE + 16 * ((piece ^ line) & 7);
    }
    // Start copying D columns of a tile, or decode them.
    template <class F, int D>
    DEV_METHOD void copy(const u8* const* from, u8* lines) const {
        if constexpr (F::FLOAT) {
            const u8* rows[KEYS / LINES];
#pragma unroll
            for (u32 n = 0; n < KEYS / LINES; n++) rows[n] = from[n * LINES + line] + 16 * piece;
            const u32 to = shared_address(lines) + own;
#pragma unroll
            for (u32 i = 0; i < KEYS / LINES * (D / 64); i++) {
                const u32 n = i / (D / 64), block = i % (D / 64);
                copy_16(to + block * BLOCK + n * LINES * LINE, rows[n] + block * LINE);
            }
        } else {
#pragma unroll 1
            for (u32 i = 0; i < KEYS / LINES * (D / 64); i++) {
                const u32 n = i / (D / 64), block = i % (D / 64), d = 64 * block + 8 * piece;
                const u8* const row = from[n * LINES + line];
                u32 pairs[4];
                for (int p = 0; p < 4; p++)
                    pairs[p] = Half::pack(load_number<F>(row, d + 2 * p), load_number<F>(row, d + 2 * p + 1));
                *(uint4*)(lines + own + block * BLOCK + n * LINES * LINE) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }
};

// Tell the compiler that a number is warp-uniform.
DEV int shared_by_warp(int x) { return __reduce_max_sync(~0u, x); }

// Queries of a warpgroup (64 of ROWS): in swizzled shared memory or, with KEPT, in registers.
template <class E, int KIND, int ROWS, int D, bool EXACT, bool KEPT>
struct Queries {
    static constexpr int COPIES = EXACT ? 2 : 1, BYTES = COPIES * ROWS * D * 2, STEPS = D / 16;
    typedef Product<KIND == BF16 ? BF16_KIND : F16_KIND, KEYS> Scores;
    u64 at;                                   // descriptor of the warpgroup's rows
    u32 kept[KEPT ? COPIES * STEPS : 1][4];  // the same rows in registers

    // Fill all ROWS vectors; the caller synchronizes.
    static DEV_METHOD void fill(const Tile& t, const u8* queries, i64 row_bytes, int kind, u8* lines) {
        const auto place = [&](int copy, int m, int d) {
            return (u32*)(lines + copy * (ROWS * D * 2) + swizzled_offset<ROWS>(m, d / 8) + d % 8 * 2);
        };
        load_queries<E, ROWS, D, EXACT>(t, queries, row_bytes, kind, place);
    }
    DEV_METHOD void start(const u8* lines, int warpgroup) {
        at = describe_lines(shared_by_warp(shared_address(lines) + 64 * warpgroup * LINE));
        if constexpr (KEPT) {
            const int lane = threadIdx.x & 31, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
            for (int i = 0; i < COPIES * STEPS; i++)
                load_matrices(kept[i], (const u16*)(lines + i / STEPS * (ROWS * D * 2) + 64 * warpgroup * LINE +
                                                    swizzled_offset<ROWS>(row, i % STEPS * 2 + lane / 16)));
        }
    }
    // Start Q K^T of a tile; `s` is in use until the products are waited for.
    DEV_METHOD void score(float (&s)[KEYS / 2], const u8* keys) const {
        const u64 first = describe_lines(shared_by_warp(shared_address(keys)));
        hold(s);
        start_products();
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const u64 lines = lines_behind(first, i / 4 * BLOCK + i % 4 * 32);
            if (EXACT) add<1>(s, i, lines, i > 0);
            add<0>(s, i, lines, EXACT || i > 0);
        }
        end_products();
    }

  private:
    template <int COPY>
    DEV_METHOD void add(float (&s)[KEYS / 2], int i, u64 lines, bool more) const {
        if constexpr (KEPT) Scores::run(s, kept[COPY * STEPS + i], lines, more);
        else Scores::run(s, lines_behind(at, COPY * (ROWS * D * 2) + i / 4 * (ROWS * LINE) + i % 4 * 32), lines, more);
    }
};

// Start P V of a tile; `o` and the weights are in use until the products are waited for.
template <int KIND, int D, bool EXACT>
DEV void accumulate_pv_wgmma(float (&o)[D / 2], const u32 (*p)[4], const u32 (*rest)[4], const u8* values) {
    typedef Product<KIND == BF16 ? BF16_KIND : F16_KIND, D, true> Sums;
    const u64 first = describe_lines(shared_by_warp(shared_address(values)), BLOCK);
    hold(o);
    start_products();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        const u64 lines = lines_behind(first, i * 16 * LINE);
        Sums::run(o, p[i], lines, true);
        if (EXACT) Sums::run(o, rest[i], lines, true);
    }
    end_products();
}
