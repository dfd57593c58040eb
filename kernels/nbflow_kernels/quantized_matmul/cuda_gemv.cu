// Split-K GEMV with block-format weights, TOKENS tokens at a time.
//
// A thread block stages the tokens in shared memory once and loops over row tiles.  A warp computes one
// split of one row tile, with the next unit's bytes in flight.  If the staged tokens do not fit one thread
// block, or there are few row tiles, blockIdx.y divides the splits among thread blocks, and the last one to
// arrive reduces them.  blockIdx.z is the matrix of a segment of tokens (`indptr`).
//
// BATCHED: batched product, all tokens times all matrices, each with its own columns (attention heads).  Such
// matrices are small: there are as many splits as units.
//
// NORM selects a fused prologue (`cuda_prologue_norm.cuh`), EPILOGUE a fused epilogue
// (`cuda_epilogues.cuh`).
#include "quantized_matmul/cuda_epilogues.cuh"
#include "quantized_matmul/cuda_weight_pipeline.cuh"

#if BATCHED
#define BATCH_PARAMETERS , long long x_batch_stride, long long out_batch_stride
#else
#define BATCH_PARAMETERS
#endif
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

extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS) gemv(
    const u8* weights, const float* x, const float* bias, float* out, float* partial, int* arrived,
    const int* indptr, const int* rows, long long group_bytes, long long tile_bytes,
    long long x_stride, long long out_stride, int n_tokens, int n_rows, int n_columns,
    float added, int int8 BATCH_PARAMETERS NORM_PARAMETER EPILOGUE_PARAMETERS) {
  extern __shared__ __align__(16) u8 shared[];
#if NORM
  __shared__ float means[NB], factors[NB];
#endif
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int n_chunks = (n_columns + CHUNK - 1) / CHUNK;
#if BATCHED
  const int n_splits = splits_for((n_chunks + 1) / 2);
  x += blockIdx.z * x_batch_stride, out += blockIdx.z * out_batch_stride;
#else
  constexpr int n_splits = SPLITS;
#endif
  const int per_block = n_splits / gridDim.y, n_tiles = (n_rows + 15) / 16;
  const int first_split = blockIdx.y * per_block;
  const int chunk_0 = 2 * unit_of(split_step(first_split, n_columns, n_splits));
  const int chunk_1 = min(2 * units_to(split_step(first_split + per_block, n_columns, n_splits)), n_chunks);
  const int split = first_split + warp % per_block, at_once = WARPS / per_block;
  const int step_0 = split_step(split, n_columns, n_splits), step_1 = split_step(split + 1, n_columns, n_splits);
  const int unit_0 = unit_of(step_0), unit_1 = step_0 < step_1 ? units_to(step_1) : unit_0;
  const bool wide = (((unsigned long long)x | 4 * x_stride) & 15) == 0;
  // the sums of the warps follow the records
  const int sums_at = (chunk_1 - chunk_0) * Record<NB>::BYTES;
  int token_0 = 0, token_1 = n_tokens;
  if (indptr) token_0 = indptr[blockIdx.z], token_1 = indptr[blockIdx.z + 1];
  weights += blockIdx.z * group_bytes;
  Table table;
  table.load(n_rows >> 31, lane);

  for (int token = token_0; token < token_1; token += NB) {
    // load the first bytes of the first row tile while the tokens are staged
    Unit now;
    int tile = blockIdx.x * at_once + warp / per_block;
    if (tile < n_tiles && unit_0 < unit_1)
      load_unit(now, weights + tile * tile_bytes + unit_0 * UNIT_BYTES, n_chunks - 2 * unit_0, lane);
    __syncthreads();
#if NORM
    const auto row_at = [&](int n) { return x + (rows ? rows[token + n] : token + n) * x_stride; };
    norm_statistics<NORM>(row_at, min(NB, token_1 - token), n_columns, norm.eps, (float*)shared, means,
                       factors);
#endif
    for (int i = warp; i < (chunk_1 - chunk_0) * NB; i += WARPS) {
      int n = i % NB, chunk = i / NB, row = token + n, k = (chunk_0 + chunk) * CHUNK + 4 * lane;
      float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
      if (row < token_1) v = load_four(x + (rows ? rows[row] : row) * x_stride, k, n_columns, wide);
#if NORM
      if (row < token_1) {
        const float4 raw = v;
        v = normalized<NORM>(raw, k, n_columns, norm.scaling, norm.offset, means[n], factors[n]);
        if (blockIdx.x == 0) {
          const Scaling &first = norm.scaling, &second = norm.second;
          if (first.out) store_four(first.out + row * first.out_stride, k, n_columns, v);
          if (second.out)
            store_four(second.out + row * second.out_stride, k, n_columns,
                       normalized<NORM>(raw, k, n_columns, second, norm.offset, means[n], factors[n]));
        }
      }
#endif
      if (int8) v = rounded_to_int8(v);
      stage<NB>(v, shared + chunk * Record<NB>::BYTES, n, lane);
    }
    __syncthreads();

    int turn = 0;
    for (int group = blockIdx.x; group * at_once < n_tiles; group += gridDim.x) {
      tile = group * at_once + warp / per_block;
      float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (tile < n_tiles) {
        const u8* at = weights + tile * tile_bytes + unit_0 * UNIT_BYTES;
        const u8* records = shared + (2 * unit_0 - chunk_0) * Record<NB>::BYTES;
        // from the last unit to the first one of the next row tile; 0 if there is none
        const int step = gridDim.x * at_once;
        const u32 jump =
            tile + step < n_tiles ? step * tile_bytes - (unit_1 - 1 - unit_0) * UNIT_BYTES : 0;
#pragma unroll 1
        for (int unit = unit_0; unit < unit_1; unit++) {
          const bool last = unit + 1 == unit_1;  // followed by the next row tile
          const u8* after = at + (last ? jump : UNIT_BYTES);
          const int next = last ? jump ? unit_0 : unit : unit + 1;
          multiply_unit(table, now, at, min(2, n_chunks - 2 * unit), after, n_chunks - 2 * next, records,
                        lane, acc, step_0 - UNIT_STEPS * unit, step_1 - UNIT_STEPS * unit);
          at = after;
          records += 2 * Record<NB>::BYTES;
        }
      }
      // recomputed to save registers in the loop above
      const int thread = thread_again(), lane = thread & 31, warp = thread >> 5;
      // rows g and g + 8, tokens 2t and 2t + 1, or t
      const int at = (lane >> 2) * 8 + Record<NB>::token(lane & 3, 0);
      float* sums = (float*)(shared + sums_at) + (turn ^= 1) * (128 * WARPS);  // double buffer
      float* to = gridDim.y == 1 ? sums + warp * 128
                                 : partial_at(partial, tile, blockIdx.y * per_block + warp % per_block);
      if (tile < n_tiles) {
        if constexpr (NB == 8) {
          *(float2*)(to + at) = make_float2(acc[0], acc[1]);
          *(float2*)(to + at + 64) = make_float2(acc[2], acc[3]);
        } else if ((lane & 3) < NB) {
          to[at] = acc[0], to[at + 64] = acc[2];
        }
      }
      if (gridDim.y == 1) __syncthreads();
      if (gridDim.y == 1 || last_to_arrive(arrived + group, gridDim.y)) {
        const Output output = {out, bias ? bias + (long long)blockIdx.z * n_rows : bias, out_stride,
                               n_rows, added};
        for (int i = thread; i < at_once * 16 * NB; i += 32 * WARPS) {
          int row = i % 16, n = i / 16 % NB, j = i / (16 * NB), own_tile = group * at_once + j;
          if (own_tile >= n_tiles || token + n >= token_1) continue;
          float v = 0.0f;
          if (gridDim.y == 1) {
#pragma unroll
            for (int s = 0; s < n_splits; s++) v += sums[(j * n_splits + s) * 128 + row * 8 + n];
          } else {
            v = sum_of_splits(partial_at(partial, own_tile, 0) + row * 8 + n);
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
    }
  }
#if EPILOGUE > EPILOGUE_ACTIVATION
  epilogue.finish({out, out_stride, n_rows, n_tokens, 16 * at_once}, arrived_regions, shared);
#endif
}
