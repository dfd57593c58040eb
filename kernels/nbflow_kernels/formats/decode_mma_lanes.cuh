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

// Shift the stream so that a lane's windows begin where those of the first lane of four do.
DEV void align_stream(const Table& table, u32* stream) {
  if (STREAM_BITS == 4) return;  // whole bytes: `prmt` selects them
#pragma unroll
  for (int i = 0; i <= 2 * STREAM_BITS; i++)
    stream[i] = __funnelshift_r(stream[i], i < 2 * STREAM_BITS ? stream[i + 1] : 0, table.shift);
}

// Two windows of 16 bits, from a lane's first of two columns of eight: OLDER_BITS, then those of the columns.
// `from` is the place of the first; the second is eight columns behind it.
DEV u32 windows_of(const Table& table, const u32* stream, int from) {
  const auto bits_from = [&](int at) {
    return __funnelshift_r(stream[at >> 5], at >> 5 < 2 * STREAM_BITS ? stream[(at >> 5) + 1] : 0, at & 31);
  };
  if (STREAM_BITS == 2) return bits_from(from);
  if (STREAM_BITS == 3) return prmt(bits_from(from), bits_from(from + 24), 0x5410u);
  stream += from >> 5;  // 24 bits behind the start of a word
  return prmt(prmt(stream[0], stream[1], table.bytes), prmt(stream[1], stream[2], table.bytes), 0x5410u);
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
  align_stream(table, stream);
#pragma unroll
  for (int s = 0; s < 4; s++) {
    const u32 windows = windows_of(table, stream, 32 - OLDER_BITS + 16 * s * STREAM_BITS);
    look_up_values(table, indices_of_states(table, windows), slots + 2 * s);
  }
}

// Decode 64 columns of chunk `odd` of a unit: the values of rows g and g + 8.
DEV void decode_trellis(
    const Table& table, const u32* w, const Floats& floats, int odd, int tile, u32* a, u32* b) {
  decode_stream(table, w, odd ? floats.of_row[0] >> 16 : 0, tile, a);
  decode_stream(table, w + STREAM_BITS, odd ? floats.of_row[1] >> 16 : 0, tile, b);
}
