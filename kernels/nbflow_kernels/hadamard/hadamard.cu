// Hadamard transforms: a CUDA block per block of columns, passes of constant geometry.

// out[t, b n + i] = scale * sum over j of (-1)^popcount(i & j) x[t, b n + j]; n <= 1024.
extern "C" __global__ void hadamard_transform(const float* x, float* out, int width, int n, float scale,
                                              long long x_row, long long out_row) {
  __shared__ float buffers[2][1024];
  int n_blocks = width / n, t = blockIdx.x / n_blocks, first = (blockIdx.x % n_blocks) * n;
  const float* from = x + t * x_row + first;
  for (int i = threadIdx.x; i < n; i += blockDim.x) buffers[0][i] = from[i];
  __syncthreads();
  int source = 0;
  for (int left = n; left > 1; left /= 2) {
    for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
      float a = buffers[source][2 * i], b = buffers[source][2 * i + 1];
      buffers[1 - source][i] = a + b;
      buffers[1 - source][n / 2 + i] = a - b;
    }
    source = 1 - source;
    __syncthreads();
  }
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[t * out_row + first + i] = scale * buffers[source][i];
}
