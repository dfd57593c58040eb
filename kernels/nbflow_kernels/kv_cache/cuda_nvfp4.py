"""Append to an NVFP4 cache on CUDA devices: a launch of `cuda_nvfp4.cu`, with the CPU's bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.arrays import on_device
from nbflow_kernels.kv_cache.page_table import strides

_THREADS = 128
_append = cuda.cpp_kernel(
    __file__, "cuda_nvfp4.cu", "append",
    "f32* x, i64 x_row, i32*? slots, i32*? batch_indices, i32*? positions, i32*? kv_indices, "
    "i32*? kv_indptr, i32 n_requests, i32 n_pages, i32 page_size, i32 n_rows, i32 G, i32 D, "
    "f32 global_scale, u8* codes, i64 code_page, i64 code_token, i64 code_head, u8* scales, "
    "i64 scale_page, i64 scale_token, i64 scale_head",
)  # fmt: skip


def append(
    x: Any, rows: Any, slots: Any, codes: Any, scales: Any, kv_layout: str, global_scale: Any
) -> None:
    """Encode rows into slots (`nbflow_kernels.kv_cache.cpu_nvfp4.append`).

    Rows that the page table lacks are skipped.
    """
    n, G, D = x.shape
    tables = [None] * 4 if rows is None else [on_device(table, x) for table in rows]
    slots = None if slots is None else on_device(slots, x)
    n_requests = 0 if rows is None else len(rows[3]) - 1
    page_size = codes.shape[1 if kv_layout == "NHD" else 2]
    args = (
        x, x.strides[0] // 4, slots, *tables, n_requests, len(codes), page_size, n, G, D,
        float(np.float32(global_scale)), codes, *strides(codes, kv_layout), scales,
        *strides(scales, kv_layout),
    )  # fmt: skip
    _append(cuda.ceil_div(n * G * (D // 16), _THREADS), _THREADS, args)
