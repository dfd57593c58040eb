// Retrieval by product keys: experts i * n_keys + j with the scores of key i and of key j of another
// half.  Ranks are counted instead of sorted: each thread counts the values before its own.
#include "cuda/block_reduce.cuh"

constexpr int MAX_KEYS = 1024, MAX_CHOSEN = 128;

// True if value a at index i comes before value b at index j: larger, or equal and of a lower index.
__device__ inline bool precedes(float a, int i, float b, int j) {
  return a > b || (a == b && i < j);
}

// Indices of the n_best largest of n values, in order.
__device__ inline void rank_best(const float* values, int n, int* order, int n_best) {
  for (int i = threadIdx.x; i < n; i += 256) {
    int before = 0;
    for (int j = 0; j < n; ++j) before += precedes(values[j], j, values[i], i);
    if (before < n_best) order[before] = i;
  }
}

// weights, ids = the top_k pairs of keys with the largest sums, for the scores (2 * n_keys) of a token.
// Of sorted keys, pair (a, b) can be among them only if (a + 1) * (b + 1) <= top_k.
extern "C" __global__ void __launch_bounds__(256) product_key_routing(
    const float* scores, float* weights, int* ids, int n_keys, int top_k, int first,
    int n_experts) {
  __shared__ float values[2 * MAX_KEYS];
  __shared__ int order[2][MAX_CHOSEN];
  __shared__ float chosen[MAX_CHOSEN];
  __shared__ int experts[MAX_CHOSEN];
  __shared__ float scratch[8];
  scores += (long long)blockIdx.x * 2 * n_keys;
  const int n_best = min(n_keys, top_k);
  for (int i = threadIdx.x; i < 2 * n_keys; i += 256) values[i] = scores[i];
  for (int i = threadIdx.x; i < MAX_CHOSEN; i += 256)  // a NaN has no rank
    order[0][i] = order[1][i] = experts[i] = 0, chosen[i] = __int_as_float(0x7fffffff);
  __syncthreads();
  rank_best(values, n_keys, order[0], n_best);
  rank_best(values + n_keys, n_keys, order[1], n_best);
  __syncthreads();
  for (int pair = threadIdx.x; pair < n_best * n_best; pair += 256) {
    const int a = pair / n_best, b = pair % n_best;
    if ((a + 1) * (b + 1) > top_k) continue;
    const int i = order[0][a], j = order[1][b], expert = i * n_keys + j;
    const float score = __fadd_rn(values[i], values[n_keys + j]);
    int before = 0;
    for (int c = 0; c < n_best; ++c) {
      const int row = order[0][c];
      for (int d = 0; d < n_best && (c + 1) * (d + 1) <= top_k; ++d) {
        const int column = order[1][d];
        const float other = __fadd_rn(values[row], values[n_keys + column]);
        before += precedes(other, row * n_keys + column, score, expert);
      }
    }
    if (before < top_k) chosen[before] = score, experts[before] = expert;
  }
  __syncthreads();
  const float highest = chosen[0];
  float total = 0.0f;
  for (int r = threadIdx.x; r < top_k; r += 256) total += __expf(__fsub_rn(chosen[r], highest));
  total = reduce_block<256>(total, Sum(), scratch);
  for (int r = threadIdx.x; r < top_k; r += 256) {
    const int own = experts[r] - first;
    const long long at = (long long)blockIdx.x * top_k + r;
    weights[at] = __fdiv_rn(__expf(__fsub_rn(chosen[r], highest)), total);
    ids[at] = own >= 0 && own < n_experts ? own : -1;
  }
}

// out[p] = x[p / n_chosen] @ table[ids[p]], a warp for each product; 0 for ids outside of the table.
extern "C" __global__ void __launch_bounds__(256) gathered_dot(
    const float* x, const float* table, const int* ids, float* out, long long x_row, int n_products,
    int n_chosen, int n_rows, int E) {
  const int p = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (p >= n_products) return;  // all lanes of the warp
  const int row = ids[p];
  float sum = 0.0f;
  if (row >= 0 && row < n_rows) {
    x += p / n_chosen * x_row;
    table += (long long)row * E;
    for (int e = lane; e < E; e += 32) sum = __fmaf_rn(x[e], table[e], sum);
  }
  sum = reduce_lanes<32>(sum, Sum());
  if (lane == 0) out[p] = sum;
}
