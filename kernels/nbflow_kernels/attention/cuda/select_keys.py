"""Index scores and the largest of them on CUDA devices, a thread block per row."""

from __future__ import annotations

from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.arrays import empty

_THREADS = 256  # of `select_largest.cuh`
_select = cuda.cpp_kernel(
    __file__, "select_keys.cu", "select_keys",
    "f32* q, f32* weights, f32* keys, i32* batch, i32* positions, i32* kv_indices, i32* kv_indptr, "
    "f32* scores, i32* out, i64 q_row, i64 weight_row, i64 page, i64 key, i64 n_scores, i32 H, "
    "i32 D, i32 page_size, i32 top_k",
)  # fmt: skip


def select_top_keys(
    q: Any, weights: Any, k_cache: Any, batch_indices: Any, positions: Any, kv_indices: Any,
    kv_indptr: Any, out: Any, scores: Any = None,
) -> None:  # fmt: skip
    """See `nbflow_kernels.select_top_keys`; `scores` is scratch for T rows of all page slots."""
    T, H, D = q.shape
    page_size, n_scores = k_cache.shape[1], len(kv_indices) * k_cache.shape[1]
    if not T:
        return
    strides = (a.strides[0] // 4 for a in (q, weights, k_cache))
    if scores is None:
        scores = empty(q, (T, n_scores))
    args = (
        q, weights, k_cache, batch_indices, positions, kv_indices, kv_indptr,
        scores, out, *strides, k_cache.strides[1] // 4, n_scores, H, D, page_size, out.shape[1],
    )  # fmt: skip
    _select(T, _THREADS, args)
