// Locate a token's head vectors in its page and write them, optionally rotated by RoPE.
#pragma once
#include "kv_cache/cuda_codec.cuh"

// Cache base address and strides in bytes.
struct Cache {
    u8* at;
    i64 page, token, head;
};

DEV u8* place_of(Cache cache, i64 page, int slot, int g) {
    return cache.at + page * cache.page + slot * cache.token + g * cache.head;
}

// Page that holds a position of a request, -1 if the page table has none.
DEV int page_of(const int* indices, const int* indptr, int n_requests, int n_pages, int request,
                int number) {
    if (request < 0 || request >= n_requests || number < 0) return -1;
    const int entry = indptr[request] + number;
    if (entry >= indptr[request + 1]) return -1;
    const int page = indices[entry];
    return page >= 0 && page < n_pages ? page : -1;
}

// Number d of a head vector, rotated if `cos_sin` (cosines, then sines) is given.
DEV float rotated(const float* x, int d, const float* cos_sin, int rotary_dim, int is_neox) {
    if (cos_sin == nullptr || d >= rotary_dim) return x[d];
    const int half = rotary_dim / 2;
    const int pair = is_neox ? d % half : d / 2;
    const bool first = is_neox ? d < half : d % 2 == 0;
    const float other = x[is_neox ? (first ? d + half : d - half) : d ^ 1];
    const float c = cos_sin[pair], s = cos_sin[half + pair];
    return first ? __fmaf_rn(x[d], c, __fmul_rn(other, -s)) : __fmaf_rn(x[d], c, __fmul_rn(other, s));
}

template <class F>
DEV void write_vector(u8* to, const float* x, int n, const float* cos_sin, int rotary_dim,
                      int is_neox, u8* codes) {
    const int lane = threadIdx.x & 31;
    if constexpr (F::FLOAT) {
        if (cos_sin == nullptr && n % 4 == 0 && (((u64)x | (u64)to) & 15) == 0) {
            for (int d = 4 * lane; d < n; d += 128) {
                const float4 v = *(const float4*)(x + d);
                if constexpr (F::KIND == F32) {
                    *(float4*)(to + 4 * d) = v;
                } else {
                    u16 bits[4];
                    store_float((u8*)bits, v.x, F::KIND);
                    store_float((u8*)(bits + 1), v.y, F::KIND);
                    store_float((u8*)(bits + 2), v.z, F::KIND);
                    store_float((u8*)(bits + 3), v.w, F::KIND);
                    *(uint2*)(to + 2 * d) =
                        make_uint2(bits[0] | (u32)bits[1] << 16, bits[2] | (u32)bits[3] << 16);
                }
            }
            return;
        }
        for (int d = lane; d < n; d += 32)
            store_float(to + d * F::ITEM, rotated(x, d, cos_sin, rotary_dim, is_neox), F::KIND);
    } else if constexpr (F::FLOAT8) {
        for (int d = lane; d < n; d += 32)
            to[d] = float8_code<F>(rotated(x, d, cos_sin, rotary_dim, is_neox));
    } else {
        for (int first = 0; first < n; first += F::BLOCK) {
            float numbers[F::BLOCK / 32];  // padding repeats the last number
            for (int k = 0; k < F::BLOCK / 32; k++) {
                const int d = min(first + lane + 32 * k, n - 1);
                numbers[k] = rotated(x, d, cos_sin, rotary_dim, is_neox);
            }
            store_block<F>(to + first / F::BLOCK * F::BLOCK_BYTES, numbers, codes);
        }
    }
}
