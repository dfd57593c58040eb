// What the results of a product go through in the same kernel, chosen by the macro EPILOGUE: an
// activation, each by itself; or once a region of them is complete (`regions.cuh`) the gate of a
// feed-forward network, the heads of attention (`heads.cuh`), also with norms over all of them, or a
// norm of whole rows.
#pragma once
#include "qmatmul/prologue.cuh"
#include "qmatmul/regions.cuh"

#define EPILOGUE_ACTIVATION 1
#define EPILOGUE_GATE 2
#define EPILOGUE_HEADS 3
#define EPILOGUE_ROW_NORM 4
#define EPILOGUE_ALL_HEADS 5

#if EPILOGUE == EPILOGUE_ACTIVATION || EPILOGUE == EPILOGUE_GATE
#include "activation/functions.cuh"
#elif EPILOGUE == EPILOGUE_HEADS || EPILOGUE == EPILOGUE_ALL_HEADS
#include "qmatmul/heads.cuh"
#endif

// A product of at most as many tokens as a thread block stages.
struct Product {
  float* out;
  i64 stride;
  int n_rows, n_tokens, rows_of_group;  // of the matrix

  DEV_METHOD float* row(int token) const { return out + token * stride; }
};

#if EPILOGUE == EPILOGUE_GATE
// Rows [0, width) and [width, 2 * width) of the matrix are the gate and what it lets through, at the
// columns `gate` and `up` of the product.
struct Epilogue {
  float* out;
  i64 out_stride;
  int width, gate, up, padding;

  static constexpr int PIECE = 64;  // columns of a region

  DEV_METHOD void finish(const Product& p, int* arrived, u8*) const {
    finish_regions<false>(
        arrived, (width + PIECE - 1) / PIECE, p.n_tokens,
        [&](int region) {
          const int a = region * PIECE, b = min(a + PIECE, width);
          return groups_of(a, b, width + a, width + b, p.rows_of_group);
        },
        [&](int region, int token) {
          const float* from = p.row(token);
          const int end = min((region + 1) * PIECE, width);
          for (int i = region * PIECE + (threadIdx.x & 31); i < end; i += 32)
            out[token * out_stride + i] = FUNCTION::of(from[gate + i]) * from[up + i];
        });
  }
};
#elif EPILOGUE == EPILOGUE_HEADS
struct Epilogue : Heads {
  DEV_METHOD void finish(const Product& p, int* arrived, u8*) const {
    __shared__ u8 codes[WARPS][64];
    finish_regions<false>(
        arrived, p.n_rows / head_dim, p.n_tokens,
        [&](int head) {
          return groups_of(head * head_dim, (head + 1) * head_dim, 0, 0, p.rows_of_group);
        },
        [&](int head, int token) {
          finish_head<false>(*this, p.row(token) + head * head_dim, head, token, codes[threadIdx.x >> 5]);
        });
  }
};
#elif EPILOGUE == EPILOGUE_ALL_HEADS
// A norm over all heads of the queries, and one over those of the keys: regions 0 and 1; the heads of
// the values are the others.
struct Epilogue : Heads {
  DEV_METHOD void finish(const Product& p, int* arrived, u8* shared) const {
    __shared__ u8 codes[WARPS][64];
    __shared__ float factors[TOKENS];
    auto first_head = [&](int region) {
      return region < 2 ? region * n_q : n_q + n_k + region - 2;
    };
    finish_regions<true>(
        arrived, 2 + p.n_rows / head_dim - n_q - n_k, p.n_tokens,
        [&](int region) {
          return groups_of(first_head(region) * head_dim, first_head(region + 1) * head_dim, 0, 0,
                           p.rows_of_group);
        },
        [&](int region, int) {
          const int head_0 = first_head(region), n_heads = first_head(region + 1) - head_0;
          const int width = n_heads * head_dim, warp = threadIdx.x >> 5;
          if (region < 2) {
            const Scaling scaling = {region ? k_weight : q_weight, nullptr, nullptr, 0};
            auto row = [&](int n) { return p.row(n) + head_0 * head_dim; };
            find_factors<RMS_NORM>(row, p.n_tokens, width, eps, (float*)shared, nullptr, factors);
            const int n_chunks = (width + NORM_CHUNK - 1) / NORM_CHUNK;
            for (int i = warp; i < p.n_tokens * n_chunks; i += WARPS) {
              const int n = i / n_chunks, k = i % n_chunks * NORM_CHUNK + 4 * (threadIdx.x & 31);
              const float4 v = load_four(row(n), k, width, is_wide(row(n)));
              store_four(row(n), k, width,
                         normalized<RMS_NORM>(v, k, width, scaling, offset, 0.0f, factors[n]));
            }
            __syncthreads();
          }
          for (int i = warp; i < p.n_tokens * n_heads; i += WARPS) {
            const int token = i / n_heads, head = head_0 + i % n_heads;
            finish_head<true>(*this, p.row(token) + head * head_dim, head, token, codes[warp]);
          }
        });
  }
};
#elif EPILOGUE == EPILOGUE_ROW_NORM
// The rows, normalized, in place of those at `to.out`, or times `added` (not 0) added to them.
struct Epilogue {
  Scaling to;
  float eps, offset, added;
  int padding;

  DEV_METHOD void finish(const Product& p, int* arrived, u8* shared) const {
    __shared__ float means[TOKENS], factors[TOKENS];
    finish_regions<true>(
        arrived, 1, p.n_tokens, [&](int) { return groups_of(0, p.n_rows, 0, 0, p.rows_of_group); },
        [&](int, int) {
          find_factors<ROW_NORM>([&](int n) { return p.row(n); }, p.n_tokens, p.n_rows, eps,
                                 (float*)shared, means, factors);
          const int lane = threadIdx.x & 31, n_chunks = (p.n_rows + NORM_CHUNK - 1) / NORM_CHUNK;
          for (int i = threadIdx.x >> 5; i < p.n_tokens * n_chunks; i += WARPS) {
            const int n = i / n_chunks, k = i % n_chunks * NORM_CHUNK + 4 * lane;
            float4 v = load_four(p.row(n), k, p.n_rows, is_wide(p.row(n)));
            v = normalized<ROW_NORM>(v, k, p.n_rows, to, offset, means[n], factors[n]);
            float* row = to.out + n * to.out_stride;
            if (added != 0.0f) v = fma_of(added, v, load_four(row, k, p.n_rows, is_wide(row)));
            store_four(row, k, p.n_rows, v);
          }
        });
  }
};
#endif
