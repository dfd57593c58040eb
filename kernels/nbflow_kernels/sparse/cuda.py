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

_add_rows = cuda.cpp_kernel(
    __file__, "sparse.cu", "add_rows",
    "i32*? ids, i32* indptr, i32* indices, f32* values, f32* out, i32 n_rows, i32 E",
)  # fmt: skip


def sparse_matmul(x: Any, w: Any, accumulate: bool, out: Any) -> None:
    """See `nbflow_kernels.sparse_matmul`."""
    T, N = out.shape
    if not T * N:
        return
    rows = (x.strides[0] // 4, out.strides[0] // 4)
    args = (x, w.indptr, w.indices, w.values, out, T, N, *rows, accumulate)
    _sparse_matmul((cuda.ceil_div(N, _ROWS), min(T, 1024)), (32, _ROWS), args)


def add_rows(w: Any, ids: Any, out: Any) -> None:
    """Add rows `ids` (None: all) of a sparse matrix to the rows of `out`."""
    if out.size and w.nnz:
        args = (ids, w.indptr, w.indices, w.values, out, w.shape[0], w.shape[1])
        _add_rows(len(out), 64, args)
