"""Adding the rows of a CSR matrix (outliers) to dequantized rows on CUDA; see `cuda_csr.cu`."""

from __future__ import annotations

from typing import Any

from nbflow_kernels import cuda

_add_rows = cuda.cpp_kernel(
    __file__, "cuda_csr.cu", "add_rows",
    "i32*? ids, i32* indptr, i32* indices, f32* values, f32* out, i32 n_rows, i32 E",
)  # fmt: skip


def add_rows(w: Any, ids: Any, out: Any) -> None:
    """Add rows `ids` (None: all) of a CSR matrix to the rows of `out`."""
    if out.size and w.nnz:
        args = (ids, w.indptr, w.indices, w.values, out, w.shape[0], w.shape[1])
        _add_rows(len(out), 64, args)
