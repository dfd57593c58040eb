// Merge of attention states given by the caller (`merge_state`, `merge_states`).
#include "attention/cuda/plan.cuh"

// Merge n_states outputs (T, n_states, H, D) with base-2 LSE (T, n_states, H); one warp per row of D.
// With two states the second may lie apart, at `other`; `v_out` and `s_out` may alias a state.  Rows whose
// `mask` (T) is 0 are skipped.
DEV void merge_row(const float* v, const float* s, const float* other, const float* s_other,
                   i64 v_step, i64 s_step, int n_states, float* v_out, float* s_out, int D) {
    const int lane = threadIdx.x & 31;
    float max_lse = -infinity();
    bool bad = false;
    for (int i = 0; i < n_states; i++) {
        const float x = other != nullptr && i == 1 ? s_other[0] : s[i * s_step];
        bad = bad || x != x;
        max_lse = fmaxf(max_lse, x);
    }
    float weight_sum = 0;
    if (max_lse != -infinity())
        for (int i = 0; i < n_states; i++) {
            const float x = other != nullptr && i == 1 ? s_other[0] : s[i * s_step];
            weight_sum += exp2f(x - max_lse);
        }
    for (int d = lane; d < D; d += 32) {
        float sum = 0;
        if (max_lse != -infinity())
            for (int i = 0; i < n_states; i++) {
                const bool second = other != nullptr && i == 1;
                const float w = exp2f((second ? s_other[0] : s[i * s_step]) - max_lse);
                const float x = second ? other[d] : v[i * v_step + d];
                sum = __fmaf_rn(w, x, sum);
            }
        v_out[d] = weight_sum != 0 ? __fdiv_rn(sum, weight_sum) : 0;
    }
    __syncwarp();
    if (lane == 0) s_out[0] = bad ? nan32() : weight_sum != 0 ? max_lse + log2f(weight_sum) : -infinity();
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
