// Mixture of experts: routing, permutation by expert, weighted sum.
#include "moe/cuda_topk_routing.cuh"

// ---- routing ----------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(32) routing(
    const float* logits, float* weights, int* ids, Routing r) {
  extern __shared__ double scratch[];
  const long long token = blockIdx.x;
  route(r, logits + token * r.E, weights + token * r.k, ids + token * r.k, scratch);
}

// ---- permutation -----------------------------------------------------------------------------------

// Thread block e counts the pairs of expert first_id + e; ids out of range are ignored.
extern "C" __global__ void __launch_bounds__(256) count_pairs(
    const int* ids, int* counts, int n, int first_id) {
  __shared__ int scratch[8];
  int count = 0;
  for (int i = threadIdx.x; i < n; i += 256) count += ids[i] == first_id + (int)blockIdx.x;
  count = reduce_block<256>(count, Sum(), scratch);
  if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

// Thread block e writes the pairs of expert first_id + e in order; thread block E the pairs without an
// expert, last.
extern "C" __global__ void __launch_bounds__(256) place_pairs(
    const int* ids, const int* counts, int* rows, int* indptr, int* inverse, int n, int E, int k,
    int first_id) {
  __shared__ int scratch[8], before[8];
  const int e = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int at = 0;
  for (int i = threadIdx.x; i < e; i += 256) at += counts[i];
  at = reduce_block<256>(at, Sum(), scratch);
  if (threadIdx.x == 0) indptr[e] = at;
  for (int first = 0; first < n; first += 256) {
    const int i = first + threadIdx.x, id = i < n ? ids[i] - first_id : -2;
    const bool own = i < n && (e < E ? id == e : id < 0 || id >= E);
    const unsigned mask = __ballot_sync(0xffffffffu, own);
    if (lane == 0) before[warp] = __popc(mask);
    __syncthreads();
    int position = at, found = 0;
    for (int w = 0; w < 8; w++) {
      position += w < warp ? before[w] : 0;
      found += before[w];
    }
    position += __popc(mask & ((1u << lane) - 1u));
    if (own) rows[position] = i / k, inverse[i] = e < E ? position : -1;
    at += found;
    __syncthreads();
  }
}

// ---- sums ------------------------------------------------------------------------------------------

// Weighted sum of a token's results, in order.  Thread block (columns, token).
extern "C" __global__ void __launch_bounds__(256) combine(
    const float* y, const float* weights, const int* inverse, float* out, int H, int k, int P,
    int accumulate, long long y_row, long long out_row) {
  const int d = blockIdx.x * 256 + threadIdx.x, t = blockIdx.y;
  if (d >= H) return;
  float* to = out + t * out_row + d;
  float total = accumulate ? *to : 0.0f;
  for (int j = 0; j < k; j++) {
    const int position = inverse[t * k + j];
    if (position >= 0 && position < P) total = fmaf(weights[t * k + j], y[position * y_row + d], total);
  }
  *to = total;
}

// y[t] *= sigmoid(x[t] . gate)
extern "C" __global__ void __launch_bounds__(256) scale_rows(
    const float* x, const float* gate, float* y, int width, int H) {
  __shared__ float scratch[8];
  x += (long long)blockIdx.x * width, y += (long long)blockIdx.x * H;
  const float factor = gate_factor(x, gate, width, scratch);
  for (int d = threadIdx.x; d < H; d += 256) y[d] *= factor;
}

// Zero the rows from indptr[E] on.  Thread block (columns, rows).
extern "C" __global__ void __launch_bounds__(256) clear_unused(
    float* out, const int* indptr, long long out_stride, int E, int n_rows, int width) {
  const int d = blockIdx.x * 256 + threadIdx.x;
  if (d >= width) return;
  for (int row = indptr[E] + blockIdx.y; row < n_rows; row += gridDim.y)
    out[row * out_stride + d] = 0.0f;
}
