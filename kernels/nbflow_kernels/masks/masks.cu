// Bit-packed masks, and conversion of block-sparse masks to row order.

// Bits [first, first + 8) of x as a byte, those from `end` on 0.
__device__ inline unsigned char byte_of(const unsigned char* x, long long first, long long end,
                                        int little) {
  unsigned value = 0;
  for (int i = 0; i < 8 && first + i < end; i++)
    if (x[first + i] != 0) value |= 1u << (little ? i : 7 - i);
  return (unsigned char)value;
}

extern "C" __global__ void pack_bits(const unsigned char* x, unsigned char* y, long long n,
                                     int little) {
  long long byte = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (8 * byte < n) y[byte] = byte_of(x, 8 * byte, n, little);
}

// Segment b, x[indptr[b]:indptr[b + 1]], becomes the bytes y[starts[b]:starts[b + 1]].
extern "C" __global__ void pack_segments(const unsigned char* x, const int* indptr,
                                         const int* starts, unsigned char* y, int little) {
  int b = blockIdx.x;
  for (int byte = starts[b] + threadIdx.x; byte < starts[b + 1]; byte += blockDim.x)
    y[byte] = byte_of(x, indptr[b] + 8LL * (byte - starts[b]), indptr[b + 1], little);
}

// Blocks (n, R, C) of block row i become R rows of its blocks' columns, concatenated.
extern "C" __global__ void rows_of_blocks(const unsigned char* mask, const int* indptr,
                                          unsigned char* flat, int R, int C) {
  long long first = indptr[blockIdx.x], n = indptr[blockIdx.x + 1] - first;
  for (long long k = threadIdx.x; k < n * R * C; k += blockDim.x) {
    long long r = k / (n * C), column = k % (n * C), b = column / C, c = column % C;
    flat[first * R * C + k] = mask[((first + b) * R + r) * C + c];
  }
}
