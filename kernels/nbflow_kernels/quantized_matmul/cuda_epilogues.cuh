// Fused epilogues of the GEMV, selected by the macro EPILOGUE: an elementwise activation, or on a complete
// output region (`cuda_epilogue_sync.cuh`) a gated activation, RoPE and KV append of attention or MLA
// (`cuda_epilogue_rope_kv_append.cuh`), or a norm of whole rows.
#pragma once
#include "quantized_matmul/cuda_prologue_norm.cuh"
#include "quantized_matmul/cuda_epilogue_sync.cuh"

#define EPILOGUE_ACTIVATION 1
#define EPILOGUE_GATE 2
#define EPILOGUE_ROPE_KV_APPEND 3
#define EPILOGUE_NORM 4
#define EPILOGUE_MLA 5

#if EPILOGUE == EPILOGUE_ACTIVATION || EPILOGUE == EPILOGUE_GATE
#include "activation/functions.cuh"
#elif EPILOGUE == EPILOGUE_ROPE_KV_APPEND || EPILOGUE == EPILOGUE_MLA
#include "quantized_matmul/cuda_epilogue_rope_kv_append.cuh"
#endif

// Output of the GEMV, up to TOKENS tokens.
struct Product {
  float* out;
  i64 stride;
  int n_rows, n_tokens, rows_of_group;  // of the matrix

  DEV_METHOD float* row(int token) const { return out + token * stride; }
};

#if EPILOGUE == EPILOGUE_GATE
// out = activation(gate) * up; gate and up start at the columns `gate` and `up` of the output.
struct Epilogue {
  float* out;
  i64 out_stride;
  int width, gate, up, padding;

  static constexpr int REGION = 64;  // columns of a region

  DEV_METHOD void finish(const Product& p, int* arrived, u8*) const {
    finish_regions<false>(
        arrived, (width + REGION - 1) / REGION, p.n_tokens,
        [&](int region) {
          const int a = region * REGION, b = min(a + REGION, width);
          return groups_of(a, b, width + a, width + b, p.rows_of_group);
        },
        [&](int region, int token) {
          const float* from = p.row(token);
          const int end = min((region + 1) * REGION, width);
          for (int i = region * REGION + (threadIdx.x & 31); i < end; i += 32)
            out[token * out_stride + i] = FUNCTION::of(from[gate + i]) * from[up + i];
        });
  }
};
#elif EPILOGUE == EPILOGUE_ROPE_KV_APPEND && !NORM_OF_ALL_HEADS
struct Epilogue : RopeKvAppend {
  DEV_METHOD void finish(const Product& p, int* arrived, u8*) const {
    __shared__ u8 codes[WARPS][64];
    finish_regions<false>(
        arrived, p.n_rows / head_dim, p.n_tokens,
        [&](int head) {
          return groups_of(head * head_dim, (head + 1) * head_dim, 0, 0, p.rows_of_group);
        },
        [&](int head, int token) {
          float* x = p.row(token) + head * head_dim;
          normalize(x, first + head);
          place(x, first + head, token, codes[threadIdx.x >> 5]);
        });
  }
};
#elif EPILOGUE == EPILOGUE_ROPE_KV_APPEND
// Norms over all query heads, and over all key heads: a region is all queries, keys or values.
struct Epilogue : RopeKvAppend {
  // First head of kind `part` (queries, keys, values) in this matrix.
  DEV_METHOD int border(int part, int n_heads) const {
    const int numbers[] = {0, n_q, n_q + n_k, first + n_heads};
    return min(max(numbers[part] - first, 0), n_heads);
  }

  DEV_METHOD void finish(const Product& p, int* arrived, u8* shared) const {
    __shared__ u8 codes[WARPS][64];
    const int n_heads = p.n_rows / head_dim;
    finish_regions<true>(
        arrived, 3, p.n_tokens,
        [&](int part) {
          const int a = border(part, n_heads) * head_dim, b = border(part + 1, n_heads) * head_dim;
          return a < b ? groups_of(a, b, 0, 0, p.rows_of_group) : Groups{0, -1, 0, -1};
        },
        [&](int part, int) {
          const int head_0 = border(part, n_heads), n = border(part + 1, n_heads) - head_0;
          const float* weight = part == 0 ? q_weight : part == 1 ? k_weight : nullptr;
          const auto row = [&](int token) { return p.row(token) + head_0 * head_dim; };
          if (weight != nullptr)
            normalize_rows<RMS_NORM>(row, p.n_tokens, n * head_dim, {weight, nullptr, nullptr, 0}, eps,
                                     offset, (float*)shared, [&](int token, int k, float4 v) {
                                       store_four(row(token), k, n * head_dim, v);
                                     });
          __syncthreads();
          for (int i = threadIdx.x >> 5; i < n * p.n_tokens; i += WARPS) {
            const int head = i / p.n_tokens, token = i % p.n_tokens;
            place(row(token) + head * head_dim, first + head_0 + head, token,
                  codes[threadIdx.x >> 5]);
          }
        });
  }
};
#elif EPILOGUE == EPILOGUE_MLA
// A region is a query head, or the latent vector.
struct Epilogue : MlaAppend {
  DEV_METHOD void finish(const Product& p, int* arrived, u8*) const {
    __shared__ u8 codes[WARPS][64];
    finish_regions<false>(
        arrived, n_q + n_latent, p.n_tokens,
        [&](int region) {
          if (region < n_q)
            return groups_of(region * head_dim, (region + 1) * head_dim, 0, 0, p.rows_of_group);
          const bool before = first < 0;  // then the first region of rows decides
          return groups_of(before ? 0 : first, before ? 1 : first + width, 0, 0, p.rows_of_group);
        },
        [&](int region, int token) {
          if (region == n_q) place_latent(token, codes[threadIdx.x >> 5]);
          else place_query(p.row(token) + region * head_dim, region, token);
        });
  }
};
#elif EPILOGUE == EPILOGUE_NORM
// Norm of the rows, written to `to.out`, or times `added` (not 0) added to it.
struct Epilogue {
  Scaling to;
  float eps, offset, added;
  int padding;

  DEV_METHOD void finish(const Product& p, int* arrived, u8* shared) const {
    finish_regions<true>(
        arrived, 1, p.n_tokens, [&](int) { return groups_of(0, p.n_rows, 0, 0, p.rows_of_group); },
        [&](int, int) {
          normalize_rows<ROW_NORM>(
              [&](int n) { return p.row(n); }, p.n_tokens, p.n_rows, to, eps, offset, (float*)shared,
              [&](int n, int k, float4 v) {
                float* row = to.out + n * to.out_stride;
                if (added != 0.0f) v = fma_of(added, v, load_four(row, k, p.n_rows, is_wide(row)));
                store_four(row, k, p.n_rows, v);
              });
        });
  }
};
#endif
