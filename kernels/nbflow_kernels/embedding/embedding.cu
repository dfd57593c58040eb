// Rows of a table of floats, chosen by index: a thread block for each row.
#include "cuda/halves.cuh"
#include "cuda/numbers.cuh"
#include "cuda/wide.cuh"

// out[t] = table[ids[t]] * scale; an index that is no row of the table gives NaN.
template <int KIND, bool WIDE>
__global__ void gather(const int* ids, const typename Element<KIND>::Stored* table, float* out,
                       int V, int E, float scale) {
  int id = ids[blockIdx.x];
  bool known = 0 <= id && id < V;
  const float nan = nan32();
  for (int i = 4 * threadIdx.x; i < E; i += 4 * blockDim.x) {
    float4 v = make_float4(nan, nan, nan, nan);
    if (known) {
      v = load4_of<KIND, WIDE>(table + (long long)id * E, i, E);
      v = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
    }
    store4<WIDE>(out + (long long)blockIdx.x * E, i, E, v);
  }
}
