// Weights in units (`nbflow_kernels.quants.units`): loading and decoding, the product with a chunk of
// activations.  Compiled for one format by the macros of `UnitForm.defines`.
#pragma once
#include "cuda/ptx.cuh"

enum { BITS_KIND, PAIRS_KIND, TABLE8_KIND, TABLE16_KIND };
enum { HALF, HALF_MIN, FLOAT, FLOAT_MIN, BYTE, BYTE_MIN, NIBBLE_MIN, E8M0, E4M3, U8_PAIR, UNIT_ONLY };

constexpr int CHUNK = 128;
constexpr bool HAS_MIN = SCALES == HALF_MIN || SCALES == FLOAT_MIN || SCALES == BYTE_MIN ||
                         SCALES == NIBBLE_MIN || SCALES == U8_PAIR;
// Numbers of a row that a unit has one of: d, and the d of the mins.
constexpr bool TWO_FLOATS = SCALES == BYTE_MIN || SCALES == NIBBLE_MIN;
constexpr bool HAS_FLOATS = TWO_FLOATS || SCALES == BYTE || SCALES == UNIT_ONLY;
constexpr bool HAS_ZERO = ZERO != 0.0f;
constexpr int GROUPS = CHUNK / SUB_BLOCK;  // sub-blocks of a chunk
constexpr int ENTRY = SCALES == FLOAT_MIN ? 8
                      : SCALES == HALF_MIN || SCALES == FLOAT ? 4
                      : SCALES == HALF || SCALES == BYTE_MIN || SCALES == U8_PAIR ? 2
                      : SCALES == UNIT_ONLY ? 0 : 1;
constexpr int ROW_BYTES = ENTRY * GROUPS, ROW_WORDS = (ROW_BYTES + 3) / 4;
constexpr int FLOAT_BYTES = TWO_FLOATS ? 4 : HAS_FLOATS ? 2 : 0;
constexpr int CHUNK_WORDS = KIND == PAIRS_KIND ? 7 : 2 * BITS;
constexpr int CHUNK_BYTES = 16 * ROW_BYTES + 128 * CHUNK_WORDS;
constexpr int UNIT_BYTES = 16 * FLOAT_BYTES + 2 * CHUNK_BYTES;
// Masked fields are subnormal float16 numbers, code * 2**-24 (times 2**position of the slot).
// Sums of activations are kept in the same unit, and results are multiplied by its inverse.
constexpr float UNIT = 5.9604644775390625e-8f;
constexpr float OUT = FACTOR / UNIT;

// ---- loads ---------------------------------------------------------------------------------------

// A number of bytes at an address that is a multiple of it (of 16, if more).
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

// A lane's part of a chunk: the scales of rows g and g + 8, and its words.
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

// The numbers that a unit has one of, for rows g and g + 8.
struct Floats {
  u32 of_row[2];

  DEV void load(const u8* unit, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++)
      load_bytes<FLOAT_BYTES>(&of_row[h], unit + ((lane >> 2) + 8 * h) * FLOAT_BYTES);
  }
};

// Where chunk `odd` of a unit begins.
DEV const u8* chunk_of(const u8* unit, int odd) { return unit + 16 * FLOAT_BYTES + odd * CHUNK_BYTES; }

// ---- codes ---------------------------------------------------------------------------------------

// One field of both halves: code * 2**position of the unit.
#define FIELD(word, mask) ((word) & (mask) * 0x10001u)

template <int N>
struct Fields {  // the words of a tile of 64 columns to its slots, a: rows g, b: rows g + 8
  static DEV void decode(const u32* w, u32* a, u32* b) {}  // no such number of bits
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
struct Fields<3> {  // five codes to a word, the top bits of the three words are the last code
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
struct Fields<5> {  // three codes to a word, the top bits of the five words are the last code
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
struct Fields<6> {  // two codes to a word, the four top bits of three words are two more
  static DEV void row(const u32* w, u32* h) {
#pragma unroll
    for (int i = 0; i < 3; i++) h[2 * i] = FIELD(w[i], 63u), h[2 * i + 1] = FIELD(w[i] >> 6, 63u);
    h[6] = FIELD(w[0] >> 6, 0x3c0u) | FIELD(w[2] >> 8, 0x30u);
    h[7] = FIELD(w[1] >> 6, 0x3c0u) | FIELD(w[2] >> 10, 0x30u);
  }
  static DEV void decode(const u32* w, u32* a, u32* b) { row(w, a), row(w + 3, b); }
};

// Four bytes as two pairs.
DEV void widen(u32 bytes, u32* to) {
  to[0] = prmt(bytes, 0, 0x4140u), to[1] = prmt(bytes, 0, 0x4342u);
}

template <>
struct Fields<8> {
  static DEV void decode(const u32* w, u32* a, u32* b) {
#pragma unroll
    for (int s = 0; s < 4; s++) widen(w[s], a + 2 * s), widen(w[4 + s], b + 2 * s);
  }
};

// The bytes of a table that the low four nibbles choose.
DEV u32 look_up(const u32* table, u32 nibbles) {
  if constexpr (KIND == TABLE8_KIND) return prmt(table[0], table[1], nibbles);
  // a selector of 8 or more fills with the sign of the byte that its low bits choose
  if constexpr (((TABLE_0 | TABLE_1 | TABLE_2 | TABLE_3) & 0x80808080u) == 0)
    return prmt(table[0], table[1], nibbles) | prmt(table[2], table[3], nibbles ^ 0x8888u);
  u32 low = nibbles & 0x7777u, upper = ((nibbles >> 1) & 0x4444u) | 0x3210u;
  return prmt(prmt(table[0], table[1], low), prmt(table[2], table[3], low), upper);
}

DEV void decode_table(const u32* w, u32* a, u32* b) {
  const u32 words[4] = {TABLE_0, TABLE_1, TABLE_2, TABLE_3};
  u32 table[4];
  // as constants they would be moved to a register for each look-up
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (i < 2 || KIND == TABLE16_KIND) table[i] = __shfl_sync(0xffffffffu, words[i], 0);
#pragma unroll
  for (int s = 0; s < 4; s++) {
    u32 nibbles = w[s & (KIND == TABLE8_KIND ? 1 : 3)];
    if constexpr (KIND == TABLE8_KIND) {
      nibbles = (w[s >> 1] >> 2 * (s & 1)) & 0x33333333u;
      nibbles |= (s < 3 ? w[2] << (2 - s) : w[2] >> 1) & 0x44444444u;
    }
    widen(look_up(table, nibbles), a + 2 * s);
    widen(look_up(table, nibbles >> 16), b + 2 * s);
  }
}

// Pairs p = x + 11 y, as a masked field.  In 1024 + p the multiplication by 1/11 and the sum with
// 930.9 round to 1025 + p / 11, rounded down, for all of 0..120; the rest is exact: y * 2**-10, and
// x in the field's unit.
DEV void split_pair(u32 p, u32& x, u32& y) {
  u32 high = fma_f16x2(p | 0x64006400u, 0x2dd12dd1u, 0x63476347u);
  y = fma_f16x2(high, 0x14001400u, 0xbc01bc01u);
  x = fma_f16x2(y, 0x91809180u, p);
}

DEV void decode_pairs(const u32* w, u32 operand[8][4]) {
  u32 p[16];
#pragma unroll
  for (int i = 0; i < 7; i++) p[2 * i] = FIELD(w[i], 127u), p[2 * i + 1] = FIELD(w[i] >> 7, 127u);
  p[14] = FIELD(w[0] >> 14, 3u) | FIELD(w[1] >> 12, 12u) | FIELD(w[2] >> 10, 0x30u) |
          FIELD(w[3] >> 8, 0x40u);
  p[15] = FIELD(w[4] >> 14, 3u) | FIELD(w[5] >> 12, 12u) | FIELD(w[6] >> 10, 0x30u) |
          FIELD(w[3] >> 9, 0x40u);
#pragma unroll
  for (int i = 0; i < 16; i++) split_pair(p[i], operand[i >> 1][i & 1], operand[i >> 1][2 + (i & 1)]);
}

// A chunk's codes as the operands of its eight steps.
DEV void decode_chunk(const u32* w, u32 operand[8][4]) {
  if constexpr (KIND == PAIRS_KIND) {
    decode_pairs(w, operand);
  } else {
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      u32 a[8], b[8];
      if constexpr (KIND == BITS_KIND) Fields<BITS>::decode(w + tile * BITS, a, b);
      else decode_table(w + tile * BITS, a, b);
#pragma unroll
      for (int s = 0; s < 4; s++) {
        u32* o = operand[4 * tile + s];
        o[0] = a[2 * s], o[1] = b[2 * s], o[2] = a[2 * s + 1], o[3] = b[2 * s + 1];
      }
    }
  }
}

// ---- scales --------------------------------------------------------------------------------------

// The byte `i` of some words as a float, less `zero`: 2**23 + byte has the bits 0x4b0000.. .
DEV float byte_at(const u32* words, int i, int zero = 0) {
  return __uint_as_float(prmt(words[i >> 2], 0x4b000000u, 0x7540u + (i & 3))) - (8388608.0f + zero);
}

// u / n rounded as the division is, for bytes: the quotient corrected by its remainder.
DEV float divided(float u, float n, float inverse) {
  float q = u * inverse;
  return fmaf(fmaf(-q, n, u), inverse, q);
}

// Scale and base of sub-block `i` of a chunk's row; integer ones where d is apart.
DEV void scale_of(const u32* words, int i, float& scale, float& base) {
  scale = 1.0f, base = 0.0f;
  if constexpr (SCALES == HALF) scale = (i & 1) ? high_f16(words[i >> 1]) : low_f16(words[i >> 1]);
  if constexpr (SCALES == HALF_MIN) scale = low_f16(words[i]), base = high_f16(words[i]);
  if constexpr (SCALES == FLOAT) scale = __uint_as_float(words[i]);
  if constexpr (SCALES == FLOAT_MIN)
    scale = __uint_as_float(words[2 * i]), base = __uint_as_float(words[2 * i + 1]);
  if constexpr (SCALES == BYTE) scale = byte_at(words, i, SCALE_ZERO);
  if constexpr (SCALES == BYTE_MIN) scale = byte_at(words, 2 * i), base = byte_at(words, 2 * i + 1);
  if constexpr (SCALES == NIBBLE_MIN) {
    u32 low = words[i >> 2] & 0x0f0f0f0fu, high = (words[i >> 2] >> 4) & 0x0f0f0f0fu;
    scale = byte_at(&low, i & 3), base = byte_at(&high, i & 3);
  }
  if constexpr (SCALES == E8M0) {  // 2**(e - 127), of which the smallest is subnormal
    u32 e = (words[i >> 2] >> 8 * (i & 3)) & 255u;
    scale = __uint_as_float(e ? e << 23 : 0x00400000u);
  }
  if constexpr (SCALES == E4M3)  // float16 has the same fields, with a bit more of exponent
    scale = low_f16(((words[i >> 2] >> 8 * (i & 3)) & 127u) << 7);
  if constexpr (SCALES == U8_PAIR) {
    scale = divided(byte_at(words, 2 * i), 1000.0f, 0.001f);
    base = divided(byte_at(words, 2 * i + 1), 100.0f, 0.01f) - 1.0f;
  }
  if constexpr (HAS_MIN && FACTOR != 1.0f) base *= 1.0f / FACTOR;  // results are multiplied by it
}
