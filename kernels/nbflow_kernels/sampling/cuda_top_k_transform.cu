// Selection of the largest scores of a window of each row, and translation of their positions, a thread
// block per row.
#include "sampling/select_largest.cuh"

extern "C" __global__ void top_k_transform(
    const float* x, const int* lengths, const int* row_starts, const int* offsets, const int* table,
    const int* row_to_batch, const int* table_starts, int* out, int* raw, long long x_row,
    long long table_row, int page_size, int top_k, int prefer_last) {
  int t = blockIdx.x, n = lengths[t], start = row_starts ? row_starts[t] : 0;
  int* row = out + (long long)t * top_k;
  if (n > top_k) {
    select_largest(x + t * x_row + start, n, top_k, prefer_last, row);
  } else {
    for (int j = threadIdx.x; j < top_k; j += SELECT_THREADS) row[j] = j < n ? j : -1;
  }
  __syncthreads();
  if (table) {
    table += (row_to_batch ? row_to_batch[t] : t) * table_row;
    table += table_starts ? table_starts[t] : start;
  }
  for (int j = threadIdx.x; j < top_k; j += SELECT_THREADS) {
    int position = row[j];
    if (raw) raw[(long long)t * top_k + j] = position;
    if (position < 0) continue;
    if (table) row[j] = table[position / page_size] * page_size + position % page_size;
    else row[j] = position + offsets[t];
  }
}
