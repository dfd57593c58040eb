// Codebooks across the lanes of a warp, looked up by shuffles: 16 floats, or the 128 bytes of a trellis.
// Included by `decode_mma.cuh`.
#pragma once

// ---- codebooks of floats ---------------------------------------------------------------------------

// Pairs of indices in the lowest 4 bits of each half, with other bits above: shuffles take 5, and the
// codebook is there twice.
DEV void indices_of_floats(const u32* w, u32* a, u32* b) {
#pragma unroll
  for (int s = 0; s < 4; s++) {
    a[2 * s] = w[s], a[2 * s + 1] = w[s] >> 4;
    b[2 * s] = w[s] >> 8, b[2 * s + 1] = w[s] >> 12;
  }
}

// The first and second float16 numbers of a pair of indices.
DEV void look_up_floats(const Table& table, u32 pair, u32& high, u32& low) {
  const u32 first = __shfl_sync(0xffffffffu, table.halves, pair);
  const u32 second = __shfl_sync(0xffffffffu, table.halves, pair >> 16);
  high = prmt(first, second, 0x5410u), low = prmt(first, second, 0x7632u);
}

// ---- trellises -------------------------------------------------------------------------------------

constexpr int STREAM_BITS = KIND == TRELLIS_KIND ? BITS : 4;  // per weight
constexpr int OLDER_BITS = 12 - STREAM_BITS;  // of a state, from the weights before

// 16 bits or more of the stream from a lane's first of two columns: OLDER_BITS, then those of the columns.
// `from` is their place in two words for the first lane of four.
DEV u32 window_of(const Table& table, u32 first, u32 second, int from) {
  if (STREAM_BITS == 4) return prmt(first, second, table.bytes);  // `from` is 24
  if (from + 6 * STREAM_BITS + STREAM_BITS + 12 <= 32) return first >> (table.shift + from);
  const u32 low = __funnelshift_r(first, second, from);
  if (STREAM_BITS == 2) return low >> table.shift;  // 26 bits of 32
  return __funnelshift_r(low, second >> from, table.shift);
}

// The indices of four states of a pair of windows, in bytes; bit 7 is arbitrary.  The 4 oldest bits of a
// state flip some of the 7 newest.
DEV u32 indices_of_states(const Table& table, u32 windows) {
  const u32 newest = prmt(windows >> 5, windows >> (5 + STREAM_BITS), 0x6240u);
  const u32 shifted = windows << (4 - STREAM_BITS);
  const u32 oldest = prmt((windows & table.nibbles) | (shifted & ~table.nibbles), 0, 0x4420u);
  // flips have 7 bits, so a selector of 8 or more, which replicates the sign of a byte, gives 0
  return newest ^ prmt(table.words[0], table.words[1], oldest) ^
         prmt(table.words[2], table.words[3], oldest ^ 0x8888u);
}

// The values of four indices, code - 128, by way of the float16 number 1024 + code.
DEV void look_up_values(const Table& table, u32 indices, u32* pairs) {
  const u32 bytes = (indices & table.twos) | 0x04000400u;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 first = __shfl_sync(0xffffffffu, table.entry, indices >> (16 * i + 2));
    const u32 second = __shfl_sync(0xffffffffu, table.entry, indices >> (16 * i + 10));
    const u32 codes = prmt(first, second, bytes >> 16 * i);
    pairs[i] = add_f16x2((codes & table.halves) | 0x64006400u, 0xe480e480u);
  }
}

// Decode 64 columns of a row; `before` has the bits of the stream before the chunk.
DEV void decode_stream(const Table& table, const u32* w, u32 before, int tile, u32* slots) {
  u32 stream[2 * STREAM_BITS + 1];  // from the last word before the tile on
#pragma unroll
  for (int i = 0; i <= 2 * STREAM_BITS; i++) {
    const int word = 2 * STREAM_BITS * tile + i - 1;
    stream[i] = word < 0 ? before << (32 - OLDER_BITS)
                         : __shfl_sync(0xffffffffu, w[word < 0 ? 0 : word >> 2], word & 3, 4);
  }
#pragma unroll
  for (int s = 0; s < 4; s++) {
    u32 of[2];  // columns 2 t and 2 t + 1 of eight
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int from = 32 - OLDER_BITS + (16 * s + 8 * j) * STREAM_BITS, word = from >> 5;
      of[j] = window_of(table, stream[word], word < 2 * STREAM_BITS ? stream[word + 1] : 0, from & 31);
    }
    look_up_values(table, indices_of_states(table, prmt(of[0], of[1], 0x5410u)), slots + 2 * s);
  }
}

// Decode 64 columns of chunk `odd` of a unit: the values of rows g and g + 8.
DEV void decode_trellis(
    const Table& table, const u32* w, const Floats& floats, int odd, int tile, u32* a, u32* b) {
  decode_stream(table, w, odd ? floats.of_row[0] >> 16 : 0, tile, a);
  decode_stream(table, w + STREAM_BITS, odd ? floats.of_row[1] >> 16 : 0, tile, b);
}
