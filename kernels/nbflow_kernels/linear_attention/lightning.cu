// Lightning attention, token by token.  A thread block holds 32 columns (values) of a head's state in
// registers for all tokens of its sequence: a lane a column, a warp KEYS rows.

#include "cuda/state_format.cuh"

constexpr int WARPS = 8;
constexpr int CHUNK = 32;  // tokens of the chunked form on the CPU: where the state is rounded

template <int KEYS, int KIND>
__global__ void lightning(const float* q, const float* k, const float* v, const float* slopes,
                          typename StateElement<KIND>::Stored* state, const int* indptr, const int* indices, float* out,
                          long long q_row, long long k_row, long long v_row, long long out_row,
                          int H, int D, int n_blocks, float scale) {
  __shared__ float sums[WARPS][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int column = blockIdx.x % n_blocks * 32 + lane;
  int h = blockIdx.x / n_blocks % H, s = blockIdx.x / n_blocks / H;
  if (indptr[s] == indptr[s + 1]) return;  // its state is not touched, whatever the index
  bool mine = column < D;
  const long long row_bytes = state_row_bytes<KIND>(D);
  char* at = (char*)state + ((long long)indices[s] * H + h) * D * row_bytes;
  const int begin = indptr[s], end = indptr[s + 1], whole = end - (end - begin) % CHUNK;
  float held[KEYS];
  for (int i = 0; i < KEYS; i++) {
    int key = warp * KEYS + i;
    held[i] = load_state<KIND>(at + key * row_bytes, column, key < D && mine);
  }
  float decay = expf(-slopes[h]);
  for (int t = begin; t < end; t++) {
    if (KIND != F32 && t > begin && (t >= whole || (t - begin) % CHUNK == 0))
      for (int i = 0; i < KEYS; i++) held[i] = round_state<KIND, 32>(held[i]);
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
    store_state<KIND, 32>(at + key * row_bytes, column, key < D && mine, held[i]);
  }
}
