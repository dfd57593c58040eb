// Epilogue of the QKV projection: head norms, RoPE and KV-cache append; and that of MLA.
#pragma once
// macros here, static members in the included file
#pragma push_macro("KIND")
#pragma push_macro("ZERO")
#undef KIND
#undef ZERO
#include "kv_cache/cuda_append.cuh"
#pragma pop_macro("ZERO")
#pragma pop_macro("KIND")
#include "position/rope_rotate.cuh"
#include "quantized_matmul/cuda_prologue_norm.cuh"

// Positions of tokens, block table and RoPE table.
struct KvPlacement {
  const float* cos_sin;  // (n_rope_rows, 2 * half), or null
  const int *rope_rows, *positions, *batch_indices, *kv_indices, *kv_indptr;
  int half, is_neox, n_rope_rows, n_requests, n_pages, page_size;

  // Address of a token's vector of a head in the cache, or null if it has no page.
  DEV_METHOD u8* at(const Cache& cache, int token, int head) const {
    const int position = positions[token];
    const int page = page_of(kv_indices, kv_indptr, n_requests, n_pages, batch_indices[token],
                             position < 0 ? -1 : position / page_size);
    return page < 0 ? nullptr : place_of(cache, page, position % page_size, head);
  }
};

// RMS norm of a vector in place; by a warp.
DEV void normalize_vector(float* x, int n, const float* weight, float eps, float offset) {
  const int lane = threadIdx.x & 31;
  const bool wide = is_wide(x);
  float own = 0.0f;
  for (int c = 0; c * NORM_CHUNK < n; c++) {
    const float sum = lane_sum(squares_of(load_four(x, c * NORM_CHUNK + 4 * lane, n, wide)));
    if (lane == c % 32) own = __fadd_rn(own, sum);
  }
  const Scaling scaling = {weight, nullptr, nullptr, 0};
  const float factor = norm_factor(lane_sum(own), n, eps);
  for (int k = 4 * lane; k < n; k += NORM_CHUNK)
    store_four(x, k, n,
               normalized<RMS_NORM>(load_four(x, k, n, wide), k, n, scaling, offset, 0.0f, factor));
  __syncwarp();
}

// Rotate a vector in place; by a warp.  A row outside the table gives NaN.
DEV void rotate_vector(float* x, const KvPlacement& p, int token) {
  const int row = p.rope_rows[token];
  const bool known = 0 <= row && row < p.n_rope_rows;
  const float* table = p.cos_sin + (known ? 2LL * p.half * row : 0);
  for (int i = threadIdx.x & 31; i < p.half; i += 32) {
    float *first = x + (p.is_neox ? i : 2 * i), *second = x + (p.is_neox ? p.half + i : 2 * i + 1);
    float a = *first, b = *second;
    rotate_pair(a, b, table[i], table[p.half + i]);
    *first = known ? a : nan32(), *second = known ? b : nan32();
  }
  __syncwarp();
}

#if EPILOGUE == EPILOGUE_ROPE_KV_APPEND
struct RopeKvAppend : KvPlacement {
  const float *q_weight, *k_weight;  // of the norm per head or over all heads, or null
  Cache keys, values;
  int head_dim, first, n_q, n_k;  // first: index of the matrix's first head; order: queries, keys, values
  float eps, offset;

  // Normalize head `number` if its kind has a norm; by a warp, as below.
  DEV_METHOD void normalize(float* x, int number) const {
    const float* weight = number < n_q ? q_weight : k_weight;
    if (number < n_q + n_k && weight != nullptr) normalize_vector(x, head_dim, weight, eps, offset);
  }

  // Rotate a token's query or key head, and append keys and values to their page.
  DEV_METHOD void place(float* x, int number, int token, u8* codes) const {
    const bool is_query = number < n_q, is_value = number >= n_q + n_k;
    if (!is_value && cos_sin != nullptr) rotate_vector(x, *this, token);
    if (is_query) return;
    u8* to = at(is_value ? values : keys, token, number - n_q - (is_value ? n_k : 0));
    if (to == nullptr) return;
    if (is_value) write_vector<V_FORMAT>(to, x, head_dim, nullptr, 0, 0, codes);
    else write_vector<K_FORMAT>(to, x, head_dim, nullptr, 0, 0, codes);
  }
};
#else
// MLA: rotates the last columns of queries; normalizes the first columns of the latent vector, which all
// heads share, and rotates the others.
struct MlaAppend : KvPlacement {
  float *queries, *latent;  // (tokens, n_q, width) and (tokens, width)
  i64 query_stride, latent_stride;
  const float* weight;  // of the norm, or null
  Cache pages;
  int head_dim, n_q;    // of the product's queries: its first rows
  int width, rank;      // columns of a latent vector; the compressed ones among them
  int first, n_latent;  // first row of the latent vector, -1 if computed before; 1, or 0 for none
  float eps, offset;

  // Copy the last columns of a query to the input of attention and rotate them; by a warp, as below.
  DEV_METHOD void place_query(const float* x, int head, int token) const {
    float* to = queries + token * query_stride + (i64)head * width + rank;
    x += head_dim - (width - rank);
    for (int d = threadIdx.x & 31; d < width - rank; d += 32) to[d] = x[d];
    __syncwarp();
    if (cos_sin != nullptr) rotate_vector(to, *this, token);
  }

  // Normalize and rotate a token's latent vector and append it to its page.
  DEV_METHOD void place_latent(int token, u8* codes) const {
    float* x = latent + token * latent_stride;
    normalize_vector(x, rank, weight, eps, offset);
    if (cos_sin != nullptr) rotate_vector(x + rank, *this, token);
    u8* to = at(pages, token, 0);
    if (to != nullptr) write_vector<K_FORMAT>(to, x, width, nullptr, 0, 0, codes);
  }
};
#endif
