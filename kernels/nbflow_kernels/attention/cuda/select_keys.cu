// Selection of the keys with the largest index scores, a thread block per row: scores to global
// memory, radix select of the smallest selected one, then the positions in order.

constexpr int THREADS = 256;

// Unsigned integers in the order of the floats.
__device__ unsigned ordered(float x) {
  unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

extern "C" __global__ void select_keys(
    const float* q, const float* weights, const float* keys, const int* batch, const int* positions,
    const int* kv_indices, const int* kv_indptr, float* scores, int* out, long long q_row,
    long long weight_row, long long page, long long key, long long n_scores, int H, int D,
    int page_size, int top_k) {
  __shared__ int counts[THREADS], above[THREADS], equal[THREADS], found, left, written;
  int t = blockIdx.x, lane = threadIdx.x, n = positions[t] + 1;
  int* row = out + (long long)t * top_k;
  if (n <= top_k) {
    for (int j = lane; j < top_k; j += THREADS) row[j] = j < n ? j : -1;
    return;
  }
  scores += t * n_scores;
  const int* pages = kv_indices + kv_indptr[batch[t]];
  for (int s = lane; s < n; s += THREADS) {
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
  if (lane == 0) left = top_k;
  unsigned least = 0, known = 0;  // bits of the smallest selected score, and which are known
  for (int shift = 24; shift >= 0; shift -= 8) {
    counts[lane] = 0;
    __syncthreads();
    for (int s = lane; s < n; s += THREADS) {
      unsigned bits = ordered(scores[s]);
      if ((bits & known) == least) atomicAdd(&counts[bits >> shift & 255], 1);
    }
    __syncthreads();
    if (lane == 0) {
      int digit = 255;
      while (counts[digit] < left) left -= counts[digit--];
      found = digit;
    }
    __syncthreads();
    least |= (unsigned)found << shift;
    known |= 255u << shift;
  }
  if (lane == 0) written = 0;
  for (int first = 0; first < n; first += THREADS) {  // `left` equals of `least` are selected
    int s = first + lane;
    unsigned bits = s < n ? ordered(scores[s]) : 0;
    above[lane] = s < n && bits > least;
    equal[lane] = s < n && bits == least;
    __syncthreads();
    int n_above = 0, n_equal = 0;
    for (int i = 0; i < lane; i++) n_above += above[i], n_equal += equal[i];
    int place = written + n_above + min(n_equal, left);
    if (above[lane] || (equal[lane] && n_equal < left)) row[place] = s;
    __syncthreads();
    if (lane == THREADS - 1) {
      n_equal = min(n_equal + equal[lane], left);
      written += n_above + above[lane] + n_equal;
      left -= n_equal;
    }
    __syncthreads();
  }
}
