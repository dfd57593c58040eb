// Selection of the largest of a row of scores by a thread block: radix select of the smallest selected
// score, then the positions in order.
#pragma once

constexpr int SELECT_THREADS = 256;

// Unsigned integers in the order of the floats.
__device__ inline unsigned ordered(float x) {
  unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Count a digit of each thread of a warp that is `here`.  Scores mostly share their first digit, and
// atomic additions to one address wait for each other: the warp adds up its first two digits.
__device__ inline void count_digit(int* counts, bool here, int digit) {
  unsigned left = __ballot_sync(~0u, here);
  for (int i = 0; left && i < 2; i++) {
    int chosen = __shfl_sync(~0u, digit, __ffs(left) - 1);
    unsigned all = __ballot_sync(~0u, here && digit == chosen);
    if ((threadIdx.x & 31) == __ffs(all) - 1) atomicAdd(&counts[chosen], __popc(all));
    here = here && digit != chosen;
    left &= ~all;
  }
  if (here) atomicAdd(&counts[digit], 1);
}

// Write the positions of the `top_k` largest of n > top_k scores to `row`, ascending; of equal scores the
// first, or the last if `prefer_last`.  SELECT_THREADS threads.
__device__ inline void select_largest(const float* scores, int n, int top_k, int prefer_last, int* row) {
  __shared__ int counts[SELECT_THREADS], above[SELECT_THREADS], equal[SELECT_THREADS];
  __shared__ int found, left, n_above, n_equal;
  int lane = threadIdx.x;
  if (lane == 0) left = top_k;
  unsigned least = 0, known = 0;  // bits of the smallest selected score, and which are known
  for (int shift = 24; shift >= 0; shift -= 8) {
    counts[lane] = 0;
    __syncthreads();
    for (int first = 0; first < n; first += SELECT_THREADS) {
      int s = first + lane;
      unsigned bits = s < n ? ordered(scores[s]) : 0;
      count_digit(counts, s < n && (bits & known) == least, bits >> shift & 255);
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
  // `left` of the equals of `least` are selected, from number `skipped` on
  int quota = left, skipped = prefer_last ? counts[found] - left : 0;
  if (lane == 0) n_above = n_equal = 0;
  __syncthreads();
  for (int first = 0; first < n; first += SELECT_THREADS) {
    int s = first + lane;
    unsigned bits = s < n ? ordered(scores[s]) : 0;
    above[lane] = s < n && bits > least;
    equal[lane] = s < n && bits == least;
    __syncthreads();
    int is_above = n_above, is_equal = n_equal;  // before this position
    for (int i = 0; i < lane; i++) is_above += above[i], is_equal += equal[i];
    int chosen = min(max(is_equal - skipped, 0), quota);  // equals before it that are selected
    bool selected = equal[lane] && is_equal >= skipped && chosen < quota;
    if (above[lane] || selected) row[is_above + chosen] = s;
    __syncthreads();
    if (lane == SELECT_THREADS - 1)
      n_above = is_above + above[lane], n_equal = is_equal + equal[lane];
    __syncthreads();
  }
}
