// Logits processors: one thread block per row.  The tokens of row b are token_ids[indptr[b]:
// indptr[b + 1]]; a token out of range is skipped.  Rows need `scratch`, ints of shape (B, V)
// that need not be initialized: only the entries of listed tokens are used, and set first.
#include "cuda/types.cuh"

// Store of one value by possibly several threads.
__device__ inline void put(int* to, int value) { *(volatile int*)to = value; }
__device__ inline void forbid(float* logit) { *(volatile float*)logit = -infinity(); }

// Arithmetic is float64, rounded once, as on the CPU: a few numbers of a row.

// repetition: logit / r or * r for tokens seen, - (f * count + p) for generated ones.
// parameters (B, 3): r, f, p.  spans (B, 2): the window (-1: all), the tokens of the prompt.
extern "C" __global__ void penalties(float* logits, const int* token_ids, const int* indptr,
                                     const double* parameters, const long long* spans, int* scratch,
                                     int V) {
  int b = blockIdx.x;
  long long first = indptr[b], end = indptr[b + 1], answer = first + spans[2 * b + 1];
  long long window = spans[2 * b];
  if (window >= 0) first = max(first, end - window);
  const double* p = parameters + 3 * b;
  logits += (long long)b * V, scratch += (long long)b * V;
  for (long long i = first + threadIdx.x; i < end; i += blockDim.x)
    if ((unsigned)token_ids[i] < V) put(scratch + token_ids[i], 0);
  __syncthreads();
  for (long long i = first + threadIdx.x; i < end; i += blockDim.x)
    if ((unsigned)token_ids[i] < V) {  // bit 0: seen; higher bits: its generated count
      atomicOr(scratch + token_ids[i], 1);
      if (i >= answer) atomicAdd(scratch + token_ids[i], 2);
    }
  __syncthreads();
  for (long long i = first + threadIdx.x; i < end; i += blockDim.x) {
    int token = token_ids[i];
    if ((unsigned)token >= V) continue;
    int count = atomicExch(scratch + token, 0);  // the first thread to arrive applies it
    if (count == 0) continue;
    double logit = logits[token];
    logit = logit > 0.0 ? logit / p[0] : logit * p[0];
    if (count > 1) logit -= p[1] * (count >> 1) + p[2];
    logits[token] = (float)logit;
  }
}

// A token that would repeat an n-gram of sizes[b] tokens becomes -inf.
extern "C" __global__ void no_repeat_ngram(float* logits, const int* token_ids, const int* indptr,
                                           const long long* sizes, int V) {
  int b = blockIdx.x;
  long long end = indptr[b + 1], n = sizes[b];
  if (n < 1) return;
  for (long long i = indptr[b] + n - 1 + threadIdx.x; i < end; i += blockDim.x) {
    bool same = true;
    for (long long j = 1; same && j < n; j++) same = token_ids[i - j] == token_ids[end - j];
    if (same && (unsigned)token_ids[i] < V) forbid(logits + (long long)b * V + token_ids[i]);
  }
}

// DRY: a token that would extend a repetition of `repeated` tokens is lowered by
// multiplier * base ** (repeated - allowed).  parameters (B, 2): multiplier, base.  spans (B, 2): the
// window, the allowed length.  words[edges[w]:edges[w + 1]] are sequence breakers.
extern "C" __global__ void dry(float* logits, const int* token_ids, const int* indptr,
                               const double* parameters, const long long* spans, const int* words,
                               const int* edges, int* scratch, int V, int n_words) {
  __shared__ int limit;  // tokens after the last breaker
  int b = blockIdx.x;
  long long first = indptr[b], end = indptr[b + 1], window = spans[2 * b];
  if (window >= 0) first = max(first, end - window);
  double multiplier = parameters[2 * b], base = parameters[2 * b + 1];
  int n = (int)(end - first), allowed = (int)min(spans[2 * b + 1], 0x3fffffffLL);
  if (multiplier == 0.0 || n <= allowed) return;
  const int* tokens = token_ids + first;
  logits += (long long)b * V, scratch += (long long)b * V;
  if (threadIdx.x == 0) limit = n;
  for (int k = threadIdx.x; k < n; k += blockDim.x)
    if ((unsigned)tokens[k] < V) put(scratch + tokens[k], 0);
  __syncthreads();
  for (int w = 0; w < n_words; w++) {
    int size = edges[w + 1] - edges[w];
    for (int after = threadIdx.x; after + size <= n; after += blockDim.x) {
      bool same = true;
      for (int j = 0; same && j < size; j++)
        same = tokens[n - after - 1 - j] == words[edges[w + 1] - 1 - j];
      if (same) atomicMin(&limit, after);
    }
  }
  __syncthreads();
  // beyond `most` the penalty overflows float32, so longer matches count the same
  double most = base > 1.000001 ? floor(88.72283905206835 / log(base)) : 1e9;
  int longest = min(limit, base > 1.000001 ? (int)min(allowed + most, 1e9) : n);
  for (int k = 1 + threadIdx.x; k < n; k += blockDim.x) {  // the match that ends k tokens before
    int repeated = 0;
    while (repeated < longest && k + repeated < n &&
           tokens[n - 1 - repeated] == tokens[n - 1 - k - repeated])
      repeated++;
    int token = tokens[n - k];
    if (repeated >= allowed && (unsigned)token < V) atomicMax(scratch + token, repeated);
  }
  __syncthreads();
  for (int k = 1 + threadIdx.x; k < n; k += blockDim.x) {
    int token = tokens[n - k];
    if ((unsigned)token >= V) continue;
    int repeated = atomicExch(scratch + token, 0);
    bool breaker = false;
    for (int w = 0; w < n_words; w++)
      breaker |= edges[w + 1] - edges[w] == 1 && words[edges[w]] == token;
    if (repeated == 0 || breaker) continue;
    double exponent = min((double)(repeated - allowed), most);
    logits[token] = (float)(logits[token] - multiplier * pow(base, exponent));
  }
}

// logits[token_ids[i]] += biases[i], in list order for repeated tokens: each round
// adds the next entry of every token.  `scratch` is twice as large.
extern "C" __global__ void logit_bias(float* logits, const int* token_ids, const float* biases,
                                      const int* indptr, int* scratch, int V) {
  int b = blockIdx.x, first = indptr[b], end = indptr[b + 1];
  logits += (long long)b * V;
  int *next = scratch + 2LL * b * V, *last = next + V;  // entry of this round; last one added
  for (int i = first + threadIdx.x; i < end; i += blockDim.x)
    if ((unsigned)token_ids[i] < V) {
      put(next + token_ids[i], 0x7fffffff);
      put(last + token_ids[i], -1);
    }
  __syncthreads();
  for (int waiting = 1; waiting;) {
    int mine = 0;
    for (int i = first + threadIdx.x; i < end; i += blockDim.x)
      if ((unsigned)token_ids[i] < V && i > last[token_ids[i]]) {
        atomicMin(next + token_ids[i], i);
        mine = 1;
      }
    waiting = __syncthreads_or(mine);
    for (int i = first + threadIdx.x; i < end; i += blockDim.x)
      if ((unsigned)token_ids[i] < V && atomicCAS(next + token_ids[i], i, 0x7fffffff) == i) {
        logits[token_ids[i]] += biases[i];
        last[token_ids[i]] = i;
      }
    __syncthreads();
  }
}

// Forbids the listed tokens; with `keep` (and a list) all others.  `kept` holds a float per entry.
extern "C" __global__ void mask_ids(float* logits, const int* token_ids, const int* indptr,
                                    float* kept, int V, int keep) {
  int b = blockIdx.x, first = indptr[b], end = indptr[b + 1];
  logits += (long long)b * V;
  if (!keep) {
    for (int i = first + threadIdx.x; i < end; i += blockDim.x)
      if ((unsigned)token_ids[i] < V) forbid(logits + token_ids[i]);
    return;
  }
  if (first == end) return;
  for (int i = first + threadIdx.x; i < end; i += blockDim.x)
    kept[i] = (unsigned)token_ids[i] < V ? logits[token_ids[i]] : 0.0f;
  __syncthreads();
  for (int v = threadIdx.x; v < V; v += blockDim.x) logits[v] = -infinity();
  __syncthreads();
  for (int i = first + threadIdx.x; i < end; i += blockDim.x)
    if ((unsigned)token_ids[i] < V)
      put((int*)logits + token_ids[i], __float_as_int(kept[i]));
}

// Forbids the tokens whose bit is 0.
extern "C" __global__ void bitmask(float* logits, const int* bits, int V, int n_words,
                                   int n_blocks) {
  int b = blockIdx.x / n_blocks, v = (blockIdx.x % n_blocks) * blockDim.x + threadIdx.x;
  if (v < V && !(bits[(long long)b * n_words + v / 32] >> (v % 32) & 1))
    logits[(long long)b * V + v] = -infinity();
}
