// Lightning attention, token by token.  A thread block holds 32 columns (values) of a head's state in
// registers for all tokens of its sequence: a lane a column, a warp KEYS rows.

constexpr int WARPS = 8;

template <int KEYS>
__global__ void lightning(const float* q, const float* k, const float* v, const float* slopes,
                          float* state, const int* indptr, const int* indices, float* out,
                          long long q_row, long long k_row, long long v_row, long long out_row,
                          int H, int D, int n_blocks, float scale) {
  __shared__ float sums[WARPS][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int column = blockIdx.x % n_blocks * 32 + lane;
  int h = blockIdx.x / n_blocks % H, s = blockIdx.x / n_blocks / H;
  if (indptr[s] == indptr[s + 1]) return;  // its state is not touched, whatever the index
  bool mine = column < D;
  float* at = state + ((long long)indices[s] * H + h) * D * D + column;
  float held[KEYS];
  for (int i = 0; i < KEYS; i++) {
    int key = warp * KEYS + i;
    held[i] = key < D && mine ? at[(long long)key * D] : 0.0f;
  }
  float decay = expf(-slopes[h]);
  for (int t = indptr[s]; t < indptr[s + 1]; t++) {
    float value = mine ? v[t * v_row + h * D + column] : 0.0f, total = 0.0f;
    const float* keys = k + t * k_row + h * D;
    const float* queries = q + t * q_row + h * D;
    for (int i = 0; i < KEYS; i++) {
      int key = warp * KEYS + i;
      if (key >= D) break;
      held[i] = fmaf(decay, held[i], keys[key] * value);
      total = fmaf(queries[key], held[i], total);
    }
    sums[warp][lane] = total;
    __syncthreads();
    if (warp == 0) {
      total = 0.0f;
      for (int w = 0; w < WARPS; w++) total += sums[w][lane];
      if (mine) out[t * out_row + h * D + column] = scale * total;
    }
    __syncthreads();
  }
  for (int i = 0; i < KEYS; i++) {
    int key = warp * KEYS + i;
    if (key < D && mine) at[(long long)key * D] = held[i];
  }
}
