"""Outliers of a quantized weight: a sparse product, added to the dense one."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit, parallel_for
from nbflow_kernels.quantized_matmul.int8_activations import COLUMNS, Int8Rows
from nbflow_kernels.sparse.cpu import sparse_matmul

COST = 4  # multiply-adds per outlier, for the choice of thread count


def in_order(w: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context that keeps the product of the outliers behind the dense one."""
    return parallel_for.in_order() if w.outliers is not None else contextlib.nullcontext()


def add(x: Any, w: Any, out: Any) -> None:
    """Add the product of float32 activations and the outliers of `w`."""
    if w.outliers is not None:
        sparse_matmul(x, w.outliers, True, out)


def add_int8(rows: Int8Rows, w: Any, out: Any) -> None:
    """Add the product of quantized activations and the outliers of `w`."""
    sparse = w.outliers
    if sparse is not None:
        work = float(COST * rows.n_rows * (sparse.nnz + sparse.shape[0]))
        parallel_for.parallel_for(
            _add_int8, sparse.shape[0], work, rows.codes, rows.scales, sparse.indptr,
            sparse.indices, sparse.values, out,
        )  # fmt: skip


@jit.kernel
def _add_int8(codes, scales, indptr, indices, values, out, start, stop):
    """Add to columns [start, stop) of `out`, the values of a sparse row one after the other."""
    for n in range(start, stop):
        for t in range(out.shape[0]):
            total = np.float32(0.0)
            for j in range(indptr[n], indptr[n + 1]):
                k = indices[j]
                total += scales[t, k // COLUMNS] * np.float32(codes[t, k]) * values[j]
            out[t, n] += total
