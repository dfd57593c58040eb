// Split-KV merge of partial results by the last thread block of a tile to finish (atomic arrival counter).
#pragma once
#include "attention/cuda/plan.cuh"

// Merge the partial results of a query vector in order; one warp.  AT_ONCE loads are in flight (register limit).
template <int AT_ONCE>
DEV void merge_vector(const i64* header, const Merge& merge, int kv_head, int m, u8* out, int out_kind,
                      float* lse) {
    const int group = header[QO_HEADS] / header[KV_HEADS], D = header[DIM_VO];
    const int lane = threadIdx.x & 31, size = out_kind == F32 ? 4 : 2;
    const i64 step = (i64)merge.n_rows * group * header[KV_HEADS] * partial_floats(header);
    const float* const first = partial_at(header, merge.partial + m, kv_head);
    const int head = kv_head * group + m % group;
    const i64 place = (i64)(merge.row + m / group) * header[QO_HEADS] + head;
    for (int base = lane; base < D + lane; base += 128) {
        float sums[4] = {0, 0, 0, 0}, row_max = MASKED, row_sum = 0;
        for (int i = 0; i < merge.n_splits; i += AT_ONCE) {
            float row_maxes[AT_ONCE], row_sums[AT_ONCE], parts[AT_ONCE][4];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {  // clamped to the last one
                const float* part = first + min(i + j, merge.n_splits - 1) * step;
                row_maxes[j] = part[D], row_sums[j] = part[D + 1];
#pragma unroll
                for (int k = 0; k < 4; k++) parts[j][k] = part[min(base + 32 * k, D - 1)];
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                if (i + j >= merge.n_splits) break;
                const MergedState f = merge_partial(row_max, row_sum, row_maxes[j], row_sums[j]);
#pragma unroll
                for (int k = 0; k < 4; k++) sums[k] = merge_column(f, sums[k], parts[j][k]);
                row_max = f.row_max;
                row_sum = f.row_sum;
            }
        }
        const FinalScale end = final_scale(header, row_max, row_sum, head);
        for (int k = 0; k < 4; k++) {
            const int d = base + 32 * k;
            if (d < D) store_float(out + (place * D + d) * size, __fmul_rn(sums[k], end.factor), out_kind);
        }
        if (lse != nullptr && base == 0) lse[place] = end.lse;
    }
}

// Epilogue of a thread block with a partial result: the last one to arrive merges all splits of the tile.
template <int AT_ONCE>
DEV void merge_if_last(const i64* header, const Item& item, int first_vector, int n_vectors, u8* out,
                       int out_kind, float* lse) {
    __shared__ bool last;
    if (item.partial < 0) return;
    const Merge merge = pointer<Merge>(header, MERGES)[item.merge];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const i64 tile = ((i64)item.merge * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z;
        int* const arrived = pointer<int>(header, ARRIVED) + tile;
        last = atomicAdd(arrived, 1) == merge.n_splits - 1;
        if (last) *arrived = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int m = threadIdx.x / 32; m < n_vectors; m += blockDim.x / 32)
        merge_vector<AT_ONCE>(header, merge, blockIdx.y, first_vector + m, out, out_kind, lse);
}
