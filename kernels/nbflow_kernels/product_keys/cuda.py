"""Retrieval by product keys on CUDA devices: a thread block per token, a warp per product."""

from __future__ import annotations

from typing import Any

from nbflow_kernels import cuda

_route = cuda.cpp_kernel(
    __file__, "product_keys.cu", "product_key_routing",
    "f32* scores, f32* weights, i32* ids, i32 n_keys, i32 top_k, i32 first, i32 n_experts",
)  # fmt: skip
_gathered_dot = cuda.cpp_kernel(
    __file__, "product_keys.cu", "gathered_dot",
    "f32* x, f32* table, i32* ids, f32* out, i64 x_row, i32 n_products, i32 n_chosen, i32 n_rows, "
    "i32 E",
)  # fmt: skip


def product_key_routing(scores: Any, first: int, n_experts: int, weights: Any, ids: Any) -> None:
    """See `nbflow_kernels.product_key_routing`."""
    if len(scores):
        n_keys, top_k = scores.shape[1] // 2, weights.shape[1]
        _route(len(scores), 256, (scores, weights, ids, n_keys, top_k, first, n_experts))


def gathered_dot(x: Any, table: Any, ids: Any, out: Any) -> None:
    """See `nbflow_kernels.gathered_dot`."""
    if ids.size:
        numbers = int(x.strides[0] // 4), ids.size, ids.shape[1], len(table), x.shape[1]
        _gathered_dot(cuda.ceil_div(ids.size, 8), 256, (x, table, ids, out, *numbers))
