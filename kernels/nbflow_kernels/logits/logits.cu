// Row-wise operations on logits: one thread block per row.  Exponentials and the sums of a thread are
// float32; sums over threads and results of one number per row are float64.
#include "cuda/types.cuh"
#include "cuda/block_reduce.cuh"

constexpr int THREADS = 512;
constexpr float LOWEST = -3.402823466e38f;  // logits up to this have probability 0

__device__ inline float capped(float x, float cap) {
  return cap == 0.0f ? x : tanhf(x / cap) * cap;
}

// The largest of a row; NaN if it holds a NaN or +inf, or nothing above LOWEST.
__device__ inline float row_top(const float* row, int n, float* scratch) {
  float top = -infinity();
  int bad = 0;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    bad |= isnan(row[i]);
    top = fmaxf(top, row[i]);
  }
  top = reduce_block<THREADS>(top, Max(), scratch);
  bad = __syncthreads_or(bad);
  return bad || top == infinity() || top <= LOWEST ? nan32() : top;
}

// Sum of exp((x - top) * factor) over a row, x capped.
__device__ inline double row_sum(const float* row, int n, float top, float factor, float cap,
                                 double* scratch) {
  float total = 0.0f;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    float x = capped(row[i], cap);
    if (x > LOWEST) total += expf((x - top) * factor);
  }
  return reduce_block<THREADS>((double)total, Sum(), scratch);
}

struct Row {
  float top, factor;
  double log_sum;
};

__device__ inline Row measured(const float* row, int V, float temperature, float cap) {
  __shared__ float scratch[THREADS / 32];
  __shared__ double scratch64[THREADS / 32];
  Row r;
  r.factor = 1.0f / temperature;
  r.top = capped(row_top(row, V, scratch), cap);
  r.log_sum = log(row_sum(row, V, r.top, r.factor, cap, scratch64));
  return r;
}

extern "C" __global__ void log_softmax(const float* logits, const float* temperature, float* out,
                                       int V, float cap) {
  const float* row = logits + (long long)blockIdx.x * V;
  Row r = measured(row, V, temperature[blockIdx.x], cap);
  float shift = (float)-r.log_sum;
  for (int i = threadIdx.x; i < V; i += THREADS)
    out[(long long)blockIdx.x * V + i] = (capped(row[i], cap) - r.top) * r.factor + shift;
}

// out[b, k] = log-probability of ids[b, k]; NaN for an id out of range.
extern "C" __global__ void token_log_probs(const float* logits, const int* ids,
                                           const float* temperature, double* out, int V, int K,
                                           float cap) {
  const float* row = logits + (long long)blockIdx.x * V;
  Row r = measured(row, V, temperature[blockIdx.x], cap);
  for (int k = threadIdx.x; k < K; k += THREADS) {
    int id = ids[(long long)blockIdx.x * K + k];
    double found = nan64();
    if (0 <= id && id < V) found = ((double)capped(row[id], cap) - r.top) * r.factor - r.log_sum;
    out[(long long)blockIdx.x * K + k] = found;
  }
}

// out[b] = sum of p * log(p / q) = sum of a * (u - v) / sum of a + log(sum of exp(v) / sum of a),
// u, v the logits below their tops, a = exp(u).
extern "C" __global__ void kl_divergence(const float* logits_p, const float* logits_q, double* out,
                                         int V) {
  __shared__ float scratch[THREADS / 32];
  __shared__ double scratch64[THREADS / 32];
  const float *p = logits_p + (long long)blockIdx.x * V, *q = logits_q + (long long)blockIdx.x * V;
  float top_p = row_top(p, V, scratch), top_q = row_top(q, V, scratch);
  float sum_p = 0.0f, sum_q = 0.0f, product = 0.0f, lost = 0.0f;
  for (int i = threadIdx.x; i < V; i += THREADS) {
    float u = p[i] - top_p, v = q[i] - top_q;
    float a = p[i] > LOWEST ? expf(u) : 0.0f;
    sum_p += a;
    if (q[i] > LOWEST) {
      sum_q += expf(v);
      if (a > 0.0f) product += a * (u - v);
    } else {
      lost += a;
    }
  }
  double total_p = reduce_block<THREADS>((double)sum_p, Sum(), scratch64);
  double total_q = reduce_block<THREADS>((double)sum_q, Sum(), scratch64);
  double products = reduce_block<THREADS>((double)product, Sum(), scratch64);
  double beyond = reduce_block<THREADS>((double)lost, Sum(), scratch64);
  if (threadIdx.x != 0) return;
  double divergence = products / total_p + log(total_q / total_p);
  if (beyond > 0.0) divergence = infinity64();
  if (divergence < 0.0) divergence = 0.0;  // NaN stays NaN
  out[blockIdx.x] = isnan(top_p) || isnan(top_q) ? nan64() : divergence;
}

// Index of a row's largest element, the first of equals; -1 if the row has a NaN.
__device__ inline int row_argmax(const float* row, int n, float* scratch, int* scratch_int) {
  float top = -infinity();
  int place = 0x7fffffff, bad = 0;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    bad |= isnan(row[i]);
    if (row[i] > top || place == 0x7fffffff) top = row[i], place = i;
  }
  float best = reduce_block<THREADS>(top, Max(), scratch);
  bad = __syncthreads_or(bad);
  place = reduce_block<THREADS>(top == best ? -place : -0x7fffffff, Max(), scratch_int);
  return bad ? -1 : -place;
}

extern "C" __global__ void top1_agreement(const float* logits_p, const float* logits_q,
                                          unsigned char* out, int V) {
  __shared__ float scratch[THREADS / 32];
  __shared__ int scratch_int[THREADS / 32];
  int p = row_argmax(logits_p + (long long)blockIdx.x * V, V, scratch, scratch_int);
  int q = row_argmax(logits_q + (long long)blockIdx.x * V, V, scratch, scratch_int);
  if (threadIdx.x == 0) out[blockIdx.x] = p >= 0 && p == q;
}

extern "C" __global__ void soft_cap(const float* logits, float* out, long long n, float cap) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = tanhf(logits[i] / cap) * cap;
}

// Masked softmax of scores (B, H, Tq, Tk); a fully masked row becomes zeros.
// Mask and bias are broadcast: their strides along b, h, i and j, in elements, may be 0.
extern "C" __global__ void masked_softmax(const float* scores, const unsigned char* mask,
                                          const float* bias, float* out, long long mask_b,
                                          long long mask_h, long long mask_i, int mask_j,
                                          long long bias_b, long long bias_h, long long bias_i,
                                          int bias_j, int H, int Tq, int Tk, float sm_scale,
                                          float cap, int causal) {
  __shared__ float scratch[THREADS / 32];
  __shared__ double scratch64[THREADS / 32];
  int i = blockIdx.x % Tq, h = blockIdx.x / Tq % H, b = blockIdx.x / (Tq * H);
  const float* row = scores + (long long)blockIdx.x * Tk;
  float* to = out + (long long)blockIdx.x * Tk;
  if (mask != nullptr) mask += b * mask_b + h * mask_h + i * mask_i;
  if (bias != nullptr) bias += b * bias_b + h * bias_h + i * bias_i;
  int seen = causal ? min(Tk, Tk - Tq + i + 1) : Tk;
  int blind = 1;
  for (int j = threadIdx.x; j < Tk; j += THREADS) {  // every thread reads what it wrote itself
    float s = -infinity();
    if (j < seen && (mask == nullptr || mask[(long long)j * mask_j] != 0)) {
      s = capped(row[j] * sm_scale, cap);
      if (bias != nullptr) s += bias[(long long)j * bias_j];
    }
    blind &= s <= LOWEST;
    to[j] = s;
  }
  blind = __syncthreads_and(blind);
  float top = row_top(to, Tk, scratch);
  float total = 0.0f;
  for (int j = threadIdx.x; j < Tk; j += THREADS) {
    float e = to[j] > LOWEST ? expf(to[j] - top) : 0.0f;
    to[j] = e;
    total += e;
  }
  float factor = (float)(1.0 / reduce_block<THREADS>((double)total, Sum(), scratch64));
  for (int j = threadIdx.x; j < Tk; j += THREADS) {
    float y = isnan(top) && j < seen ? top : to[j] * factor;
    to[j] = blind || j >= seen ? 0.0f : y;
  }
}
