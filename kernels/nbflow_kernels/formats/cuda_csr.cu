// Adds rows of a CSR matrix to dense rows, one thread block per row.

// out[t, indices[j]] += values[j] for j in row ids[t] (t if ids is null) of the CSR matrix.
extern "C" __global__ void add_rows(const int* ids, const int* indptr, const int* indices,
                                    const float* values, float* out, int n_rows, int E) {
  int row = ids != nullptr ? ids[blockIdx.x] : blockIdx.x;
  if (row < 0 || row >= n_rows) return;
  for (int j = indptr[row] + threadIdx.x; j < indptr[row + 1]; j += blockDim.x)
    out[(long long)blockIdx.x * E + indices[j]] += values[j];
}
