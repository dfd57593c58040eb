// RoPE, ALiBi, T5 relative bias, sinusoidal and learned position embeddings.
#include "cuda/float16.cuh"
#include "cuda/float8.cuh"
#include "cuda/types.cuh"
#include "cuda/vector_load.cuh"
#include "position/rope_rotate.cuh"

// Apply RoPE in place to the first 2 * half elements of each head of query (T, H, D) and key (T, G, D).  Row t uses
// row positions[t] (or t) of the cache: `half` cosines, then `half` sines.  Pairs are (i, half + i) with NEOX, else
// (2 i, 2 i + 1).  A position outside the cache gives NaN.  A thread rotates one pair, or with WIDE four (NEOX) or two.
template <bool NEOX, bool WIDE>
__global__ void rope(const int* positions, float* query, float* key, const float* cache, int H,
                     int G, int D, int half, long long query_row, long long key_row, int max_pos,
                     int n_blocks) {
  constexpr int PAIRS = WIDE ? (NEOX ? 4 : 2) : 1;
  int t = blockIdx.x / n_blocks;
  int piece = (blockIdx.x % n_blocks) * blockDim.x + threadIdx.x;
  int pieces = half / PAIRS, h = piece / pieces, i = piece % pieces * PAIRS;
  if (h >= H + G) return;
  int position = positions != nullptr ? positions[t] : t;
  bool known = 0 <= position && position < max_pos;
  const float* cosines = cache + (known ? 2LL * half * position : 0);
  float* x = h < H ? query + t * query_row + h * D : key + t * key_row + (h - H) * D;
  float c[PAIRS], s[PAIRS], a[PAIRS], b[PAIRS];
  float* first = x + (NEOX ? i : 2 * i);
  float* second = NEOX ? x + half + i : x + 2 * i + 1;
  if (WIDE && NEOX) {
    *(float4*)c = *(const float4*)(cosines + i);
    *(float4*)s = *(const float4*)(cosines + half + i);
    *(float4*)a = *(const float4*)first;
    *(float4*)b = *(const float4*)second;
  } else if (WIDE) {
    float2 cc = *(const float2*)(cosines + i), ss = *(const float2*)(cosines + half + i);
    float4 v = *(const float4*)first;
    c[0] = cc.x, c[PAIRS - 1] = cc.y, s[0] = ss.x, s[PAIRS - 1] = ss.y;
    a[0] = v.x, b[0] = v.y, a[PAIRS - 1] = v.z, b[PAIRS - 1] = v.w;
  } else {
    c[0] = cosines[i], s[0] = cosines[half + i], a[0] = *first, b[0] = *second;
  }
  for (int p = 0; p < PAIRS; p++) {
    rotate_pair(a[p], b[p], c[p], s[p]);
    if (!known) a[p] = b[p] = nan32();
  }
  if (WIDE && NEOX) {
    *(float4*)first = *(float4*)a;
    *(float4*)second = *(float4*)b;
  } else if (WIDE) {
    *(float4*)first = make_float4(a[0], b[0], a[PAIRS - 1], b[PAIRS - 1]);
  } else {
    *first = a[0], *second = b[0];
  }
}

// Encode heads (T, H, n) in float8, times `factor`, rotated as in `rope` if there is a cache.  A thread has a pair of
// numbers, or one number without a rotation.  A position outside the cache gives NaN.
template <bool NEOX, int MANTISSA, int BIAS, int LARGEST>
__global__ void encode_heads(const int* positions, const float* x, const float* cache, u8* codes,
                             int T, int H, int n, int half, long long x_row, long long x_head,
                             long long code_row, long long code_head, int max_pos, float factor) {
  int each = half ? half : n;
  long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= (long long)T * H * each) return;
  int i = at % each, h = at / each % H, t = at / each / H;
  x += t * x_row + h * x_head;
  codes += t * code_row + h * code_head;
  if (!half) {
    codes[i] = float8_code<MANTISSA, BIAS, LARGEST>(__fmul_rn(x[i], factor));
    return;
  }
  int first = NEOX ? i : 2 * i, second = NEOX ? half + i : 2 * i + 1;
  bool known = 0 <= positions[t] && positions[t] < max_pos;
  const float* cosines = cache + (known ? 2LL * half * positions[t] : 0);
  float a = x[first], b = x[second];
  rotate_pair(a, b, cosines[i], cosines[half + i]);
  if (!known) a = b = nan32();
  codes[first] = float8_code<MANTISSA, BIAS, LARGEST>(__fmul_rn(a, factor));
  codes[second] = float8_code<MANTISSA, BIAS, LARGEST>(__fmul_rn(b, factor));
}

// cache[t] = cosines and sines of positions[t] / scale * frequencies, times factor.  Angles are float64: a float32
// angle of position 100,000 has no correct digit after the point.
extern "C" __global__ void cos_sin(const int* positions, const double* frequencies, float* cache,
                                   int T, int half, double scale, double factor) {
  int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= T * half) return;
  int t = n / half, i = n % half;
  double sine, cosine;
  sincos(positions[t] / scale * frequencies[i], &sine, &cosine);
  cache[2LL * half * t + i] = (float)(cosine * factor);
  cache[2LL * half * t + half + i] = (float)(sine * factor);
}

// positions[t] = offsets[b] + t - indptr[b] for row t of segment b.
extern "C" __global__ void ragged_positions(const int* indptr, const int* offsets, int* positions,
                                            int n_segments, int T) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= T) return;
  int low = 0, high = n_segments - 1;  // find the last segment with indptr <= t
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (indptr[middle] <= t) low = middle;
    else high = middle - 1;
  }
  positions[t] = offsets[low] + t - indptr[low];
}

// query[t] *= 1 + scale * ln(1 + (positions[t] + offset) / floor), for the E elements of a row.
extern "C" __global__ void temperature(const int* positions, float* query, long long row, int E,
                                       double scale, int floor, int offset) {
  long long position = (long long)positions[blockIdx.x] + offset;
  long long steps = position > 0 ? position / floor : 0;
  float factor = (float)(1.0 + scale * log(1.0 + (double)steps));
  float* x = query + blockIdx.x * row;
  for (int e = threadIdx.x; e < E; e += blockDim.x) x[e] *= factor;
}

// out[h, i, j] = slopes[h] * d with d = j - (Tk - Tq + i), or slopes[h] * -|d| if symmetric.
extern "C" __global__ void alibi(const float* slopes, float* out, int Tq, int Tk, int symmetric) {
  int i = blockIdx.x % Tq, h = blockIdx.x / Tq;
  for (int j = threadIdx.x; j < Tk; j += blockDim.x) {
    int distance = j - (Tk - Tq + i);
    out[(long long)blockIdx.x * Tk + j] = slopes[h] * (symmetric ? -abs(distance) : distance);
  }
}

// out[k] = bucket of a distance; near[d] is the bucket of distance d <= last in one direction.
extern "C" __global__ void bucket(const int* relative, const int* near, int* out, long long n,
                                  int last, int n_buckets, int bidirectional) {
  long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (k >= n) return;
  long long r = relative[k], distance = bidirectional ? llabs(r) : r < 0 ? -r : 0;
  out[k] = near[distance < last ? distance : last] + (bidirectional && r > 0 ? n_buckets : 0);
}

// out[h, i, j] = table[buckets[Tq - 1 - i + j], h]
extern "C" __global__ void bucket_bias(const float* table, const int* buckets, float* out, int H,
                                       int Tq, int Tk) {
  int i = blockIdx.x % Tq, h = blockIdx.x / Tq;
  for (int j = threadIdx.x; j < Tk; j += blockDim.x)
    out[(long long)blockIdx.x * Tk + j] = table[(long long)buckets[Tq - 1 - i + j] * H + h];
}

// out[t] = sines and cosines of (positions[t] + offset) * frequencies; zeros for the padding row.
extern "C" __global__ void sinusoidal(const int* positions, const double* frequencies, float* out,
                                      int dim, int half, int interleave, int offset, int padded,
                                      int padding) {
  int row = positions[blockIdx.x] + offset;
  float* to = out + (long long)blockIdx.x * dim;
  bool blank = padded && row == padding;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    double sine, cosine;
    sincos(row * frequencies[i], &sine, &cosine);
    to[interleave ? 2 * i : i] = blank ? 0.0f : (float)sine;
    to[interleave ? 2 * i + 1 : half + i] = blank ? 0.0f : (float)cosine;
  }
  if (threadIdx.x == 0 && 2 * half < dim) to[dim - 1] = 0.0f;
}

// out[t] = x[t] + table[positions[t] + offset]; a row outside the table gives NaN.
template <int KIND, bool WIDE>
__global__ void add_rows(const float* x, const int* positions,
                         const typename Element<KIND>::Stored* table, float* out, int E,
                         int n_rows, int offset) {
  long long t = blockIdx.x, row = (long long)positions[t] + offset;
  bool known = 0 <= row && row < n_rows;
  for (int i = 4 * threadIdx.x; i < E; i += 4 * blockDim.x) {
    float4 v = load4<WIDE>(x + t * E, i, E);
    float nan = nan32();
    float4 w = make_float4(nan, nan, nan, nan);
    if (known) w = load4_of<KIND, WIDE>(table + row * E, i, E);
    store4<WIDE>(out + t * E, i, E, make_float4(v.x + w.x, v.y + w.y, v.z + w.z, v.w + w.w));
  }
}
