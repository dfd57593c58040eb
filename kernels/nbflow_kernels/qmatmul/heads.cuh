// Heads of queries, keys and values that a product has made: normalized, turned by their positions, and
// keys and values written into their pages.
#pragma once
// names of static members there, macros here
#pragma push_macro("KIND")
#pragma push_macro("ZERO")
#undef KIND
#undef ZERO
#include "kvcache/pages.cu"
#pragma pop_macro("ZERO")
#pragma pop_macro("KIND")
#include "position/turn.cuh"
#include "qmatmul/prologue.cuh"

struct Heads {
  const float *q_weight, *k_weight;  // of the norm of each head, or null
  const float* cos_sin;              // (n_positions, 2 * half), or null
  const int *positions, *batch_indices, *kv_indices, *kv_indptr;
  Cache keys, values;
  int head_dim, first, n_q, n_k;  // first: number of the matrix's first head; then queries, keys, values
  int half, is_neox, n_positions, n_requests, n_pages, page_size;
  float eps, offset;
};

// Normalize a vector in place: a warp.
DEV void normalize_head(float* x, int n, const float* weight, float eps, float offset) {
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

// Turn a vector in place: a warp.  A position that is in no table gives NaN.
DEV void turn_head(float* x, const Heads& p, int position) {
  const bool known = 0 <= position && position < p.n_positions;
  const float* table = p.cos_sin + (known ? 2LL * p.half * position : 0);
  for (int i = threadIdx.x & 31; i < p.half; i += 32) {
    float *first = x + (p.is_neox ? i : 2 * i), *second = x + (p.is_neox ? p.half + i : 2 * i + 1);
    float a = *first, b = *second;
    turn(a, b, table[i], table[p.half + i]);
    *first = known ? a : nan32(), *second = known ? b : nan32();
  }
  __syncwarp();
}

// What is left to do for head `head` of the matrix and a token, whose vector is x: a warp.  NORMED:
// the norms have been applied.
template <bool NORMED>
DEV void finish_head(const Heads& p, float* x, int head, int token, u8* codes) {
  const int number = p.first + head, position = p.positions[token];
  const bool is_query = number < p.n_q, is_value = number >= p.n_q + p.n_k;
  const float* weight = is_query ? p.q_weight : p.k_weight;
  if (!NORMED && !is_value && weight != nullptr)
    normalize_head(x, p.head_dim, weight, p.eps, p.offset);
  if (!is_value && p.cos_sin != nullptr) turn_head(x, p, position);
  if (is_query) return;
  const int page = page_of(p.kv_indices, p.kv_indptr, p.n_requests, p.n_pages, p.batch_indices[token],
                           position < 0 ? -1 : position / p.page_size);
  if (page < 0) return;
  const int slot = position % p.page_size, g = number - p.n_q - (is_value ? p.n_k : 0);
  if (is_value)
    write_vector<V_FORMAT>(place_of(p.values, page, slot, g), x, p.head_dim, nullptr, 0, 0, codes);
  else
    write_vector<K_FORMAT>(place_of(p.keys, page, slot, g), x, p.head_dim, nullptr, 0, 0, codes);
}
