// Append keys and values to pages, and gather them back: one warp per head vector.
#include "kv_cache/cuda_append.cuh"

// Append: rows whose request or position is missing in the page table are skipped.  `cos_sin`, float32
// (n_positions, rotary_dim), applies RoPE to keys before they are stored; rows beyond it are skipped too.
template <class K, class V>
__global__ void __launch_bounds__(128)
append(const float* key, const float* value, i64 key_stride, i64 value_stride,
       const int* batch_indices, const int* positions, u8* k_cache, u8* v_cache, i64 k_page,
       i64 k_token, i64 k_head, i64 v_page, i64 v_token, i64 v_head, const int* kv_indices,
       const int* kv_indptr, int n_requests, int n_pages, int page_size, int n_rows, int G, int D,
       int D_value, const float* cos_sin, int n_positions, int rotary_dim, int is_neox) {
    __shared__ u8 codes[4][64];
    const int warp = threadIdx.x >> 5, job = blockIdx.x * 4 + warp;
    const int row = job / (2 * G), g = job / 2 % G;
    if (row >= n_rows) return;
    const int position = positions[row];
    const int page = page_of(kv_indices, kv_indptr, n_requests, n_pages, batch_indices[row],
                             position < 0 ? -1 : position / page_size);
    if (page < 0 || (cos_sin != nullptr && position >= n_positions)) return;
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

// Gather keys (n_rows, G, D) and values (n_rows, G, D_value) as float32 or float16.
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

// Copy head vectors of `n_bytes` between pages; both tables are checked on the host.
__global__ void __launch_bounds__(128)
copy_rows(u8* from, i64 from_page, i64 from_token, i64 from_head, u8* to, i64 to_page, i64 to_token,
          i64 to_head, const int* batch_indices, const int* positions, const int* from_indices,
          const int* from_indptr, int from_size, const int* to_indices, const int* to_indptr,
          int to_size, int n_rows, int G, int n_bytes) {
    const int job = blockIdx.x * 4 + (threadIdx.x >> 5);
    const int row = job / G, g = job % G;
    if (row >= n_rows) return;
    const int position = positions[row], request = batch_indices[row];
    const int from_number = from_indices[from_indptr[request] + position / from_size];
    const int to_number = to_indices[to_indptr[request] + position / to_size];
    const u8* source =
        place_of({from, from_page, from_token, from_head}, from_number, position % from_size, g);
    u8* target = place_of({to, to_page, to_token, to_head}, to_number, position % to_size, g);
    for (int at = threadIdx.x & 31; at < n_bytes; at += 32) target[at] = source[at];
}
