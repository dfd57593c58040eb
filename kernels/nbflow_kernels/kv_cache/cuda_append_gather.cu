// Writing keys and values into pages, and reading them back: one warp per head vector.
#include "kv_cache/cuda_codec.cuh"

// Strides in bytes from page to page, token to token and head to head.
struct Cache {
    u8* at;
    i64 page, token, head;
};

DEV u8* place_of(Cache cache, i64 page, int slot, int g) {
    return cache.at + page * cache.page + slot * cache.token + g * cache.head;
}

// The page of a position of a request, or -1 where the table has no such place.
DEV int page_of(const int* indices, const int* indptr, int n_requests, int n_pages, int request,
                int number) {
    if (request < 0 || request >= n_requests || number < 0) return -1;
    const int entry = indptr[request] + number;
    if (entry >= indptr[request + 1]) return -1;
    const int page = indices[entry];
    return page >= 0 && page < n_pages ? page : -1;
}

// Number d of a head vector, rotated if there is a table of cosines and, behind them, sines.
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
    } else {
        for (int first = 0; first < n; first += F::BLOCK) {
            float numbers[F::BLOCK / 32];  // the last one again where the row ends
            for (int k = 0; k < F::BLOCK / 32; k++) {
                const int d = min(first + lane + 32 * k, n - 1);
                numbers[k] = rotated(x, d, cos_sin, rotary_dim, is_neox);
            }
            store_block<F>(to + first / F::BLOCK * F::BLOCK_BYTES, numbers, codes);
        }
    }
}

// Rows whose request or position is not in the page table are left out.  With `cos_sin`, float32
// (positions, rotary_dim), keys are rotated by their positions before they are stored.
template <class K, class V>
__global__ void __launch_bounds__(128)
append(const float* key, const float* value, i64 key_stride, i64 value_stride,
       const int* batch_indices, const int* positions, u8* k_cache, u8* v_cache, i64 k_page,
       i64 k_token, i64 k_head, i64 v_page, i64 v_token, i64 v_head, const int* kv_indices,
       const int* kv_indptr, int n_requests, int n_pages, int page_size, int n_rows, int G, int D,
       int D_value, const float* cos_sin, int rotary_dim, int is_neox) {
    __shared__ u8 codes[4][64];
    const int warp = threadIdx.x >> 5, job = blockIdx.x * 4 + warp;
    const int row = job / (2 * G), g = job / 2 % G;
    if (row >= n_rows) return;
    const int position = positions[row];
    const int page = page_of(kv_indices, kv_indptr, n_requests, n_pages, batch_indices[row],
                             position < 0 ? -1 : position / page_size);
    if (page < 0) return;
    if (job % 2 == 0) {
        const float* table = cos_sin == nullptr ? nullptr : cos_sin + (i64)position * rotary_dim;
        write_vector<K>(place_of({k_cache, k_page, k_token, k_head}, page, position % page_size, g),
                     key + row * key_stride + (i64)g * D, D, table, rotary_dim, is_neox,
                     codes[warp]);
    } else {
        write_vector<V>(place_of({v_cache, v_page, v_token, v_head}, page, position % page_size, g),
                     value + row * value_stride + (i64)g * D_value, D_value, nullptr, 0, 0,
                     codes[warp]);
    }
}

// The reverse: keys (n_rows, G, D) and values (n_rows, G, D_value) as float32 or float16.
template <class K, class V>
__global__ void __launch_bounds__(128)
gather(u8* key, u8* value, const int* batch_indices, const int* positions, u8* k_cache,
       u8* v_cache, i64 k_page, i64 k_token, i64 k_head, i64 v_page, i64 v_token, i64 v_head,
       const int* kv_indices, const int* kv_indptr, int n_requests, int n_pages, int page_size,
       int n_rows, int G, int D, int D_value, int out_kind) {
    const int job = blockIdx.x * 4 + (threadIdx.x >> 5);
    const int row = job / (2 * G), g = job / 2 % G;
    if (row >= n_rows) return;
    const int position = positions[row], slot = position % page_size;
    const int page = page_of(kv_indices, kv_indptr, n_requests, n_pages, batch_indices[row],
                             position < 0 ? -1 : position / page_size);
    if (page < 0) return;
    const bool is_key = job % 2 == 0;
    const Cache cache = is_key ? Cache{k_cache, k_page, k_token, k_head}
                               : Cache{v_cache, v_page, v_token, v_head};
    const u8* from = place_of(cache, page, slot, g);
    const int n = is_key ? D : D_value, size = out_kind == F32 ? 4 : 2;
    u8* to = (is_key ? key : value) + ((i64)row * G + g) * n * size;
    for (int d = threadIdx.x & 31; d < n; d += 32)
        store_float(to + d * size, is_key ? load_number<K>(from, d) : load_number<V>(from, d),
                    out_kind);
}
