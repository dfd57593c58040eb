// Loading and decoding weights in the MMA layout (`nbflow_kernels.formats.layout_mma`).
// The macros of `MmaLayout.defines` specialize it for one format.
#pragma once
#include "cuda/ptx.cuh"

enum { BITS_KIND, PAIRS_KIND, TABLE8_KIND, TABLE16_KIND, E2M1_KIND, FLOATS_KIND, TRELLIS_KIND };
enum { HALF, HALF_MIN, FLOAT, FLOAT_MIN, BYTE, BYTE_MIN, NIBBLE_MIN, E8M0, E4M3, U8_PAIR, UNIT_ONLY };

constexpr int CHUNK = 128;
constexpr bool HAS_MIN = SCALES == HALF_MIN || SCALES == FLOAT_MIN || SCALES == BYTE_MIN ||
                         SCALES == NIBBLE_MIN || SCALES == U8_PAIR;
// Floats stored once per unit and row: d, and d of the mins.
constexpr bool TWO_FLOATS = SCALES == BYTE_MIN || SCALES == NIBBLE_MIN;
constexpr bool HAS_FLOATS = TWO_FLOATS || SCALES == BYTE || SCALES == UNIT_ONLY;
constexpr bool HAS_ZERO = ZERO != 0.0f;
constexpr int GROUPS = CHUNK / SUB_BLOCK;  // sub-blocks of a chunk
// Terms that do not depend on codes (mins, and -ZERO * scale) are multiplied by the activation sums
// in a separate product, which runs on tensor cores if its operands are float16.
constexpr bool MIN_SUMS = !HAS_ZERO && (SCALES == HALF_MIN || TWO_FLOATS);
constexpr bool ZERO_SUMS = HAS_ZERO && (SCALES == HALF || SCALES == BYTE);
constexpr bool TENSOR_SUMS = MIN_SUMS || ZERO_SUMS;
constexpr int SUM_PAIRS = GROUPS > 1 ? GROUPS / 2 : 1;
constexpr int ENTRY = SCALES == FLOAT_MIN ? 8
                      : SCALES == HALF_MIN || SCALES == FLOAT ? 4
                      : SCALES == HALF || SCALES == BYTE_MIN || SCALES == U8_PAIR ? 2
                      : SCALES == UNIT_ONLY ? 0 : 1;
constexpr int ROW_BYTES = ENTRY * GROUPS, ROW_WORDS = (ROW_BYTES + 3) / 4;
// A trellis has the bits of the stream before the second chunk in the upper half.
constexpr int FLOAT_BYTES = TWO_FLOATS || KIND == TRELLIS_KIND ? 4 : HAS_FLOATS ? 2 : 0;
constexpr int CHUNK_WORDS = KIND == PAIRS_KIND ? 7 : 2 * BITS;
constexpr int CHUNK_BYTES = 16 * ROW_BYTES + 128 * CHUNK_WORDS;
constexpr int UNIT_BYTES = 16 * FLOAT_BYTES + 2 * CHUNK_BYTES;
// Masked bit fields are subnormal float16, code * 2**-24 (times 2**position of the slot); E2M1 codes
// are value * 2**-15, codebooks of floats value * 2**10, and a trellis has the values themselves.  Activation sums have the same factor; results are multiplied by its inverse.
constexpr float SUBNORMAL = 5.9604644775390625e-8f;
constexpr float UNIT = KIND == E2M1_KIND     ? 3.0517578125e-5f
                       : KIND == FLOATS_KIND  ? 1024.0f
                       : KIND == TRELLIS_KIND ? 1.0f
                                              : SUBNORMAL;
constexpr float OUT = FACTOR / UNIT;
// Float16 numbers that add up to a weight's value; of floats the second is the rest, to 2**-24 of it.
constexpr int CODE_PARTS = KIND == FLOATS_KIND ? 2 : 1;

// ---- loads ---------------------------------------------------------------------------------------

// Load N bytes from an address aligned to min(N, 16).
template <int N>
DEV void load_bytes(u32* to, const u8* at) {
  if constexpr (N >= 16) {
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
      uint4 q = stream_16(at + 16 * i);
      to[4 * i] = q.x, to[4 * i + 1] = q.y, to[4 * i + 2] = q.z, to[4 * i + 3] = q.w;
    }
  } else if constexpr (N == 8) {
    uint2 q = stream_8(at);
    to[0] = q.x, to[1] = q.y;
  } else if constexpr (N == 4) {
    to[0] = stream_4(at);
  } else if constexpr (N == 2) {
    to[0] = *(const u16*)at;
  } else if constexpr (N == 1) {
    to[0] = *at;
  }
}

// A lane's fragment of a chunk: the scales of rows g and g + 8, and its words.
struct Chunk {
  u32 scales[2][ROW_WORDS ? ROW_WORDS : 1];
  u32 w[CHUNK_WORDS];

  DEV void load_scales(const u8* chunk, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++)
      load_bytes<ROW_BYTES>(scales[h], chunk + ((lane >> 2) + 8 * h) * ROW_BYTES);
  }

  DEV void load_words(const u8* chunk, int lane) {
    constexpr int FOURS = CHUNK_WORDS / 4, AT = FOURS * 512;
    chunk += 16 * ROW_BYTES;
#pragma unroll
    for (int v = 0; v < FOURS; v++) {
      uint4 q = stream_16(chunk + v * 512 + lane * 16);
      w[4 * v] = q.x, w[4 * v + 1] = q.y, w[4 * v + 2] = q.z, w[4 * v + 3] = q.w;
    }
    if constexpr ((CHUNK_WORDS & 2) != 0) {
      uint2 q = stream_8(chunk + AT + lane * 8);
      w[4 * FOURS] = q.x, w[4 * FOURS + 1] = q.y;
    }
    if constexpr ((CHUNK_WORDS & 1) != 0)
      w[CHUNK_WORDS - 1] = stream_4(chunk + AT + ((CHUNK_WORDS & 2) != 0 ? 256 : 0) + lane * 4);
  }
};

// The floats of a unit for rows g and g + 8.
struct Floats {
  u32 of_row[2];

  DEV void load(const u8* unit, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++)
      load_bytes<FLOAT_BYTES>(&of_row[h], unit + ((lane >> 2) + 8 * h) * FLOAT_BYTES);
  }
};

// Address of chunk `odd` (0 or 1) of a unit.
DEV const u8* chunk_of(const u8* unit, int odd) { return unit + 16 * FLOAT_BYTES + odd * CHUNK_BYTES; }

// ---- codes ---------------------------------------------------------------------------------------

// One bit field in both 16-bit halves: two codes as subnormal float16.
#define FIELD(word, mask) ((word) & (mask) * 0x10001u)

template <int N>
struct Fields {  // decode the words of a tile of 64 columns to slots, a: rows g, b: rows g + 8
  static DEV void decode(const u32* w, u32* a, u32* b) {}  // unsupported width
};

template <>
struct Fields<1> {
  static DEV void decode(const u32* w, u32* a, u32* b) {
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = FIELD(w[0], 1u << i), b[i] = FIELD(w[0] >> 8, 1u << i);
  }
};

template <>
struct Fields<2> {
  static DEV void row(u32 w, u32* h) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      h[i] = FIELD(w, 3u << 2 * i);
      h[4 + i] = FIELD(w >> 8, 3u << 2 * i);
    }
  }
  static DEV void decode(const u32* w, u32* a, u32* b) { row(w[0], a), row(w[1], b); }
};

template <>
struct Fields<3> {  // five codes per word; the top bits of the three words form the last code
  static DEV void row(u32 w, u32* h) {
    h[0] = FIELD(w, 7u), h[1] = FIELD(w, 0x38u), h[2] = FIELD(w, 0x1c0u);
    h[3] = FIELD(w >> 9, 7u), h[4] = FIELD(w >> 9, 0x38u);
  }
  static DEV void decode(const u32* w, u32* a, u32* b) {
    row(w[0], a), row(w[1], b);
    a[5] = FIELD(w[2], 7u), a[6] = FIELD(w[2], 0x38u), a[7] = FIELD(w[2], 0x1c0u);
    b[5] = FIELD(w[2] >> 9, 7u), b[6] = FIELD(w[2] >> 9, 0x38u);
    b[7] = FIELD(w[0] >> 9, 0x40u) | FIELD(w[1] >> 8, 0x80u) | FIELD(w[2] >> 7, 0x100u);
  }
};

template <>
struct Fields<4> {
  static DEV void decode(const u32* w, u32* a, u32* b) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
      a[2 * s] = FIELD(w[s], 15u), a[2 * s + 1] = FIELD(w[s], 0xf0u);
      b[2 * s] = FIELD(w[s] >> 8, 15u), b[2 * s + 1] = FIELD(w[s] >> 8, 0xf0u);
    }
  }
};

template <>
struct Fields<5> {  // three codes per word; the top bits of the five words form the last code
  static DEV void three(u32 w, u32* h) {
    h[0] = FIELD(w, 31u), h[1] = FIELD(w, 0x3e0u), h[2] = FIELD(w >> 10, 31u);
  }
  static DEV void decode(const u32* w, u32* a, u32* b) {
    three(w[0], a), three(w[1], a + 3), three(w[2], b), three(w[3], b + 3);
    a[6] = FIELD(w[4], 31u), a[7] = FIELD(w[4], 0x3e0u), b[6] = FIELD(w[4] >> 10, 31u);
    b[7] = FIELD(w[0] >> 10, 0x20u) | FIELD(w[1] >> 9, 0x40u) | FIELD(w[2] >> 8, 0x80u) |
           FIELD(w[3] >> 7, 0x100u) | FIELD(w[4] >> 6, 0x200u);
  }
};

template <>
struct Fields<6> {  // two codes per word; the four top bits of three words form two more
  static DEV void row(const u32* w, u32* h) {
#pragma unroll
    for (int i = 0; i < 3; i++) h[2 * i] = FIELD(w[i], 63u), h[2 * i + 1] = FIELD(w[i] >> 6, 63u);
    h[6] = FIELD(w[0] >> 6, 0x3c0u) | FIELD(w[2] >> 8, 0x30u);
    h[7] = FIELD(w[1] >> 6, 0x3c0u) | FIELD(w[2] >> 10, 0x30u);
  }
  static DEV void decode(const u32* w, u32* a, u32* b) { row(w, a), row(w + 3, b); }
};

// Zero-extend four bytes to two words of 16-bit pairs.
DEV void widen(u32 bytes, u32* to) {
  to[0] = prmt(bytes, 0, 0x4140u), to[1] = prmt(bytes, 0, 0x4342u);
}

// Move sign and three bits of E2M1 codes to float16 positions: value * 2**-15, |value| 0 to 12.
DEV void decode_e2m1(const u32* w, u32* a, u32* b) {
#pragma unroll
  for (int s = 0; s < 4; s++) {
    a[2 * s] = FIELD(w[s], 0x8e00u), a[2 * s + 1] = FIELD(w[s] << 3, 0x8e00u);
    b[2 * s] = FIELD(w[s] << 6, 0x0e00u) | FIELD(w[s] << 1, 0x8000u);
    b[2 * s + 1] = FIELD(w[s] << 9, 0x0e00u) | FIELD(w[s] << 2, 0x8000u);
  }
}

template <>
struct Fields<8> {
  static DEV void decode(const u32* w, u32* a, u32* b) {
#pragma unroll
    for (int s = 0; s < 4; s++) widen(w[s], a + 2 * s), widen(w[4 + s], b + 2 * s);
  }
};

static __constant__ u32 CODEBOOK_WORDS[] = {LANE_WORDS};
static __constant__ u32 MASKS[] = {0x00ff00ffu, 0x0f0f0f0fu, 0x03030303u};

// Codebook and other constants kept in registers, since they do not fit instruction immediates.
struct Table {
  u32 words[4], order, exponent;
  u32 entry;  // a codebook across the lanes: 16 floats, or 128 bytes
  u32 halves;  // the float16 numbers of a float; of a trellis a mask, as the next two
  u32 nibbles, twos;
  u32 shift, bytes;  // place of this lane's two of eight columns in a stream: in bits; for `prmt`

  // The compiler would rematerialize constants at each use: XOR with `zero` (0 at run time) hides
  // that they are constant, the shuffle that they are uniform.
  DEV void load(int zero, int lane) {
    const u32 given[4] = {TABLE_0, TABLE_1, TABLE_2, TABLE_3};
    auto hidden = [&](u32 v) { return __shfl_sync(0xffffffffu, v ^ zero, lane); };
    constexpr int N = KIND == TABLE16_KIND || KIND == TRELLIS_KIND ? 4 : KIND == TABLE8_KIND ? 2 : 0;
#pragma unroll
    for (int i = 0; i < N; i++) words[i] = hidden(given[i]);
    if (KIND == TABLE16_KIND) order = hidden(0x32103210u);
    if (SCALES == BYTE || SCALES == NIBBLE_MIN || SCALES == U8_PAIR) exponent = hidden(0x4b000000u);
    else exponent = 0x4b000000u;  // exponent of 2**23: a byte below it makes the float 2**23 + byte
    if constexpr (KIND == FLOATS_KIND || KIND == TRELLIS_KIND) load_lanes(lane);
    if constexpr (KIND == TRELLIS_KIND) halves = MASKS[-zero], nibbles = MASKS[1 - zero], twos = MASKS[2 - zero];
  }

  DEV void load_lanes(int lane) {
    entry = CODEBOOK_WORDS[lane % (sizeof(CODEBOOK_WORDS) / 4)];  // 16 are repeated
    if constexpr (KIND == FLOATS_KIND) {
      const float value = UNIT * __uint_as_float(entry);
      const float high = low_f16(to_f16x2(value, 0.0f));
      halves = to_f16x2(high, value - high);
    }
    shift = 2 * BITS * (lane & 3), bytes = 0x43u + 0x11u * (lane & 3);
  }

  // Look up the bytes of nibbles 0..3 and 4..7.
  DEV void look_up(u32 nibbles, u32& low, u32& high) const {
    if constexpr (KIND == TABLE8_KIND) {
      low = prmt(words[0], words[1], nibbles);
      high = prmt(words[0], words[1], nibbles >> 16);
    } else if constexpr (((TABLE_0 | TABLE_1 | TABLE_2 | TABLE_3) & 0x80808080u) == 0) {
      // a prmt selector of 8 or more replicates the sign of the byte that its low bits select
      u32 others = nibbles ^ 0x88888888u;
      low = prmt(words[0], words[1], nibbles) | prmt(words[2], words[3], others);
      high = prmt(words[0], words[1], nibbles >> 16) | prmt(words[2], words[3], others >> 16);
    } else {
      u32 i = nibbles & 0x77777777u, which = ((nibbles >> 1) & 0x44444444u) | order;
      low = prmt(prmt(words[0], words[1], i), prmt(words[2], words[3], i), which);
      i >>= 16, which >>= 16;
      high = prmt(prmt(words[0], words[1], i), prmt(words[2], words[3], i), which);
    }
  }

  // The value of the code in the lowest 4 bits; by all lanes of a warp, as all that follow.
  DEV float value_of(u32 code) const {
    return __uint_as_float(__shfl_sync(0xffffffffu, entry, code));
  }

  DEV void decode(const u32* w, u32* a, u32* b) const {
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 nibbles = w[s & (KIND == TABLE8_KIND ? 1 : 3)], low, high;
      if constexpr (KIND == TABLE8_KIND) {
        nibbles = (w[s >> 1] >> 2 * (s & 1)) & 0x33333333u;
        nibbles |= (s < 3 ? w[2] << (2 - s) : w[2] >> 1) & 0x44444444u;
      }
      look_up(nibbles, low, high);
      widen(low, a + 2 * s);
      widen(high, b + 2 * s);
    }
  }
};

// Split pair codes p = x + 11 y, given as masked bit fields.  (1024 + p) / 11 + 930.9 rounds to
// 1025 + floor(p / 11) for all p in 0..120; the rest is exact: y * 2**-10 and x * 2**-24.
DEV void split_pair(u32 p, u32& x, u32& y) {
  u32 high = fma_f16x2(p | 0x64006400u, 0x2dd12dd1u, 0x63476347u);
  y = fma_f16x2(high, 0x14001400u, 0xbc01bc01u);
  x = fma_f16x2(y, 0x91809180u, p);
}

DEV void decode_pairs(const u32* w, int tile, u32 operand[4][4]) {
  u32 p[8];
  if (tile == 0) {
#pragma unroll
    for (int i = 0; i < 4; i++) p[2 * i] = FIELD(w[i], 127u), p[2 * i + 1] = FIELD(w[i] >> 7, 127u);
  } else {
#pragma unroll
    for (int i = 0; i < 3; i++)
      p[2 * i] = FIELD(w[4 + i], 127u), p[2 * i + 1] = FIELD(w[4 + i] >> 7, 127u);
    p[6] = FIELD(w[0] >> 14, 3u) | FIELD(w[1] >> 12, 12u) | FIELD(w[2] >> 10, 0x30u) |
           FIELD(w[3] >> 8, 0x40u);
    p[7] = FIELD(w[4] >> 14, 3u) | FIELD(w[5] >> 12, 12u) | FIELD(w[6] >> 10, 0x30u) |
           FIELD(w[3] >> 9, 0x40u);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) split_pair(p[i], operand[i >> 1][i & 1], operand[i >> 1][2 + (i & 1)]);
}

#include "formats/decode_mma_lanes.cuh"

// Decode 64 columns of a chunk to codes in the order of the A fragments of four MMA steps: pairs of
// float16 numbers, or of indices of a codebook of floats.
DEV void codes_of_tile(
    const Table& table, const Chunk& chunk, const Floats& floats, int odd, int tile, u32 pairs[4][4]) {
  const u32* w = chunk.w;
  if constexpr (KIND == PAIRS_KIND) {
    decode_pairs(w, tile, pairs);
  } else {
    u32 a[8], b[8];
    if constexpr (KIND == BITS_KIND) Fields<BITS>::decode(w + tile * BITS, a, b);
    else if constexpr (KIND == E2M1_KIND) decode_e2m1(w + tile * BITS, a, b);
    else if constexpr (KIND == FLOATS_KIND) indices_of_floats(w + tile * BITS, a, b);
    else if constexpr (KIND == TRELLIS_KIND) decode_trellis(table, w, floats, odd, tile, a, b);
    else table.decode(w + tile * BITS, a, b);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32* o = pairs[s];
      o[0] = a[2 * s], o[1] = b[2 * s], o[2] = a[2 * s + 1], o[3] = b[2 * s + 1];
    }
  }
}

// The values of a pair of codes, whose float16 numbers are 2**-24 times 2**position of them.
DEV float2 values_of(const Table& table, u32 pair, u32 position) {
  if constexpr (KIND == FLOATS_KIND) {
    return make_float2(table.value_of(pair), table.value_of(pair >> 16));
  } else {
    const float up = __uint_as_float((127u - position) << 23) / UNIT;
    return make_float2(fmaf(low_f16(pair), up, -ZERO), fmaf(high_f16(pair), up, -ZERO));
  }
}

// Operands of an MMA step: the A fragment, and with two CODE_PARTS that of the rests.
constexpr int OPERANDS = 4 * CODE_PARTS;

// Decode 64 columns of chunk `odd` of a unit to the operands of four MMA steps.
template <int N>
DEV void decode_tile(
    const Table& table, const Chunk& chunk, const Floats& floats, int odd, int tile, u32 (*operand)[N]) {
  static_assert(N == OPERANDS);
  if constexpr (N == 8) {
    u32 pairs[4][4];
    codes_of_tile(table, chunk, floats, odd, tile, pairs);
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) look_up_floats(table, pairs[s][i], operand[s][i], operand[s][4 + i]);
  } else {
    codes_of_tile(table, chunk, floats, odd, tile, operand);
  }
}

// ---- scales --------------------------------------------------------------------------------------

// Byte `i` of words as a float, minus `zero`: the float 2**23 + byte has the bits 0x4b0000 byte.
DEV float byte_at(const Table& table, const u32* words, int i, int zero = 0) {
  return __uint_as_float(prmt(words[i >> 2], table.exponent, 0x7540u + (i & 3))) - (8388608.0f + zero);
}

// u / n, correctly rounded for bytes and the n used here: `inverse` is 1 / n, `rest` its rounding error.
DEV float divided(float u, float inverse, float rest) { return fmaf(u, inverse, u * rest); }

// Scale and base of sub-block `i` of a chunk's row, without d if it is stored per unit.
DEV void scale_of(const Table& table, const u32* words, int i, float& scale, float& base) {
  scale = 1.0f, base = 0.0f;
  if constexpr (SCALES == HALF) scale = (i & 1) ? high_f16(words[i >> 1]) : low_f16(words[i >> 1]);
  if constexpr (SCALES == HALF_MIN) scale = low_f16(words[i]), base = high_f16(words[i]);
  if constexpr (SCALES == FLOAT) scale = __uint_as_float(words[i]);
  if constexpr (SCALES == FLOAT_MIN)
    scale = __uint_as_float(words[2 * i]), base = __uint_as_float(words[2 * i + 1]);
  if constexpr (SCALES == BYTE) scale = byte_at(table, words, i, SCALE_ZERO);
  if constexpr (SCALES == BYTE_MIN) scale = byte_at(table, words, 2 * i), base = byte_at(table, words, 2 * i + 1);
  if constexpr (SCALES == NIBBLE_MIN) {
    u32 low = words[i >> 2] & 0x0f0f0f0fu, high = (words[i >> 2] >> 4) & 0x0f0f0f0fu;
    scale = byte_at(table, &low, i & 3), base = byte_at(table, &high, i & 3);
  }
  if constexpr (SCALES == E8M0) {  // 2**(e - 127); the smallest is subnormal
    u32 e = prmt(words[i >> 2], 0, 0x0444u | (i & 3) << 12) >> 1;
    scale = __uint_as_float(max(e, 0x00400000u));
  }
  if constexpr (SCALES == E4M3)  // float16 has one exponent bit more
    scale = low_f16(((words[i >> 2] >> 8 * (i & 3)) & 127u) << 7);
  if constexpr (SCALES == U8_PAIR) {
    scale = divided(byte_at(table, words, 2 * i), 0.001f, -4.749745e-11f);
    base = divided(byte_at(table, words, 2 * i + 1), 0.01f, 2.2351741e-10f) - 1.0f;
  }
  if constexpr (HAS_MIN && FACTOR != 1.0f) base *= 1.0f / FACTOR;  // results are multiplied by FACTOR
}

// Scale of sub-block `i` for matmuls, times SCALE_UNIT: integer scales of formats with mins are used
// as subnormal float16, like codes.
constexpr float SCALE_UNIT = TENSOR_SUMS && TWO_FLOATS ? SUBNORMAL : 1.0f;

DEV float scale_of(const Table& table, const u32* words, int i) {
  if constexpr (SCALES == NIBBLE_MIN) {
    u32 pair = (words[i >> 2] >> 8 * (i & 1)) & 0x000f000fu;
    return (i & 2) ? high_f16(pair) : low_f16(pair);
  } else if constexpr (SCALES == BYTE_MIN) {
    u32 pair = words[i >> 1] & 0x00ff00ffu;
    return (i & 1) ? high_f16(pair) : low_f16(pair);
  } else {
    float scale, base;
    scale_of(table, words, i, scale, base);
    return scale;
  }
}

// ---- correction terms: operands for the activation sums --------------------------------------------

// Factor of the product with the activation means of sub-blocks, relative to the product of codes.
constexpr float SUM_FACTOR = !TENSOR_SUMS ? 1.0f : SUB_BLOCK * (ZERO_SUMS ? -ZERO * UNIT
                             : SCALES == HALF_MIN ? UNIT / FACTOR
                             : SCALES == NIBBLE_MIN ? 1.0f / (16.0f * FACTOR) : 1.0f / FACTOR);

// Word t % N of N words with stride `step`.
template <int N>
DEV u32 word_of(const u32* words, int t, int step = 1) {
  if constexpr (N == 1) return words[0];
  else if constexpr (N == 2) return t & 1 ? words[step] : words[0];
  else return t & 2 ? word_of<2>(words + 2 * step, t, step) : word_of<2>(words, t, step);
}

// Two float16 operands from a row's scales, for the activation sums of sub-blocks 2 t and 2 t + 1.
// Past the last sub-block the value is arbitrary, since the sums are zero.
DEV u32 sum_operand(const u32* words, int t) {
  if constexpr (SCALES == HALF) {
    return word_of<SUM_PAIRS>(words, t);
  } else if constexpr (SCALES == HALF_MIN) {
    const u32 first = word_of<SUM_PAIRS>(words, t, 2);
    return prmt(first, GROUPS > 1 ? word_of<SUM_PAIRS>(words + 1, t, 2) : 0, 0x7632u);
  } else if constexpr (SCALES == BYTE_MIN) {
    return prmt(word_of<ROW_WORDS>(words, t), 0, 0x4341u);
  } else {  // bytes 2 t and 2 t + 1
    const u32 bytes = prmt(words[0], words[ROW_WORDS - 1], 0x0202u * t + 0x0100u);
    if constexpr (SCALES == NIBBLE_MIN) return bytes & 0x00f000f0u;
    // the float16 1024 + byte, minus 1024 and the zero of the scales
    constexpr u32 ZEROS = (0xe400u | SCALE_ZERO) * 0x10001u;
    return add_f16x2((bytes & 0x00ff00ffu) | 0x64006400u, ZEROS);
  }
}
