"""Adding outliers, the sparse corrections of single weights, to dequantized rows."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.csr import CsrMatrix
from nbflow_kernels.formats.registry import Floats


def add_outliers(outliers: CsrMatrix, out: Floats) -> None:
    """Add the outliers to all dequantized rows (rows, columns)."""
    work = 4.0 * (outliers.nnz + len(out))
    parallel_for(_add, len(out), work, outliers.indptr, outliers.indices, outliers.values, out)


def add_outliers_of(outliers: CsrMatrix, ids: NDArray[Any], out: Floats) -> None:
    """Add the outliers of rows `ids` to the dequantized rows (len(ids), columns)."""
    work = 4.0 * (outliers.nnz / max(1, outliers.shape[0]) + 1) * len(out)
    parallel_for(
        _add_of, len(out), work, outliers.indptr, outliers.indices, outliers.values,
        ids, out,
    )  # fmt: skip


@jit.kernel
def _add(indptr, indices, values, out, start, stop):
    for row in range(start, stop):
        for j in range(indptr[row], indptr[row + 1]):
            out[row, indices[j]] += values[j]


@jit.kernel
def _add_of(indptr, indices, values, ids, out, start, stop):
    for row in range(start, stop):
        for j in range(indptr[ids[row]], indptr[ids[row] + 1]):
            out[row, indices[j]] += values[j]
