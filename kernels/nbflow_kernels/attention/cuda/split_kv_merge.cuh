// Sums of the partial results of divided tiles: by the thread block that finishes the last of a tile's
// splits, so that no further kernel is needed.
#pragma once
#include "attention/cuda/plan.cuh"

// Add the partial results of a query vector's splits in order; one warp.  AT_ONCE of them are on their
// way together, as many as there are registers for.
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
        float sums[4] = {0, 0, 0, 0}, top = HIDDEN, total = 0;
        for (int i = 0; i < merge.n_splits; i += AT_ONCE) {
            float tops[AT_ONCE], totals[AT_ONCE], parts[AT_ONCE][4];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {  // behind the last one: the last once more
                const float* part = first + min(i + j, merge.n_splits - 1) * step;
                tops[j] = part[D], totals[j] = part[D + 1];
#pragma unroll
                for (int k = 0; k < 4; k++) parts[j][k] = part[min(base + 32 * k, D - 1)];
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                if (i + j >= merge.n_splits) break;
                const Folded f = fold(top, total, tops[j], totals[j]);
#pragma unroll
                for (int k = 0; k < 4; k++) sums[k] = fold_column(f, sums[k], parts[j][k]);
                top = f.top;
                total = f.total;
            }
        }
        const Finish end = finish(header, top, total, head);
        for (int k = 0; k < 4; k++) {
            const int d = base + 32 * k;
            if (d < D) store_float(out + (place * D + d) * size, __fmul_rn(sums[k], end.factor), out_kind);
        }
        if (lse != nullptr && base == 0) lse[place] = end.lse;
    }
}

// What a thread block does once it has written its item's results.
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
