// Sums of partial results that a caller has.
#include "attention/cuda/plan.cuh"

// Merge n_states outputs (T, n_states, H, D) with base-2 LSE (T, n_states, H); one warp per row of
// D.  `v_out` and `s_out` may be one of the states if there are two, `other` apart.  A row whose
// entry of `mask` (T) is 0 is left alone.
DEV void merge_row(const float* v, const float* s, const float* other, const float* s_other,
                   i64 v_step, i64 s_step, int n_states, float* v_out, float* s_out, int D) {
    const int lane = threadIdx.x & 31;
    float top = -infinity();
    bool bad = false;
    for (int i = 0; i < n_states; i++) {
        const float x = other != nullptr && i == 1 ? s_other[0] : s[i * s_step];
        bad = bad || x != x;
        top = fmaxf(top, x);
    }
    float total = 0;
    if (top != -infinity())
        for (int i = 0; i < n_states; i++) {
            const float x = other != nullptr && i == 1 ? s_other[0] : s[i * s_step];
            total += exp2f(x - top);
        }
    for (int d = lane; d < D; d += 32) {
        float sum = 0;
        if (top != -infinity())
            for (int i = 0; i < n_states; i++) {
                const bool second = other != nullptr && i == 1;
                const float w = exp2f((second ? s_other[0] : s[i * s_step]) - top);
                const float x = second ? other[d] : v[i * v_step + d];
                sum = __fmaf_rn(w, x, sum);
            }
        v_out[d] = total != 0 ? __fdiv_rn(sum, total) : 0;
    }
    __syncwarp();
    if (lane == 0) s_out[0] = bad ? nan32() : total != 0 ? top + log2f(total) : -infinity();
}

extern "C" __global__ void __launch_bounds__(128)
merge_two(const float* v_a, const float* s_a, const float* v_b, const float* s_b, float* v_out,
          float* s_out, const u8* mask, int n_rows, int H, int D) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= n_rows || (mask != nullptr && !mask[row / H])) return;
    const i64 at = (i64)row * D;
    merge_row(v_a + at, s_a + row, v_b + at, s_b + row, 0, 0, 2, v_out + at, s_out + row, D);
}

extern "C" __global__ void __launch_bounds__(128)
merge_many(const float* v, const float* s, float* v_out, float* s_out, int n_rows, int n_states,
           int H, int D) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32;  // of T * H
    if (row >= n_rows) return;
    const i64 first = (i64)(row / H) * n_states * H + row % H;
    merge_row(v + first * D, s + first, nullptr, nullptr, (i64)H * D, H, n_states,
              v_out + (i64)row * D, s_out + row, D);
}
