"""Sparse matrix product on CUDA devices, see `sparse.cu`."""

from __future__ import annotations

from typing import Any

from nbflow_kernels import cuda

_ROWS = 4  # rows of weights per thread block
_sparse_matmul = cuda.cpp_kernel(
    __file__, "sparse.cu", "sparse_matmul",
    "f32* x, i32* indptr, i32* indices, f32* values, f32* out, i32 T, i32 N, i64 x_row, "
    "i64 out_row, i32 accumulate",
)  # fmt: skip


def sparse_matmul(x: Any, w: Any, accumulate: bool, out: Any) -> None:
    """See `nbflow_kernels.sparse_matmul`."""
    T, N = out.shape
    if not T * N:
        return
    rows = (x.strides[0] // 4, out.strides[0] // 4)
    args = (x, w.indptr, w.indices, w.values, out, T, N, *rows, accumulate)
    _sparse_matmul((cuda.ceil_div(N, _ROWS), min(T, 1024)), (32, _ROWS), args)
