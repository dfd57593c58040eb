// Append to an NVFP4 cache: a thread encodes 16 numbers and their scale, as `cpu/nvfp4.py` does.
#include "cuda/float8.cuh"
#include "kv_cache/cuda_append.cuh"

// Code of a magnitude in steps of the scale; of the middle of two values, the even code.
DEV u32 e2m1_code(float steps) {
    return (steps > 0.25f) + (steps >= 0.75f) + (steps > 1.25f) + (steps >= 1.75f) + (steps > 2.5f) +
           (steps >= 3.5f) + (steps > 5.0f);
}

extern "C" __global__ void append(
    const float* x, i64 x_row, const int* slots, const int* batch_indices, const int* positions,
    const int* kv_indices, const int* kv_indptr, int n_requests, int n_pages, int page_size,
    int n_rows, int G, int D, float global_scale, u8* codes, i64 code_page, i64 code_token,
    i64 code_head, u8* scales, i64 scale_page, i64 scale_token, i64 scale_head) {
    const int n_blocks = D / 16;
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (i64)n_rows * G * n_blocks) return;
    const int b = at % n_blocks, g = at / n_blocks % G, row = at / n_blocks / G;
    int page, token;
    if (slots != nullptr) {
        if (slots[row] < 0) return;
        page = slots[row] / page_size, token = slots[row] % page_size;
        if (page >= n_pages) return;
    } else {
        if (positions[row] < 0) return;
        token = positions[row] % page_size;
        page = page_of(kv_indices, kv_indptr, n_requests, n_pages, batch_indices[row],
                       positions[row] / page_size);
        if (page < 0) return;
    }
    x += row * x_row + (i64)g * D + 16 * b;
    float largest = 0.0f, bad = 0.0f;
    for (int i = 0; i < 16; i++) {
        largest = fmaxf(largest, fabsf(x[i]));
        bad = __fadd_rn(bad, __fmul_rn(x[i], 0.0f));  // NaN if x[i] is NaN or infinite
    }
    const float per_six = __fdiv_rn(1.0f, __fmul_rn(6.0f, global_scale));
    const u8 code = bad == 0.0f ? float8_code<3, 7, 0x7e>(__fmul_rn(largest, per_six)) : 0x7f;
    const float scale = __fmul_rn(float8_value<3, 7>(code), global_scale);
    const float inverse = scale > 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
    u8* to = codes + page * code_page + token * code_token + g * code_head + 8 * b;
    for (int i = 0; i < 16; i += 2) {
        u32 pair = 0;
        for (int j = 0; j < 2; j++) {
            const u32 magnitude = e2m1_code(__fmul_rn(fabsf(x[i + j]), inverse));
            pair |= (magnitude | (__float_as_uint(x[i + j]) >> 28 & 8)) << 4 * j;
        }
        to[i / 2] = pair;
    }
    scales[page * scale_page + token * scale_token + g * scale_head + b] = code;
}
