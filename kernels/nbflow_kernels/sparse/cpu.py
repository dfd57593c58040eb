"""Sparse matrix product on the CPU, row by row of the weights."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.csr import CsrMatrix

_COST = 4  # multiply-adds per value, for the choice of thread count


def sparse_matmul(x: np.ndarray, w: CsrMatrix, accumulate: bool, out: np.ndarray) -> None:
    """See `nbflow_kernels.sparse_matmul`."""
    work = float(_COST * len(x) * (w.nnz + w.shape[0]))
    parallel_for(
        _sparse_matmul, w.shape[0], work, x, w.indptr, w.indices, w.values, accumulate, out
    )


@jit.kernel
def _sparse_matmul(x, indptr, indices, values, accumulate, out, start, stop):
    """Write columns [start, stop) of the result."""
    for n in range(start, stop):
        first, last = indptr[n], indptr[n + 1]
        for t in range(x.shape[0]):
            total = np.float32(0.0)
            for j in range(first, last):
                total += x[t, indices[j]] * values[j]
            if accumulate:
                total += out[t, n]
            out[t, n] = total
