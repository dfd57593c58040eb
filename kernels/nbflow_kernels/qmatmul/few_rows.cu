// The product for a few tokens: TOKENS of them at a time, whatever number there are.
//
// A thread block stages the tokens once and goes through row tiles.  A warp computes one slot of one
// row tile; it has the next unit's bytes on their way while it decodes.  blockIdx.y divides the slots
// among thread blocks where the staged tokens do not fit one, or row tiles are few: the last one to
// arrive then adds the slots' sums.  blockIdx.z is the matrix of a group of tokens.
//
// What comes in front of a product and behind it can be done by the same kernel: NORM says how tokens
// are normalized before they are staged (`prologue.cuh`), EPILOGUE what results go through.
#include "qmatmul/epilogues.cuh"

constexpr int NB = TOKENS;

#if NORM
#define NORM_PARAMETER , Norm norm
#else
#define NORM_PARAMETER
#endif
#if EPILOGUE > EPILOGUE_ACTIVATION
#define EPILOGUE_PARAMETERS , int* arrived_regions, Epilogue epilogue
#else
#define EPILOGUE_PARAMETERS
#endif

// A lane's part of a unit.
struct Unit {
  Floats floats;
  Chunk chunks[2];
};

DEV void load_unit(Unit& to, const u8* unit, int n_chunks, int lane) {
  to.floats.load(unit, lane);
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    if (odd < n_chunks) {
      to.chunks[odd].load_scales(chunk_of(unit, odd), lane);
      to.chunks[odd].load_words(chunk_of(unit, odd), lane);
    }
  }
}

// Multiply a unit; its registers take the next one's bytes (if `more`) as soon as they are free.
DEV void multiply_unit(
    Unit& now, const u8* unit, bool more, const u8* records, int n_chunks, int lane, float acc[4]) {
  Floats floats = now.floats;
  if (more) now.floats.load(unit + UNIT_BYTES, lane);
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    if (odd < n_chunks) {
      const u8* next = chunk_of(unit + UNIT_BYTES, odd);
      const bool load = more && odd < n_chunks - 2;
      u32 operand[1][8][4];
      decode_chunk(now.chunks[odd].w, operand[0]);
      if (load) now.chunks[odd].load_words(next, lane);
      multiply_chunk<1, NB>(operand, &now.chunks[odd], &floats, records + odd * Record<NB>::BYTES, lane,
                            (float(*)[4])acc);
      if (load) now.chunks[odd].load_scales(next, lane);
      __syncwarp();  // keeps the compiler from loading fragments of both chunks at once: registers
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS) few_rows(
    const u8* weights, const float* x, const float* bias, float* out, float* partial, int* arrived,
    const int* indptr, const int* rows, long long group_bytes, long long tile_bytes,
    long long x_stride, long long out_stride, int n_tokens, int n_rows, int n_columns,
    float added, int int8 NORM_PARAMETER EPILOGUE_PARAMETERS) {
  extern __shared__ __align__(16) u8 shared[];
#if NORM
  __shared__ float means[NB], factors[NB];
#endif
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int per_block = SLOTS / gridDim.y, n_tiles = (n_rows + 15) / 16;
  const int n_chunks = (n_columns + CHUNK - 1) / CHUNK, n_units = (n_chunks + 1) / 2;
  const int chunk_0 = 2 * slot_start(blockIdx.y * per_block, n_units);
  const int chunk_1 = min(2 * slot_start((blockIdx.y + 1) * per_block, n_units), n_chunks);
  const int slot = blockIdx.y * per_block + warp % per_block, at_once = WARPS / per_block;
  const int unit_0 = slot_start(slot, n_units), unit_1 = slot_start(slot + 1, n_units);
  const bool wide = (((unsigned long long)x | 4 * x_stride) & 15) == 0;
  // behind the records of the slots' chunks: the sums of the warps
  const int sums_at = (chunk_1 - chunk_0) * Record<NB>::BYTES;
  int token_0 = 0, token_1 = n_tokens;
  if (indptr) token_0 = indptr[blockIdx.z], token_1 = indptr[blockIdx.z + 1];
  weights += blockIdx.z * group_bytes;

  for (int token = token_0; token < token_1; token += NB) {
    // the first bytes of the first row tile come while the tokens are staged
    Unit now;
    int tile = blockIdx.x * at_once + warp / per_block;
    if (tile < n_tiles && unit_0 < unit_1)
      load_unit(now, weights + tile * tile_bytes + unit_0 * UNIT_BYTES, n_chunks - 2 * unit_0, lane);
    __syncthreads();
#if NORM
    const auto row_at = [&](int n) { return x + (rows ? rows[token + n] : token + n) * x_stride; };
    find_factors<NORM>(row_at, min(NB, token_1 - token), n_columns, norm.eps, (float*)shared, means,
                       factors);
#endif
    for (int i = warp; i < (chunk_1 - chunk_0) * NB; i += WARPS) {
      int n = i % NB, chunk = i / NB, row = token + n, k = (chunk_0 + chunk) * CHUNK + 4 * lane;
      float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
      if (row < token_1) v = load_four(x + (rows ? rows[row] : row) * x_stride, k, n_columns, wide);
#if NORM
      if (row < token_1) {
        v = normalized<NORM>(v, k, n_columns, norm, means[n], factors[n]);
        if (norm.out && blockIdx.x == 0) store_four(norm.out + row * norm.out_stride, k, n_columns, v);
      }
#endif
      if (int8) v = rounded_to_int8(v);
      stage<NB>(v, shared + chunk * Record<NB>::BYTES, n, lane);
    }
    if constexpr (NB < 8) {  // columns of the operand that no token has
      for (int i = threadIdx.x; i < (chunk_1 - chunk_0) * (GROUPS + 1) * (8 - NB); i += 32 * WARPS) {
        int n = NB + i % (8 - NB), j = i / (8 - NB) % (GROUPS + 1), chunk = i / (8 - NB) / (GROUPS + 1);
        *(float*)(shared + chunk * Record<NB>::BYTES + Record<NB>::SUMS + j * 32 + n * 4) = 0.0f;
      }
    }
    __syncthreads();

    for (int group = blockIdx.x; group * at_once < n_tiles; group += gridDim.x) {
      tile = group * at_once + warp / per_block;
      float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (tile < n_tiles) {
        const u8* at = weights + tile * tile_bytes;
        if (group != blockIdx.x && unit_0 < unit_1)
          load_unit(now, at + unit_0 * UNIT_BYTES, n_chunks - 2 * unit_0, lane);
#pragma unroll 1
        for (int unit = unit_0; unit < unit_1; unit++)
          multiply_unit(now, at + unit * UNIT_BYTES, unit + 1 < unit_1,
                        shared + (2 * unit - chunk_0) * Record<NB>::BYTES, n_chunks - 2 * unit, lane, acc);
      }
      // rows g and g + 8, tokens 2t and 2t + 1
      const int at = (lane >> 2) * 8 + (lane & 3) * 2;
      float* sums = (float*)(shared + sums_at);
      float* to = gridDim.y == 1 ? sums + warp * 128 : partial_at(partial, tile, slot);
      if (tile < n_tiles) {
        *(float2*)(to + at) = make_float2(acc[0], acc[1]);
        *(float2*)(to + at + 64) = make_float2(acc[2], acc[3]);
      }
      if (gridDim.y == 1) __syncthreads();
      if (gridDim.y == 1 || last_to_arrive(arrived + group, gridDim.y)) {
        const Output output = {out, bias ? bias + (long long)blockIdx.z * n_rows : bias, out_stride,
                               n_rows, added};
        for (int i = threadIdx.x; i < at_once * 16 * NB; i += 32 * WARPS) {
          int row = i % 16, n = i / 16 % NB, j = i / (16 * NB), own_tile = group * at_once + j;
          if (own_tile >= n_tiles || token + n >= token_1) continue;
          float v = 0.0f;
          if (gridDim.y == 1) {
#pragma unroll
            for (int s = 0; s < SLOTS; s++) v += sums[(j * SLOTS + s) * 128 + row * 8 + n];
          } else {
            v = sum_of_slots(partial_at(partial, own_tile, 0) + row * 8 + n);
          }
          const int matrix_row = own_tile * 16 + row;
          if (matrix_row >= n_rows) continue;
          v = output.value(v, matrix_row);
#if EPILOGUE == EPILOGUE_ACTIVATION
          v = FUNCTION::of(v);
#endif
          output.write(v, matrix_row, token + n);
        }
      }
      __syncthreads();
    }
  }
#if EPILOGUE > EPILOGUE_ACTIVATION
  epilogue.finish({out, out_stride, n_rows, n_tokens, 16 * at_once}, arrived_regions, shared);
#endif
}
