// Tensor-core attention over quantized keys and values: codes are operand A (16 keys or 16 columns), query vectors
// are the columns of operand B.
//
// Four vectors take eight columns: two float16 numbers for each.  Those of a query are a multiple of 2**-11 of a power
// of two above its largest number and the remainder, exact to 2**-23 of the largest; the products of the former with
// codes are added exactly.  Those of a weight are the nearest float16 number and the remainder, exact to 2**-22.
// Lane (g, t) = (lane / 4, lane % 4) holds the state of vectors 4 n + t, n < NT.  Rows g and g + 8 of a tile of 16
// keys are neighbours: key 0 4 8 12 2 6 10 14 and the next one, against bank conflicts.
#pragma once
#include "attention/cuda/quantized_kv_loader.cuh"
#include "attention/cuda/online_softmax.cuh"

constexpr float REST = 2048.0f;  // scale of weight remainders: keeps them in float16's normal range

DEV int first_key_of(int g) { return (g & 3) * 4 + (g >> 2) * 2; }

// Hide a value from the compiler, so that constants added to an address stay immediate offsets.
DEV u32 opaque(u32 x) {
    u32 same;
    asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(x));
    return same;
}
DEV void store_shared(u32 at, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }

// Reduce over the lanes of the same vector.
template <class Combine>
DEV float reduce_over_keys(float x, Combine combine) {
#pragma unroll
    for (int step = 4; step < 32; step <<= 1) x = combine(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
DEV float max_over_keys(float x) { return reduce_over_keys(x, [](float a, float b) { return fmaxf(a, b); }); }
DEV float sum_over_keys(float x) { return reduce_over_keys(x, [](float a, float b) { return __fadd_rn(a, b); }); }

// ---- queries -------------------------------------------------------------------------------------

struct Range {
    int low, high;  // visible keys of the item
    float factor;   // of its scores
};

// Stage queries times their factors in operand order (16 bytes per lane and part), their sums over parts (for zero
// points and bases), and their visible ranges.  Padding vectors are zeros.
template <class K, int PARTS, int NT>
DEV void stage_queries(const Tile& t, const u8* queries, i64 row_bytes, int kind, u8* q, float4* sums,
                       Range* ranges) {
    typedef Codes<K> Of;
    const int lane = threadIdx.x & 31, D = t.header[DIM_QK], size = kind == F32 ? 4 : 2;
    const auto at = Of::place(lane);
    const float down = 1.0f / (1 << Of::shift(at.pair));
    for (int m = threadIdx.x / 32; m < 4 * NT; m += WARPS) {
        const bool exists = m < t.n_vectors;
        const int head = exists ? t.head(m) : 0;
        const float factor = pointer<float>(t.header, SCORE_FACTORS)[head];
        const u8* from = queries + (exists ? t.item.row + t.row(m) : 0) * row_bytes + (i64)head * D * size;
        float x[PARTS], largest = 0;
#pragma unroll
        for (int b = 0; b < PARTS; b++) {
            const int d = 32 * b + lane;
            x[b] = exists && d < D ? __fmul_rn(load_float(from + d * size, kind), factor) : 0;
            largest = fmaxf(largest, fabsf(x[b]));
        }
        // a power of two scales the largest to 2**14..2**15; the exponent is clamped for tiny and huge ones
        const u32 exponent = min(max(__float_as_uint(warp_max(largest)) >> 23, 15u), 229u);
        const float up = __uint_as_float((268 - exponent) << 23);
        if (lane == 0) {
            ranges[m] = {0, 0, __uint_as_float((exponent - 14) << 23) / Of::UNIT};
            if (exists) {
                const VisibleKeys seen = visible_keys(t.header, t.item, t.row(m));
                ranges[m].low = max(seen.low, t.item.first_key);
                ranges[m].high = min(seen.high, t.item.end_key);
            }
        }
#pragma unroll
        for (int b = 0; b < PARTS; b++) {
            // tensor cores cut codes times other numbers than multiples of 16, see `split_at_16`
            constexpr float ROUNDS = 201326592.0f;  // 1.5 * 2**27, whose last place is 16
            const float y = __fmul_rn(x[b], up), multiple = __fadd_rn(__fadd_rn(y, ROUNDS), -ROUNDS);
            const u16 high = float_to_half(__fmul_rn(multiple, down));
            const u16 low = float_to_half(__fsub_rn(__fmul_rn(y, down), half_to_float(high)));
            u16* to = (u16*)(q + ((m / 4 * PARTS + b) * 32 + m % 4 * 8 + at.t) * 16) + 2 * at.pair + at.half;
            to[0] = high, to[4 * 8] = low;  // columns 2 (m % 4) and 2 (m % 4) + 1
            float sum = __fadd_rn(half_to_float(high), half_to_float(low)) / down;
            for (int step = 16; step; step >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
            sum *= Of::BASE ? Of::UNIT : -Of::ZERO * Of::UNIT;
            if (lane == 0) sums[b * 4 * NT + m] = {0, sum, 0, sum};  // with the remainders: it is not a multiple
        }
    }
}

// ---- scores --------------------------------------------------------------------------------------

// Dot products of 16 * TILES keys and 4 * NT vectors without the vectors' factors: s[n][2 * tile + j] belongs to the
// lane's vector n and key first_key_of(g) + j of the tile.
template <class K, int PARTS, int NT, int TILES>
DEV void quantized_qk_scores(float (*s)[2 * TILES], const u8* rows, const u8* q, const float4* sums) {
    typedef Codes<K> Of;
    constexpr int ROW = Of::row_bytes(PARTS);
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    rows += first_key_of(g) * ROW;
#pragma unroll
    for (int i = 0; i < 2 * TILES * NT; i++) s[i / (2 * TILES)][i % (2 * TILES)] = 0;
#pragma unroll
    for (int b = 0; b < PARTS; b++) {
        u32 a[TILES][2][4];
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            u32 pairs[4];
            const u8* row = rows + (i / 2 * 16 + i % 2) * ROW;
            Of::of_key(row, ROW, b, t, pairs);
#pragma unroll
            for (int p = 0; p < 4; p++) a[i / 2][p / 2][p % 2 * 2 + i % 2] = pairs[p];
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint4 x = *(const uint4*)(q + ((n * PARTS + b) * 32 + lane) * 16);
            float4 start = {};
            if (Of::BASE || Of::ZERO) start = sums[(b * NT + n) * 4 + t];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                float c[4] = {};
                if (Of::ZERO) c[0] = start.x, c[1] = start.y, c[2] = start.z, c[3] = start.w;
                mma_f16(c, a[tile][0], x.x, x.y);
                mma_f16(c, a[tile][1], x.z, x.w);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const u8* row = rows + (tile * 16 + j) * ROW;
                    float& score = s[n][2 * tile + j];
                    score = __fmaf_rn(Of::scale(row, b), __fadd_rn(c[2 * j], c[2 * j + 1]), score);
                    if (Of::BASE) score = __fmaf_rn(Of::base(row, b), start.y, score);
                }
            }
        }
    }
}

// Online-softmax state of a lane's vectors in this split.
template <int NT>
struct Vectors {
    const Range* ranges;  // in shared memory, from this lane's first vector on
    bool plain;  // no bias, cap or mask
    float row_max[NT], row_sum[NT];  // maxima are in units of log2, see `scaled_max`

    DEV_METHOD Vectors(const Tile& t, const Range* all)
        : ranges(all + threadIdx.x % 4),
          plain(!t.header[SLOPES] && !t.header[BIAS] && !t.header[MASK] && t.cap == 0) {
        restart();
    }
    DEV_METHOD void restart() {
#pragma unroll
        for (int n = 0; n < NT; n++) row_max[n] = MASKED, row_sum[n] = 0;
    }
    // True if any vector sees a key of [base, end).
    DEV_METHOD bool any_visible(int base, int end) const {
        bool sees = false;
#pragma unroll
        for (int n = 0; n < NT; n++) sees = sees || (ranges[4 * n].low < end && ranges[4 * n].high > base);
        return __any_sync(~0u, sees);
    }
    // Apply factors, biases, caps and masks to scores from key `base` on; keys outside a vector's range or from `end` on
    // become MASKED.  Biases, caps and masks are rare and go through `scratch`.
    template <int TILES>
    DEV_METHOD void bias_and_mask(const i64* header, float cap, int base, int end, float (*s)[2 * TILES],
                                  float* scratch) const {
        const int first = base + first_key_of((threadIdx.x & 31) / 4);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) s[n][i] = __fmul_rn(s[n][i], ranges[4 * n].factor);
        if (!plain) {
            const Tile t(header, 4 * NT, cap);
            scratch += threadIdx.x;
#pragma unroll
            for (int i = 0; i < 2 * TILES * NT; i++) scratch[i * THREADS] = s[i / (2 * TILES)][i % (2 * TILES)];
#pragma unroll 1
            for (int i = 0; i < 2 * TILES * NT; i++) {
                const int m = i / (2 * TILES) * 4 + threadIdx.x % 4, j = i % (2 * TILES);
                const int key = first + j / 2 * 16 + j % 2;
                if (m < t.n_vectors) scratch[i * THREADS] = finished(t, m, key, scratch[i * THREADS]);
            }
#pragma unroll
            for (int i = 0; i < 2 * TILES * NT; i++) s[i / (2 * TILES)][i % (2 * TILES)] = scratch[i * THREADS];
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int low = ranges[4 * n].low, high = min(ranges[4 * n].high, end);
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                const int key = first + i / 2 * 16 + i % 2;
                if (key < low || key >= high) s[n][i] = MASKED;
            }
        }
    }
    static DEV_METHOD float finished(const Tile& t, int m, int key, float score) {
        const VisibleKeys seen = visible_keys(t.header, t.item, t.row(m));
        if (key < seen.low || key >= seen.high) return MASKED;
        if (t.header[MASK] && !mask_bit(t.header, seen.mask + key)) return MASKED;
        return biased_score(t.header, score, key - (t.item.position + t.row(m)), t.head(m), t.cap);
    }
    // Softmax weights from scores; `rescale` receives the factors of the accumulators.
    template <int TILES>
    DEV_METHOD void softmax_weights(float (*s)[2 * TILES], float* rescale) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float most = MASKED, sum = 0;
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) most = fmaxf(most, s[n][i]);
            const float before = row_max[n];
            row_max[n] = fmaxf(before, scaled_max(max_over_keys(most)));
            rescale[n] = exp2_fast(before - row_max[n]);
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                s[n][i] = weight(s[n][i], row_max[n]);
                sum = __fadd_rn(sum, s[n][i]);
            }
            row_sum[n] = __fmaf_rn(row_sum[n], rescale[n], sum);
        }
    }
};

// ---- values --------------------------------------------------------------------------------------

// Weights of 16 keys for one part's columns and four vectors: 8 rows of 32 bytes, float16 parts and then remainders;
// the halves of the last four rows are swapped against bank conflicts.
constexpr int WEIGHT_BYTES = 256;

// Write weights times value scales as MMA operands; `bases` accumulates the zero-point or base term of each part.
template <class V, int PARTS, int NT, int TILES>
DEV void store_weights(const float (*p)[2 * TILES], const u8* rows, u8* weights, float (*bases)[PARTS]) {
    typedef Codes<V> Of;
    constexpr int ROW = Of::row_bytes(PARTS);
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    rows += first_key_of(g) * ROW;
    const u32 high_at = opaque(shared_address(weights) + 32 * t + 4 * g);
    const u32 rest_at = opaque(high_at + 128 + (g & 4 ? -16 : 16));
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int b = 0; b < PARTS; b++) {
            const u8 *row = rows + 16 * tile * ROW, *next = row + ROW;
            const float scale = Of::scale(row, b), next_scale = Of::scale(next, b);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const float one = p[n][2 * tile], other = p[n][2 * tile + 1];
                const float x = __fmul_rn(one, scale), y = __fmul_rn(other, next_scale);
                const u32 both = to_f16x2(x, y);
                const float x_rest = __fmaf_rn(one, scale, -low_f16(both));
                const float y_rest = __fmaf_rn(other, next_scale, -high_f16(both));
                const int at = ((tile * PARTS + b) * NT + n) * WEIGHT_BYTES;
                store_shared(high_at + at, both);
                store_shared(rest_at + at, to_f16x2(__fmul_rn(x_rest, REST), __fmul_rn(y_rest, REST)));
                if (Of::BASE) {
                    bases[n][b] = __fmaf_rn(one, Of::base(row, b), bases[n][b]);
                    bases[n][b] = __fmaf_rn(other, Of::base(next, b), bases[n][b]);
                } else if (Of::ZERO) {
                    bases[n][b] = __fadd_rn(bases[n][b], __fadd_rn(x, y));
                }
            }
        }
}

// Accumulate P V: o[n][2 * part + i] is a tile of columns 2 i and 2 i + 1 of a lane's four.
template <class V, int PARTS, int NT, int TILES>
DEV void accumulate_quantized_pv(float (*o)[2 * PARTS][4], const u8* rows, const u8* weights) {
    typedef Codes<V> Of;
    constexpr int ROW = Of::row_bytes(PARTS);
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    rows += 4 * t * ROW;
    // ldmatrix row of this lane: matrix lane / 8 of a tile (the last one repeated), first or last 8 keys
    const int row = (lane & 1) * 4 + (lane >> 1 & 3), half = (lane >> 3 & 1) ^ (lane & 1);
    weights += (TILES > 1 ? lane >> 4 : 0) * PARTS * NT * WEIGHT_BYTES + 32 * row + 16 * half;
#pragma unroll
    for (int b = 0; b < PARTS; b++) {
        u32 w[NT][4];
#pragma unroll
        for (int n = 0; n < NT; n++) load_matrices(w[n], (const u16*)(weights + (b * NT + n) * WEIGHT_BYTES));
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            u32 x[4], y[4];
            const u8* from = rows + 16 * tile * ROW;
            Of::of_values(from, from + ROW, ROW, b, g, x);
            Of::of_values(from + 2 * ROW, from + 3 * ROW, ROW, b, g, y);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 a[4] = {x[2 * i], x[2 * i + 1], y[2 * i], y[2 * i + 1]};
#pragma unroll
                for (int n = 0; n < NT; n++)
                    mma_f16(o[n][2 * b + i], a, w[n][2 * tile], w[n][2 * tile + 1]);
            }
        }
    }
}
