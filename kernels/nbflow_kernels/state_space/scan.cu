// Scans of Mamba-1 and Mamba-2, token by token.  A row of the state (N numbers of a channel, or of a
// value of a head) is held in the registers of LANES lanes for all tokens of its sequence.
#include "cuda/state_format.cuh"

constexpr int THREADS = 128;
constexpr int CHUNK = 32;  // tokens of the chunked form of Mamba-2 on the CPU: where the state is rounded

__device__ inline float softplus(float v) { return v > 20.0f ? v : log1pf(expf(v)); }

// Row r of the n_rows = H * P rows of a state belongs to head r / P; Mamba-1 has P = 1.  A head reads
// group h / per_group of b and c.  PER_STATE: a has a rate for each number of the state, else for
// each head.  A lane has VALUES numbers of a row, LANES apart.
template <int LANES, int VALUES, bool PER_STATE, int KIND>
__global__ void scan(const float* x, const float* dt, const float* a, const float* b, const float* c,
                     typename StateElement<KIND>::Stored* state, const int* indptr, const int* indices, const float* d,
                     const float* dt_bias, float* out, long long x_row, long long dt_row,
                     long long b_row, long long c_row, long long out_row, int n_rows, int P,
                     int per_group, int N, int n_blocks, int use_softplus, float low, float high) {
  constexpr int ROWS = THREADS / LANES;
  int s = blockIdx.x / n_blocks;
  if (indptr[s] == indptr[s + 1]) return;  // its state is not touched, whatever the index
  int lane = threadIdx.x % LANES, wanted = blockIdx.x % n_blocks * ROWS + threadIdx.x / LANES;
  int row = min(wanted, n_rows - 1);  // all lanes of a warp shuffle; only wanted rows count
  bool mine = wanted < n_rows;
  int head = row / P, group = head / per_group;
  char* h_at = (char*)state + ((long long)indices[s] * n_rows + row) * state_row_bytes<KIND>(N);
  const int begin = indptr[s], end = indptr[s + 1];
  const int whole = PER_STATE ? begin : end - (end - begin) % CHUNK;
  float h[VALUES], rate[VALUES];
  for (int i = 0; i < VALUES; i++) {
    int n = i * LANES + lane;
    h[i] = load_state<KIND>(h_at, n, n < N && mine);
    rate[i] = !PER_STATE ? a[head] : n < N ? a[(long long)row * N + n] : 0.0f;
  }
  float bias = dt_bias != nullptr ? dt_bias[head] : 0.0f, skip = d != nullptr ? d[head] : 0.0f;
  for (int t = begin; t < end; t++) {
    if (KIND != F32 && t > begin && (t >= whole || (t - begin) % CHUNK == 0))
      for (int i = 0; i < VALUES; i++) h[i] = round_state<KIND, LANES>(h[i]);
    float step = dt[t * dt_row + head] + bias;
    if (use_softplus) step = softplus(step);
    step = step < low ? low : step > high ? high : step;  // a NaN stays
    float value = x[t * x_row + row], added = step * value, sum = 0.0f;
    const float* b_at = b + t * b_row + (long long)group * N;
    const float* c_at = c + t * c_row + (long long)group * N;
    float decay = PER_STATE ? 0.0f : expf(step * rate[0]);
    for (int i = 0; i < VALUES; i++) {
      int n = i * LANES + lane;
      if (n >= N) break;
      if (PER_STATE) decay = expf(step * rate[i]);
      h[i] = fmaf(decay, h[i], added * b_at[n]);
      sum = fmaf(h[i], c_at[n], sum);
    }
    sum = reduce_lanes<LANES>(sum, Sum());
    if (lane == 0 && mine) out[t * out_row + row] = sum + skip * value;
  }
  for (int i = 0; i < VALUES; i++) {
    int n = i * LANES + lane;
    store_state<KIND, LANES>(h_at, n, n < N && mine, h[i]);
  }
}
