// The gated delta rule, token by token, with the state in registers.
#include "cuda/state_format.cuh"

constexpr int COLUMNS = BLOCK;  // of a thread block's part of the state, one to a lane
constexpr int CHUNK = 8;        // tokens of the chunked form of `delta_rule.cpu`: where the state is rounded
constexpr float EPS = 1e-6f;

// Products that a warp needs of a query and a key: their lengths' reciprocals and q . k.
struct Products {
  float of_q, of_k, together;
};

__device__ inline Products multiply(const float* q, const float* k, int Dk, bool normalize) {
  float qq = 0.0f, kk = 0.0f, qk = 0.0f;
  for (int i = threadIdx.x % 32; i < Dk; i += 32) {
    qq = __fmaf_rn(q[i], q[i], qq);
    kk = __fmaf_rn(k[i], k[i], kk);
    qk = __fmaf_rn(q[i], k[i], qk);
  }
  Products found = {1.0f, 1.0f, reduce_lanes<32>(qk, Sum())};
  if (normalize) {
    found.of_q = 1.0f / sqrtf(reduce_lanes<32>(qq, Sum()) + EPS);
    found.of_k = 1.0f / sqrtf(reduce_lanes<32>(kk, Sum()) + EPS);
  }
  return found;
}

// Block (i, h, b) has columns 32 i to 32 i + 31 of head h of sequence b: a column to a lane, ROWS rows to a warp,
// n_warps * ROWS >= Dk.  The query's product with the new state is S^T (a q) + (q . k) u, so that the products with
// key and query are added over the warps together.  g_head is the distance of a head's decays, g_row that of a row's.
template <int ROWS, int KIND>
__global__ void gated_delta_rule(const float* q, const float* k, const float* v, const float* g,
                                 const float* beta, typename StateElement<KIND>::Stored* state,
                                 const int* indptr, const int* state_indices,
                                 const int* positions, float* out, int N,
                                 int Hk, int Hv, int Dk, int Dv, long long q_token,
                                 long long k_token, long long v_token, long long g_token,
                                 long long beta_token, long long out_token, int g_head, int g_row,
                                 float scale, int normalize, int chunked) {
  __shared__ float partial[2][32][COLUMNS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
  const int column = blockIdx.x * COLUMNS + lane, h = blockIdx.y, b = blockIdx.z;
  const int begin = indptr[b], end = indptr[b + 1], index = state_indices[b];
  if (begin >= end) return;
  const bool inside = column < Dv;
  v += (long long)h * Dv + column, out += (long long)h * Dv + column;
  if (index < 0 || index >= N) {
    for (int t = begin; t < end; t++)
      if (inside && warp == 0) out[t * out_token] = nan32();
    return;
  }
  q += (long long)(h / (Hv / Hk)) * Dk, k += (long long)(h / (Hv / Hk)) * Dk;
  g += (long long)h * g_head, beta += h;
  const long long row_bytes = state_row_bytes<KIND>(Dv);
  char* rows = (char*)state + ((long long)index * Hv + h) * Dk * row_bytes;
  const int position = positions != nullptr ? positions[b] : 0;
  const int first = warp * ROWS;
  float S[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    S[r] = load_state<KIND>(rows + (first + r) * row_bytes, column, inside && first + r < Dk);
  for (int t = begin; t < end; t++) {
    const float *qt = q + t * q_token, *kt = k + t * k_token, *gt = g + t * g_token;
    const int start = t - (position + t - begin) % CHUNK;
    const bool is_chunk = chunked && start >= begin && start + CHUNK <= end;
    if (KIND != F32 && t > begin && (t == start || !is_chunk)) {
#pragma unroll
      for (int r = 0; r < ROWS; r++) S[r] = round_state<KIND, 32>(S[r]);
    }
    const Products found = multiply(qt, kt, Dk, normalize);
    const float q_factor = found.of_q * scale;
    float with_k = 0.0f, with_q = 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int i = first + r;
      if (i >= Dk) break;
      S[r] *= expf(gt[(long long)i * g_row]);
      with_k = __fmaf_rn(kt[i] * found.of_k, S[r], with_k);
      with_q = __fmaf_rn(qt[i] * q_factor, S[r], with_q);
    }
    partial[0][warp][lane] = with_k, partial[1][warp][lane] = with_q;
    __syncthreads();
    with_k = with_q = 0.0f;
    for (int w = 0; w < n_warps; w++) with_k += partial[0][w][lane], with_q += partial[1][w][lane];
    __syncthreads();  // `partial` is written again
    const float u = inside ? beta[t * beta_token] * (v[t * v_token] - with_k) : 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (first + r >= Dk) break;
      S[r] = __fmaf_rn(kt[first + r] * found.of_k, u, S[r]);
    }
    if (inside && warp == 0)
      out[t * out_token] = __fmaf_rn(found.together * found.of_k * q_factor, u, with_q);
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    store_state<KIND, 32>(rows + (first + r) * row_bytes, column, inside && first + r < Dk, S[r]);
}
