// Selection of the keys with the largest index scores, a thread block per row: scores to global
// memory, then `select_largest`.

#include "sampling/select_largest.cuh"

extern "C" __global__ void select_keys(
    const float* q, const float* weights, const float* keys, const int* batch, const int* positions,
    const int* kv_indices, const int* kv_indptr, float* scores, int* out, long long q_row,
    long long weight_row, long long page, long long key, long long n_scores, int H, int D,
    int page_size, int top_k) {
  int t = blockIdx.x, lane = threadIdx.x, n = positions[t] + 1;
  int* row = out + (long long)t * top_k;
  if (n <= top_k) {
    for (int j = lane; j < top_k; j += SELECT_THREADS) row[j] = j < n ? j : -1;
    return;
  }
  scores += t * n_scores;
  const int* pages = kv_indices + kv_indptr[batch[t]];
  for (int s = lane; s < n; s += SELECT_THREADS) {
    const float* k = keys + pages[s / page_size] * page + s % page_size * key;
    float total = 0.0f;
    for (int h = 0; h < H; h++) {
      const float* query = q + t * q_row + h * D;
      float product = 0.0f;
      for (int d = 0; d < D; d++) product = fmaf(query[d], k[d], product);
      total += fmaxf(product, 0.0f) * weights[t * weight_row + h];
    }
    scores[s] = total;
  }
  __syncthreads();
  select_largest(scores, n, top_k, 0, row);
}
