// GEMV and GEMM on tensor cores (`mma.sync`) with row-major weights in float16 or bfloat16.
//
// An activation is decomposed into PARTS numbers of the weights' type that add up to it (`stage`).  Of 32
// columns lane t of four loads columns 8 t to 8 t + 7 of rows g and g + 8 and of token g: one 16-byte load
// gives its operands of two MMA steps.  Weights and tokens are permuted alike, so sums do not change.
//
// Split-K: K is cut into SPLITS runs of steps of 64 columns; the steps of a run are added one after the
// other, and the runs in order.  Both kernels do so: a result does not depend on the number of tokens.
//
// blockIdx.z is the matrix of a batched product (attention heads).
#include "matmul/cuda_mma_common.cuh"

// Weights of two steps: words of rows g and g + 8.  XOR with `zero` (0 at run time) makes them new values;
// else the compiler moves them to adjacent registers again for every MMA.
struct Operands {
  u32 first[4], second[4];

  DEV Operands(const uint4& low, const uint4& high, u32 zero)
      : first{low.x ^ zero, high.x ^ zero, low.y ^ zero, high.y ^ zero},
        second{low.z ^ zero, high.z ^ zero, low.w ^ zero, high.w ^ zero} {}

  template <int KIND>
  DEV void multiply(float c[4], const uint4& x) const {
    if constexpr (KIND == F16_KIND) {
      mma_f16(c, first, x.x, x.y);
      mma_f16(c, second, x.z, x.w);
    } else {
      mma_bf16(c, first, x.x, x.y);
      mma_bf16(c, second, x.z, x.w);
    }
  }
};

// Write activations as [part][token][stride] numbers, padded with zeros, in column order or, for weights in
// fragment order, permuted by `column_at`.  Thread block (token, 1, matrix).
template <int KIND, int PARTS, bool FRAGMENT_ORDER>
__global__ void __launch_bounds__(256) stage(
    const float* x, u16* parts, float* factors, long long x_stride, int n_tokens, int n_columns,
    int stride, long long x_batch_stride) {
  x += blockIdx.z * x_batch_stride;
  parts += (long long)blockIdx.z * PARTS * n_tokens * stride;
  factors += blockIdx.z * n_tokens;
  const float* row = x + blockIdx.x * x_stride;
  const float up = scale_token<KIND>(row, n_columns, factors);
  for (int k = threadIdx.x; k < stride; k += 256) {
    const int column = FRAGMENT_ORDER ? column_at(k) : k;
    u16 numbers[PARTS];
    decompose<KIND>(column < n_columns ? row[column] * up : 0.0f, numbers);
#pragma unroll
    for (int p = 0; p < PARTS; p++)
      parts[((long long)p * n_tokens + blockIdx.x) * stride + k] = numbers[p];
  }
}

constexpr int GEMV_TILES = 2;  // row tiles of 16 per warp of `gemv`

// Tokens [first, n_tokens), 8 at a time: a warp computes one split of GEMV_TILES row tiles and prefetches the
// weights of the next step to registers.  With `indptr` matrix z has tokens [indptr[z], indptr[z + 1]), which
// are those that `rows` names among the staged ones, if it is given.
template <int KIND, int PARTS>
__global__ void __launch_bounds__(32 * SPLITS, 2) gemv(
    const u16* weights, const u16* parts, const float* factors, const float* bias, float* out,
    long long out_stride, int n_staged, int first, int n_tokens, int n_rows, int n_columns, int stride,
    int accumulate, long long out_batch_stride, const int* indptr, const int* token_rows) {
  weights += (long long)blockIdx.z * n_rows * n_columns;
  if (indptr) {
    first = indptr[blockIdx.z], n_tokens = indptr[blockIdx.z + 1];
    bias += bias ? (long long)blockIdx.z * n_rows : 0;
  } else {
    parts += (long long)blockIdx.z * PARTS * n_staged * stride;
    factors += factors ? blockIdx.z * n_staged : 0;
  }
  out += blockIdx.z * out_batch_stride;
  __shared__ float sums[SPLITS][GEMV_TILES][128];
  const int lane = threadIdx.x & 31, split = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int n_steps = stride / STEP, step_1 = split_start(split + 1, n_steps);
  const u16* rows[GEMV_TILES][2];  // row numbers are clamped to the last row
#pragma unroll
  for (int r = 0; r < GEMV_TILES; r++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = (blockIdx.x * GEMV_TILES + r) * 16 + g + 8 * h;
      rows[r][h] = weights + (long long)min(row, n_rows - 1) * n_columns + 8 * t;
    }
  }
  for (; first < n_tokens; first += 8) {
    uint4 w[GEMV_TILES][2][2];
    auto load = [&](int step) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int k = step * STEP + 32 * i;
        const bool valid = k + 8 * t < n_columns;  // rows are multiples of 8
#pragma unroll
        for (int r = 0; r < GEMV_TILES; r++)
#pragma unroll
          for (int h = 0; h < 2; h++) w[r][h][i] = valid ? stream_16(rows[r][h] + k) : uint4{0, 0, 0, 0};
      }
    };
    const u32 zero = n_rows >> 31;
    float acc[GEMV_TILES][4] = {};
    const int token = min(first + g, n_tokens - 1);
    const u16* x = parts + (long long)(token_rows ? token_rows[token] : token) * stride + 8 * t;
    int step = split_start(split, n_steps);
    if (step < step_1) load(step);
    for (; step < step_1; step++) {
      const Operands now[2][GEMV_TILES] = {
          {{w[0][0][0], w[0][1][0], zero}, {w[1][0][0], w[1][1][0], zero}},
          {{w[0][0][1], w[0][1][1], zero}, {w[1][0][1], w[1][1][1], zero}}};
      if (step + 1 < step_1) load(step + 1);
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
          const uint4 v = *(const uint4*)(x + (long long)p * n_staged * stride + step * STEP + 32 * i);
#pragma unroll
          for (int r = 0; r < GEMV_TILES; r++) now[i][r].template multiply<KIND>(acc[r], v);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < GEMV_TILES; r++) {
      float* to = sums[split][r] + g * 8 + 2 * t;
      *(float2*)to = make_float2(acc[r][0], acc[r][1]);
      *(float2*)(to + 64) = make_float2(acc[r][2], acc[r][3]);
    }
    __syncthreads();
    const Output output = {out, bias, factors, out_stride, n_rows, n_tokens, accumulate, token_rows};
    for (int i = threadIdx.x; i < GEMV_TILES * 128; i += 32 * SPLITS) {
      const int row = i % 16, token = i / 16 % 8, r = i / 128;
      float v = 0.0f;
#pragma unroll
      for (int s = 0; s < SPLITS; s++) v += sums[s][r][row * 8 + token];
      output.put(v, (blockIdx.x * GEMV_TILES + r) * 16 + row, first + token);
    }
    __syncthreads();  // before the sums of the next tokens
  }
}

// Tile of `gemm`: 4 x TOKEN_WARPS warps, each with ROW_TILES row tiles and TOKEN_TILES groups of 8 tokens,
// read from a ring of steps in shared memory.
template <int KIND, int PARTS, int ROW_TILES, int TOKEN_WARPS, int TOKEN_TILES>
struct Tiles {
  static constexpr int WARPS = 4 * TOKEN_WARPS, ROWS = 64 * ROW_TILES;
  static constexpr int TOKENS = 8 * TOKEN_WARPS * TOKEN_TILES;
  static constexpr int LINE = 2 * STEP, BYTES = (ROWS + PARTS * TOKENS) * LINE;
  static constexpr int RING = PARTS == 3 ? 3 : 4;
};

template <int KIND, int PARTS, int ROW_TILES, int TOKEN_WARPS, int TOKEN_TILES>
__global__ void __launch_bounds__(128 * TOKEN_WARPS) gemm(
    const u16* weights, const u16* parts, const float* factors, const float* bias, float* out,
    long long out_stride, int n_staged, int first, int n_tokens, int n_rows, int n_columns, int stride,
    int accumulate, long long out_batch_stride) {
  weights += (long long)blockIdx.z * n_rows * n_columns;
  parts += (long long)blockIdx.z * PARTS * n_staged * stride;
  factors += factors ? blockIdx.z * n_staged : 0;
  out += blockIdx.z * out_batch_stride;
  using Of = Tiles<KIND, PARTS, ROW_TILES, TOKEN_WARPS, TOKEN_TILES>;
  extern __shared__ __align__(16) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int row_0 = blockIdx.x * Of::ROWS, token_0 = first + blockIdx.y * Of::TOKENS;
  const int own_row = warp % 4 * 16 * ROW_TILES, own_token = warp / 4 * 8 * TOKEN_TILES;
  const int n_steps = stride / STEP;
  u32 ring;
  asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(ring) : "l"(shared));

  // Swizzle: 16-byte chunk c of odd lines is stored at c ^ 4, so 8 lanes read without bank conflicts.
  auto fetch = [&](int step) {
    if (step < n_steps) {
      const u32 to = ring + step % Of::RING * Of::BYTES;
      const int piece = threadIdx.x & 7, k = step * STEP + 8 * piece;
#pragma unroll 2
      for (int line = threadIdx.x >> 3; line < Of::ROWS + PARTS * Of::TOKENS; line += 4 * Of::WARPS) {
        const u32 at = to + line * Of::LINE + 16 * (piece ^ 4 * (line & 1));
        if (line < Of::ROWS) {  // clamp rows; fill columns past the end with zeros
          const int row = min(row_0 + line, n_rows - 1);
          const bool valid = k < n_columns;
          copy_16_or_zeros(at, weights + (long long)row * n_columns + (valid ? k : 0), valid);
        } else {
          const int p = (line - Of::ROWS) / Of::TOKENS, n = (line - Of::ROWS) % Of::TOKENS;
          const int token = min(token_0 + n, n_tokens - 1);
          copy_16(at, parts + ((long long)p * n_staged + token) * stride + k);
        }
      }
    }
    end_copies();
  };
  auto read = [&](const u8* lines, int line, int i) {
    return *(const uint4*)(lines + line * Of::LINE + 16 * ((4 * i + t) ^ 4 * (line & 1)));
  };

  const u32 zero = n_rows >> 31;
  float acc[ROW_TILES][TOKEN_TILES][4] = {}, total[ROW_TILES][TOKEN_TILES][4] = {};
#pragma unroll
  for (int i = 0; i < Of::RING - 1; i++) fetch(i);
  int step = 0;
  for (int split = 0; split < SPLITS; split++) {
#pragma unroll 1
    for (const int end = split_start(split + 1, n_steps); step < end; step++) {
      wait_for_copies<Of::RING - 2>();
      __syncthreads();
      fetch(step + Of::RING - 1);
      const u8* lines = shared + step % Of::RING * Of::BYTES;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        auto operands = [&](int r) {
          const int line = own_row + 16 * r + g;
          return Operands(read(lines, line, i), read(lines, line + 8, i), zero);
        };
        const Operands w[2] = {operands(0), operands(ROW_TILES - 1)};
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; m++) {
#pragma unroll
          for (int p = 0; p < PARTS; p++) {
            const uint4 x = read(lines, Of::ROWS + p * Of::TOKENS + own_token + 8 * m + g, i);
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) w[r].template multiply<KIND>(acc[r][m], x);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) total[r][m][i] += acc[r][m][i], acc[r][m][i] = 0.0f;
  }
  wait_for_copies<0>();

  const Output output = {out, bias, factors, out_stride, n_rows, n_tokens, accumulate};
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        output.put(total[r][m][i], row_0 + own_row + 16 * r + 8 * (i >> 1) + g,
                   token_0 + own_token + 8 * m + 2 * t + (i & 1));
}
