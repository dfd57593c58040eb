// Heads of queries, keys and values that a product has made: normalized, turned by their positions, and
// keys and values written into their pages; the same of latent attention.
#pragma once
// names of static members there, macros here
#pragma push_macro("KIND")
#pragma push_macro("ZERO")
#undef KIND
#undef ZERO
#include "kv_cache/cuda_append.cuh"
#pragma pop_macro("ZERO")
#pragma pop_macro("KIND")
#include "position/rope_rotate.cuh"
#include "quantized_matmul/cuda_prologue_norm.cuh"

// Where tokens are in their sequences, and these in pages.
struct Places {
  const float* cos_sin;  // (n_rope_rows, 2 * half), or null
  const int *rope_rows, *positions, *batch_indices, *kv_indices, *kv_indptr;
  int half, is_neox, n_rope_rows, n_requests, n_pages, page_size;

  // Where a token's vector of a head lies, or null if there is no page for it.
  DEV_METHOD u8* at(const Cache& cache, int token, int head) const {
    const int position = positions[token];
    const int page = page_of(kv_indices, kv_indptr, n_requests, n_pages, batch_indices[token],
                             position < 0 ? -1 : position / page_size);
    return page < 0 ? nullptr : place_of(cache, page, position % page_size, head);
  }
};

// Normalize a vector in place: a warp.
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

// Turn a vector in place: a warp.  A row that is not in the table gives NaN.
DEV void turn_vector(float* x, const Places& p, int token) {
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

#if EPILOGUE == EPILOGUE_HEADS
struct Heads : Places {
  const float *q_weight, *k_weight;  // of the norm of each head or of all together, or null
  Cache keys, values;
  int head_dim, first, n_q, n_k;  // first: number of the matrix's first head; then queries, keys, values
  float eps, offset;

  // Normalize head `number`, if heads of its kind are: a warp, as below.
  DEV_METHOD void normalize(float* x, int number) const {
    const float* weight = number < n_q ? q_weight : k_weight;
    if (number < n_q + n_k && weight != nullptr) normalize_vector(x, head_dim, weight, eps, offset);
  }

  // Turn a token's head, and write it into its page if it is no query.
  DEV_METHOD void place(float* x, int number, int token, u8* codes) const {
    const bool is_query = number < n_q, is_value = number >= n_q + n_k;
    if (!is_value && cos_sin != nullptr) turn_vector(x, *this, token);
    if (is_query) return;
    u8* to = at(is_value ? values : keys, token, number - n_q - (is_value ? n_k : 0));
    if (to == nullptr) return;
    if (is_value) write_vector<V_FORMAT>(to, x, head_dim, nullptr, 0, 0, codes);
    else write_vector<K_FORMAT>(to, x, head_dim, nullptr, 0, 0, codes);
  }
};
#else
// Queries whose last columns are turned, and what all heads read: a vector whose first columns are
// normalized and whose others are turned.
struct Latent : Places {
  float *queries, *latent;  // (tokens, n_q, width) and (tokens, width)
  i64 query_stride, latent_stride;
  const float* weight;  // of the norm, or null
  Cache pages;
  int head_dim, n_q;    // of the product's queries: its first rows
  int width, rank;      // columns of a latent vector, and how many of them are compressed
  int first, n_latent;  // first row of the latent vectors, -1 if they were there before; 1, or 0 of none
  float eps, offset;

  // Copy the last columns of a query to where attention reads them, and turn them: a warp, as below.
  DEV_METHOD void place_query(const float* x, int head, int token) const {
    float* to = queries + token * query_stride + (i64)head * width + rank;
    x += head_dim - (width - rank);
    for (int d = threadIdx.x & 31; d < width - rank; d += 32) to[d] = x[d];
    __syncwarp();
    if (cos_sin != nullptr) turn_vector(to, *this, token);
  }

  // Finish a token's latent vector and write it into its page.
  DEV_METHOD void place_latent(int token, u8* codes) const {
    float* x = latent + token * latent_stride;
    normalize_vector(x, rank, weight, eps, offset);
    if (cos_sin != nullptr) turn_vector(x + rank, *this, token);
    u8* to = at(pages, token, 0);
    if (to != nullptr) write_vector<K_FORMAT>(to, x, width, nullptr, 0, 0, codes);
  }
};
#endif
