// Depthwise causal convolution of a ragged batch.
#include "activation/functions.cuh"
#include "cuda/state_format.cuh"

// Block (i, b) convolves a channel per thread of sequence b, in the order of `convolution.cpu`: bias, then the
// earliest to the latest input, fused.  The last K - 1 inputs stay in registers; AHEAD loads are in flight at a time.
template <int K, bool SILU, int KIND>
__global__ void causal_conv1d(const float* x, const float* weight, const float* bias,
                              typename StateElement<KIND>::Stored* state, const int* indptr, const int* state_indices, float* out, int C, int N,
                              long long x_row, long long out_row) {
  constexpr int AHEAD = 8;
  const int c = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
  const int begin = indptr[b], end = indptr[b + 1], index = state_indices[b];
  if (c >= C || begin >= end) return;
  if (index < 0 || index >= N) {
    for (int t = begin; t < end; t++) out[t * out_row + c] = nan32();
    return;
  }
  state += ((long long)index * C + c) * (K - 1);
  float taps[K], seen[K - 1];
  for (int j = 0; j < K; j++) taps[j] = weight[(long long)c * K + j];
  for (int j = 0; j < K - 1; j++) seen[j] = load_state<KIND>((const char*)state, j, true);
  const float shift = bias != nullptr ? bias[c] : 0.0f;
  for (int first = begin; first < end; first += AHEAD) {
    float next[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) next[i] = first + i < end ? x[(first + i) * x_row + c] : 0.0f;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (first + i >= end) break;
      float y = shift;
      for (int j = 0; j < K - 1; j++) y = __fmaf_rn(seen[j], taps[j], y);
      y = __fmaf_rn(next[i], taps[K - 1], y);
      for (int j = 0; j < K - 2; j++) seen[j] = seen[j + 1];
      seen[K - 2] = round_state<KIND, 32>(next[i]);  // as if it came from the state
      out[(first + i) * out_row + c] = SILU ? logistic(y, 1.0f) : y;
    }
  }
  for (int j = 0; j < K - 1; j++) store_state<KIND, 32>((char*)state, j, true, seen[j]);
}
