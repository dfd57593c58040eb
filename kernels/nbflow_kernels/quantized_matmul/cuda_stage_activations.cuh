// Activations as MMA operands, in chunks of 128 columns, with one of three precisions.
//
// F32_SUMS   The chunk of a token is scaled by a power of two that brings the largest magnitude to
//            2**14..2**15; then x = high + low, high a multiple of 16 and both float16: exact to 2**-9,
//            which is 2**-23 of the chunk's largest.  Both are scaled by 2**-position of the code
//            field that they meet.  Two MMAs.
// INT8_SUMS  Codes of int8 activations as float16 numbers: sums of products with the codes of weights are
//            exact integers, and one MMA is enough.  32 columns share a scale.
// BF16_SUMS  Numbers rounded to bfloat16, for weights in bfloat16 (`cuda_bf16.cuh`).
//
// A *record* of a chunk is
//
//   fragments  [4 groups of 32 columns][high, low][token][t]: 16 bytes, the operand of two steps;
//              `low` only with F32_SUMS; a BF16_SUMS record has nothing else
//   sums       [token] of the groups of columns that share a scale, divided by SUB_BLOCK: two groups'
//              high parts in float16, then their low parts; or without TENSOR_SUMS float32, and times
//              -ZERO without mins
//   scales     [4 groups of 32 columns][token]: float32, of 8-bit activations
//   factors    [token]: float32, the inverse of the scaling
#pragma once
#include "formats/decode_mma.cuh"

#ifndef ARITHMETIC
#define ARITHMETIC 0
#endif
enum { F32_SUMS, INT8_SUMS, BF16_SUMS };

constexpr int FRAGMENT_PARTS = ARITHMETIC == F32_SUMS ? 2 : 1;

template <int NB>  // tokens: 1, 2, 4 or 8
struct Record {
  static constexpr int GROUP = 64 * FRAGMENT_PARTS * NB;  // bytes of 32 columns
  static constexpr int SUMS = 4 * GROUP;
  static constexpr int TOKEN = 8 * SUM_PAIRS;  // bytes of a token's sums
  static constexpr int SCALES_AT = SUMS + NB * TOKEN;
  static constexpr int FACTORS = SCALES_AT + (ARITHMETIC == INT8_SUMS ? 16 * NB : 0);
  static constexpr int BYTES = ARITHMETIC == BF16_SUMS ? SUMS : (FACTORS + 4 * NB + 15) / 16 * 16;

  // A lane has the results of columns 2 t and 2 t + 1 of the operand.  Up to 4 tokens take the even
  // columns; the odd results are skipped.
  static constexpr int RESULTS = NB == 8 ? 2 : 1;

  DEV static int token_of_column(int n) { return NB == 8 ? n : min(n >> 1, NB - 1); }
  DEV static int token(int t, int e) { return token_of_column(2 * t + e); }
};

DEV float lane_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}

// Load four columns from `k` on of a row of n, with zeros past its end.
DEV float4 load_four(const float* row, int k, int n, bool wide) {
  if (wide && k + 4 <= n) return *(const float4*)(row + k);
  float4 v;
  v.x = k < n ? row[k] : 0.0f;
  v.y = k + 1 < n ? row[k + 1] : 0.0f;
  v.z = k + 2 < n ? row[k + 2] : 0.0f;
  v.w = k + 3 < n ? row[k + 3] : 0.0f;
  return v;
}

// Int8 codes of activations with a scale per 32 columns (eight lanes); see the Notes of `qmatmul`.
DEV float4 int8_codes(float4 v, float& scale) {
  float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
  for (int o = 1; o < 8; o <<= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
  float inverse = largest >= 7.888609052210118e-31f ? 127.0f / largest : 0.0f;  // 2**-100
  scale = inverse > 0.0f ? largest / 127.0f : 0.0f;
  // 0 * inf = NaN, so non-finite inputs propagate
  if (!(largest <= 3.4028234663852886e38f)) scale = largest;
  return {rintf(v.x * inverse), rintf(v.y * inverse), rintf(v.z * inverse), rintf(v.w * inverse)};
}

// Activations rounded to int8 and dequantized.
DEV float4 rounded_to_int8(float4 v) {
  float scale;
  const float4 q = int8_codes(v, scale);
  return {q.x * scale, q.y * scale, q.z * scale, q.w * scale};
}

// x = high + low for |x| <= 2**15, high a multiple of 16; infinities and NaN stay in `high`.
//
// Tensor cores cut products to 2**-25 (Ampere and Ada: 2**-24) of the largest one, in which a subnormal code
// counts as 2**-14.  Codes times multiples of 16 are multiples of 2**-20, which is more: nothing is cut off.
DEV void split_at_16(float x, float& high, float& low) {
  constexpr float ROUNDS = 201326592.0f;  // 1.5 * 2**27, whose last place is 16
  high = __fadd_rn(__fadd_rn(x, ROUNDS), -ROUNDS);
  low = x - high;
  if (!(low == low)) low = 0.0f;
}

// x = high + low in float16; infinities and NaN stay in `high`.
DEV void split_f16(float x0, float x1, u32& high, u32& low) {
  high = to_f16x2(x0, x1);
  float r0 = x0 - low_f16(high), r1 = x1 - high_f16(high);
  low = to_f16x2(r0 == r0 ? r0 : 0.0f, r1 == r1 ? r1 : 0.0f);
}

// Address of a lane's four columns in the fragments of token n: two words, 16 bytes apart.
//
// Columns 4 * lane to + 3: group of 32, step of 16, half of 8, pairs t and t + 1.
template <int NB>
DEV u8* fragment_of(u8* record, int n, int lane) {
  const int group = lane >> 3, step = (lane >> 2) & 1, j = (lane >> 1) & 1, t = 2 * (lane & 1);
  return record + group * Record<NB>::GROUP + n * 64 + t * 16 + step * 8 + j * 4;
}

// Write token n of a record; by a warp with four columns per lane.
template <int NB>
DEV void stage(float4 v, u8* record, int n, int lane) {
  using Of = Record<NB>;
  u8* to = fragment_of<NB>(record, n, lane);
  if constexpr (ARITHMETIC == BF16_SUMS) {
    *(u32*)to = to_bf16x2(v.x, v.y), *(u32*)(to + 16) = to_bf16x2(v.z, v.w);
    return;
  }
  float4 code = {};
  float scale = 0.0f;
  if constexpr (ARITHMETIC == INT8_SUMS) {
    code = int8_codes(v, scale);
    v = {code.x * scale, code.y * scale, code.z * scale, code.w * scale};
  }
  // fmaxf ignores NaN
  float largest = lane_max(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
  // zero and tiny numbers: as if 2**-112, so that the exponents below stay in range
  u32 exponent = max(__float_as_uint(largest) >> 23, 15u);
  float up = __uint_as_float((268u - exponent) << 23);
  float factor = __uint_as_float((exponent - 14u) << 23);
  v.x *= up, v.y *= up, v.z *= up, v.w *= up;
  float sum = (v.x + v.y) + (v.z + v.w);
#pragma unroll
  for (int o = 1; o < SUB_BLOCK / 4; o <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  if (lane % (SUB_BLOCK / 4) == 0) {
    const int g = lane / (SUB_BLOCK / 4);
    if constexpr (TENSOR_SUMS) {
      u32 high, low;
      split_f16(sum * (1.0f / SUB_BLOCK), 0.0f, high, low);
      u16* at = (u16*)(record + Of::SUMS + n * Of::TOKEN + 8 * (g >> 1)) + (g & 1);
      at[0] = (u16)high, at[2] = (u16)low;
      if (GROUPS == 1) at[1] = 0, at[3] = 0;
    } else {
      float* at = (float*)(record + Of::SUMS + n * Of::TOKEN) + g;
      at[0] = sum * (HAS_MIN ? UNIT : -ZERO * UNIT);
      if (GROUPS == 1) at[1] = 0.0f;  // copied with the rest
    }
  }
  if (lane == 0) *(float*)(record + Of::FACTORS + n * 4) = factor;
  const u32 position = ((u32)POSITIONS >> 4 * (lane >> 1 & 7)) & 15u;
  const float down = __uint_as_float((127u - position) << 23);
  if constexpr (ARITHMETIC == INT8_SUMS) {
    if ((lane & 7) == 0) *(float*)(record + Of::SCALES_AT + 4 * ((lane >> 3) * NB + n)) = scale * up;
    *(u32*)to = to_f16x2(code.x * down, code.y * down);
    *(u32*)(to + 16) = to_f16x2(code.z * down, code.w * down);
  } else {
    float4 high, low;
    split_at_16(v.x, high.x, low.x), split_at_16(v.y, high.y, low.y);
    split_at_16(v.z, high.z, low.z), split_at_16(v.w, high.w, low.w);
    *(u32*)to = to_f16x2(high.x * down, high.y * down);
    *(u32*)(to + 16) = to_f16x2(high.z * down, high.w * down);
    *(u32*)(to + 64 * NB) = to_f16x2(low.x * down, low.y * down);
    *(u32*)(to + 64 * NB + 16) = to_f16x2(low.z * down, low.w * down);
  }
}

// Columns whose products are added before their scale is applied.
// With two CODE_PARTS operands of 64 columns fill the registers.
constexpr int PIECE = ARITHMETIC == INT8_SUMS && SUB_BLOCK > 32 ? 32
                      : CODE_PARTS == 2 && SUB_BLOCK > 64 && !HAS_MIN ? 64 : SUB_BLOCK;
static_assert(CODE_PARTS == 1 || ARITHMETIC != INT8_SUMS, "floats take no int8 activations");
static_assert(ARITHMETIC != INT8_SUMS || TENSOR_SUMS || !(HAS_ZERO || HAS_MIN), "sums are not integers");

// acc += factor * scale * (codes . x) + ..., for R row tiles and the tokens of a record.
//
// Both numbers of a weight in a codebook of floats are multiplied by `high`; the product of the rests is
// left out, at most 2**-23 of the weight times the chunk's largest activation.
//
// The order of additions depends only on the chunk, so a token's result is the same in every kernel that
// calls this.  before(i) is called before steps 4 i to 4 i + 3.
template <int R, int NB, class Before>
DEV void multiply_chunk(
    Before before, const Table& table, const u32 (*operand)[8][OPERANDS], const Chunk* chunk, const Floats* floats,
    const u8* record, int lane, float (*acc)[4]) {
  using Of = Record<NB>;
  constexpr int E = Of::RESULTS;
  const int t = lane & 3, n = Of::token_of_column(lane >> 2);
  const u8 *fragments = record + n * 64 + t * 16, *all_sums = record + Of::SUMS;
  float part[R][4] = {}, mins[R][4] = {};
  if constexpr (TENSOR_SUMS) {
    uint2 sums = *(const uint2*)(all_sums + n * Of::TOKEN + t % SUM_PAIRS * 8);
    if (t >= SUM_PAIRS) sums = {0, 0};
#pragma unroll
    for (int r = 0; r < R; r++) {
      const u32 a0 = sum_operand(chunk[r].scales[0], t), a1 = sum_operand(chunk[r].scales[1], t);
      mma_f16_k8(mins[r], a0, a1, sums.x);
      mma_f16_k8(mins[r], a0, a1, sums.y);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if constexpr (!TWO_FLOATS) part[r][i] = SUM_FACTOR * mins[r][i];
    }
  }
  uint4 x[FRAGMENT_PARTS];
#pragma unroll
  for (int p = 0; p < CHUNK / PIECE; p++) {
    const int g = p * PIECE / SUB_BLOCK;
    // without TENSOR_SUMS: sums of the activations, and their product with -ZERO
    float sum[2] = {}, zeros[2] = {};
    if constexpr (!TENSOR_SUMS && (HAS_ZERO || HAS_MIN)) {
#pragma unroll
      for (int e = 0; e < E; e++) sum[e] = *(const float*)(all_sums + Of::token(t, e) * Of::TOKEN + 4 * g);
    }
    if constexpr (!TENSOR_SUMS && HAS_ZERO) {
#pragma unroll
      for (int e = 0; e < E; e++) zeros[e] = HAS_MIN ? -ZERO * sum[e] : sum[e];
    }
    float x_scale[2] = {1.0f, 1.0f};
    if constexpr (ARITHMETIC == INT8_SUMS) {
#pragma unroll
      for (int e = 0; e < E; e++)
        x_scale[e] = *(const float*)(record + Of::SCALES_AT + 4 * (p * PIECE / 32 * NB + Of::token(t, e)));
    }
    float c[R][4] = {};
    // all `high` products first, whose sum is exact; of floats, whose is not, the small products first
#pragma unroll
    for (int pass = 0; pass < FRAGMENT_PARTS; pass++)
#pragma unroll
      for (int step = p * PIECE / 16; step < (p + 1) * PIECE / 16; step++) {
        const int low = CODE_PARTS == 2 ? 1 - pass : pass;
        if (pass == 0 && step % 4 == 0) before(step / 4);
        if (step % 2 == 0) x[low] = *(const uint4*)(fragments + (step / 2) * Of::GROUP + low * 64 * NB);
#pragma unroll
        for (int r = 0; r < R; r++)
          mma_f16(c[r], operand[r][step], step % 2 ? x[low].z : x[low].x, step % 2 ? x[low].w : x[low].y);
        if (CODE_PARTS == 2 && pass == 0) {  // the weights' rests
          if (step % 2 == 0) x[0] = *(const uint4*)(fragments + (step / 2) * Of::GROUP);
#pragma unroll
          for (int r = 0; r < R; r++)
            mma_f16(c[r], operand[r][step] + OPERANDS - 4, step % 2 ? x[0].z : x[0].x,
                    step % 2 ? x[0].w : x[0].y);
        }
      }
    if constexpr (!TENSOR_SUMS && HAS_ZERO) {
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[r][i] += zeros[i % 2];
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float scale = 1.0f, base = 0.0f;
        if constexpr (TENSOR_SUMS) scale = scale_of(table, chunk[r].scales[h], g);
        else scale_of(table, chunk[r].scales[h], g, scale, base);
#pragma unroll
        for (int e = 0; e < E; e++) {
          const float both = ARITHMETIC == INT8_SUMS ? __fmul_rn(scale, x_scale[e]) : scale;
          part[r][2 * h + e] = fmaf(both, c[r][2 * h + e], part[r][2 * h + e]);
          if constexpr (HAS_MIN && !TENSOR_SUMS) {
            float& to = TWO_FLOATS ? mins[r][2 * h + e] : part[r][2 * h + e];
            to = fmaf(base, sum[e], to);
          }
        }
      }
    }
  }
#pragma unroll
  for (int e = 0; e < E; e++) {
    const float factor = *(const float*)(record + Of::FACTORS + 4 * Of::token(t, e));
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int i = 2 * h + e;
        float v = part[r][i];
        if constexpr (HAS_FLOATS) v *= low_f16(floats[r].of_row[h]) * (1.0f / SCALE_UNIT);
        if constexpr (TWO_FLOATS) v = fmaf(-SUM_FACTOR * high_f16(floats[r].of_row[h]), mins[r][i], v);
        acc[r][i] = fmaf(factor, v, acc[r][i]);
      }
    }
  }
}
