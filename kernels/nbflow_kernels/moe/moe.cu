// Mixture of experts: routing, the order of experts, the weighted sum; products are `matmul`'s.
#include "cuda/numbers.cuh"
#include "cuda/reduce.cuh"

// ---- routing: a warp for each token, in float64 as on the CPU --------------------------------------

// The best of a number of values, on all lanes: the largest, of equals the first.
struct Best {
  double value;
  int place;
};

__device__ inline Best best_of(const double* values, int first, int stop) {
  Best b = {-infinity64(), 0x7fffffff};
  for (int i = first + threadIdx.x; i < stop; i += 32)
    if (values[i] > b.value) b = {values[i], i};
  for (int mask = 16; mask; mask /= 2) {
    const double value = __shfl_xor_sync(0xffffffffu, b.value, mask);
    const int place = __shfl_xor_sync(0xffffffffu, b.place, mask);
    if (value > b.value || (value == b.value && place < b.place)) b = {value, place};
  }
  return b;
}

// Scores of a token's experts; false if it has a NaN or +inf, or nothing but -inf.
__device__ inline bool score(const float* logits, int E, bool sigmoid, double* scores) {
  float top = -infinity();
  bool bad = false;
  for (int e = threadIdx.x; e < E; e += 32) {
    bad |= !(logits[e] < infinity());
    top = fmaxf(top, logits[e]);
  }
  top = reduce_lanes<32>(top, Max());
  if (__any_sync(0xffffffffu, bad) || top == -infinity()) return false;
  double total = 0.0;
  for (int e = threadIdx.x; e < E; e += 32) {
    scores[e] = sigmoid ? 1.0 / (1.0 + exp(-(double)logits[e])) : exp((double)logits[e] - top);
    total += scores[e];
  }
  total = reduce_lanes<32>(total, Sum());
  if (!sigmoid)
    for (int e = threadIdx.x; e < E; e += 32) scores[e] /= total;
  __syncwarp();
  return true;
}

// Set the values of experts outside the best groups to -inf.
__device__ inline void drop_groups(
    double* choice, int E, int n_groups, int top_k_groups, bool top2_sum, double* groups) {
  const int size = E / n_groups;
  for (int g = 0; g < n_groups; g++) {
    const Best first = best_of(choice, g * size, (g + 1) * size);
    double value = first.value;
    if (top2_sum && value > -infinity64())
      value += fmax(best_of(choice, g * size, first.place).value,
                    best_of(choice, first.place + 1, (g + 1) * size).value);
    if (threadIdx.x == 0) groups[g] = value;
  }
  __syncwarp();
  for (int i = 0; i < top_k_groups; i++) {
    const Best b = best_of(groups, 0, n_groups);
    __syncwarp();
    if (threadIdx.x == 0 && b.value > -infinity64()) groups[b.place] = nan64();  // chosen
    __syncwarp();
  }
  for (int e = threadIdx.x; e < E; e += 32)
    if (groups[e / size] == groups[e / size]) choice[e] = -infinity64();
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(32) routing(
    const float* logits, const float* bias, float* weights, int* ids, int E, int k, int sigmoid,
    int renormalize, int n_groups, int top_k_groups, int top2_sum, float scale, float min_score) {
  extern __shared__ double room[];
  double *scores = room, *choice = room + E, *groups = room + 2 * E;
  logits += (long long)blockIdx.x * E, weights += (long long)blockIdx.x * k;
  ids += (long long)blockIdx.x * k;
  if (!score(logits, E, sigmoid, scores)) {
    for (int j = threadIdx.x; j < k; j += 32) weights[j] = nan32(), ids[j] = -1;
    return;
  }
  for (int e = threadIdx.x; e < E; e += 32)
    choice[e] = logits[e] == -infinity() ? -infinity64() : scores[e] + (bias ? bias[e] : 0.0f);
  __syncwarp();
  if (n_groups > 1) drop_groups(choice, E, n_groups, top_k_groups, top2_sum, groups);
  double total = 0.0;
  for (int j = 0; j < k; j++) {
    const Best b = best_of(choice, 0, E);
    const bool used = b.value > -infinity64() && scores[b.place] >= (double)min_score;
    if (used) total += scores[b.place];
    __syncwarp();
    if (threadIdx.x == 0) {
      ids[j] = used ? b.place : -1;
      if (b.value > -infinity64()) choice[b.place] = -infinity64();
    }
    __syncwarp();
  }
  const double factor = renormalize && total > 0.0 ? scale / total : (double)scale;
  for (int j = threadIdx.x; j < k; j += 32)
    weights[j] = ids[j] >= 0 ? (float)(scores[ids[j]] * factor) : 0.0f;
}

// ---- order of experts ------------------------------------------------------------------------------

// Thread block e counts the pairs of expert e; ids that are no expert's belong to none.
extern "C" __global__ void __launch_bounds__(256) count_pairs(const int* ids, int* counts, int n) {
  __shared__ int room[8];
  int count = 0;
  for (int i = threadIdx.x; i < n; i += 256) count += ids[i] == blockIdx.x;
  count = reduce_block<256>(count, Sum(), room);
  if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

// Thread block e writes the pairs of expert e in order; the last one those of none, behind all.
extern "C" __global__ void __launch_bounds__(256) place_pairs(
    const int* ids, const int* counts, int* rows, int* indptr, int* inverse, int n, int E, int k) {
  __shared__ int room[8], before[8];
  const int e = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int at = 0;
  for (int i = threadIdx.x; i < e; i += 256) at += counts[i];
  at = reduce_block<256>(at, Sum(), room);
  if (threadIdx.x == 0) indptr[e] = at;
  for (int first = 0; first < n; first += 256) {
    const int i = first + threadIdx.x, id = i < n ? ids[i] : -2;
    const bool own = i < n && (e < E ? id == e : id < 0 || id >= E);
    const unsigned mask = __ballot_sync(0xffffffffu, own);
    if (lane == 0) before[warp] = __popc(mask);
    __syncthreads();
    int place = at, found = 0;
    for (int w = 0; w < 8; w++) {
      place += w < warp ? before[w] : 0;
      found += before[w];
    }
    place += __popc(mask & ((1u << lane) - 1u));
    if (own) rows[place] = i / k, inverse[i] = e < E ? place : -1;
    at += found;
    __syncthreads();
  }
}

// ---- sums ------------------------------------------------------------------------------------------

// A column of a token; its results are added in order.  Thread block (columns, token).
extern "C" __global__ void __launch_bounds__(256) combine(
    const float* y, const float* weights, const int* inverse, float* out, int H, int k, int P,
    int accumulate) {
  const int d = blockIdx.x * 256 + threadIdx.x, t = blockIdx.y;
  if (d >= H) return;
  float* to = out + (long long)t * H + d;
  float total = accumulate ? *to : 0.0f;
  for (int j = 0; j < k; j++) {
    const int place = inverse[t * k + j];
    if (place >= 0 && place < P) total = fmaf(weights[t * k + j], y[(long long)place * H + d], total);
  }
  *to = total;
}

// Row t of `y` times the logistic function of the product of row t of `x` and `gate`.
extern "C" __global__ void __launch_bounds__(256) scale_rows(
    const float* x, const float* gate, float* y, int width, int H) {
  __shared__ float room[8];
  x += (long long)blockIdx.x * width, y += (long long)blockIdx.x * H;
  float total = 0.0f;
  for (int d = threadIdx.x; d < width; d += 256) total = fmaf(x[d], gate[d], total);
  total = reduce_block<256>(total, Sum(), room);
  const float factor = 1.0f / (1.0f + expf(-total));
  for (int d = threadIdx.x; d < H; d += 256) y[d] *= factor;
}

// Zeros in the rows from indptr[E] on.  Thread block (columns, rows).
extern "C" __global__ void __launch_bounds__(256) clear_unused(
    float* out, const int* indptr, long long out_stride, int E, int n_rows, int width) {
  const int d = blockIdx.x * 256 + threadIdx.x;
  if (d >= width) return;
  for (int row = indptr[E] + blockIdx.y; row < n_rows; row += gridDim.y)
    out[row * out_stride + d] = 0.0f;
}
