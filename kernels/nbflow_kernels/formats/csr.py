"""Sparse matrices in compressed sparse rows (CSR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, is_cuda
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True, eq=False)
class CsrMatrix:
    """Sparse matrix of shape (N, K) in CSR, with the arrays of SciPy's `csr_matrix`.

    Parameters
    ----------
    shape : tuple of int
        N and K.
    indptr : array of int32, shape (N + 1,)
        Row n holds the values ``indptr[n]:indptr[n + 1]``.
    indices : array of int32, shape (nnz,)
        Column of each value, rising within a row.
    values : array of float32, shape (nnz,)
        The values.

    Raises
    ------
    UsageError
        If the arrays are inconsistent.
    TypeError
        If an array has another dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.sparse import CsrMatrix
    >>> m = CsrMatrix.from_dense(np.float32([[0, 2, 0], [0, 0, 0], [1, 0, 3]]))
    >>> m.indptr, m.indices, m.values
    (array([0, 1, 1, 3], dtype=int32), array([1, 0, 2], dtype=int32), array([2., 1., 3.], dtype=float32))
    """  # noqa: E501 - the output of the example

    shape: tuple[int, int]
    indptr: NDArray[np.int32]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]

    def __post_init__(self) -> None:
        n_rows, n_columns = self.shape
        check_array("indptr", self.indptr, (n_rows + 1,), np.int32)
        if is_cuda(self.indptr):  # device arrays were checked on the host, before the copy
            return
        nnz = int(self.indptr[-1])
        check_array("indices", self.indices, (nnz,), np.int32)
        check_array("values", self.values, (nnz,))
        if self.indptr[0] != 0 or (np.diff(self.indptr) < 0).any():
            raise UsageError("indptr must start at 0 and never fall")
        if nnz and not 0 <= self.indices.min() <= self.indices.max() < n_columns:
            raise UsageError(
                f"indices must lie in 0..{n_columns - 1}, got {self.indices.min()}.."
                f"{self.indices.max()}"
            )

    @classmethod
    def from_dense(cls, dense: NDArray[np.float32]) -> CsrMatrix:
        """Return the sparse matrix of the nonzero elements of a dense one."""
        check_array("dense", dense, (None, None))
        return cls.from_mask(dense, dense != 0)

    @classmethod
    def from_mask(cls, dense: NDArray[np.float32], mask: NDArray[np.bool_]) -> CsrMatrix:
        """Return the sparse matrix of the elements where `mask` is true."""
        check_array("dense", dense, (None, None))
        check_array("mask", mask, dense.shape, np.bool_)
        indptr = np.zeros(len(dense) + 1, np.int64)
        np.cumsum(mask.sum(axis=1), out=indptr[1:])
        if indptr[-1] >= 2**31:
            raise UsageError(f"a sparse matrix holds fewer than 2**31 values, got {indptr[-1]}")
        columns = np.nonzero(mask)[1].astype(np.int32)
        return cls(dense.shape, indptr.astype(np.int32), columns, dense[mask])

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> CsrMatrix:
        """Return a matrix of zeros."""
        none = np.zeros(0, np.int32)
        return cls(shape, np.zeros(shape[0] + 1, np.int32), none, np.zeros(0, np.float32))

    @classmethod
    def concatenate(cls, matrices: Sequence[CsrMatrix]) -> CsrMatrix:
        """Concatenate matrices of one width along the rows."""
        n_columns = {m.shape[1] for m in matrices}
        if len(n_columns) != 1:
            raise UsageError(f"matrices must have one number of columns, got {sorted(n_columns)}")
        lengths = np.concatenate([np.diff(m.indptr) for m in matrices])
        indptr = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=indptr[1:])
        if indptr[-1] >= 2**31:
            raise UsageError(f"a sparse matrix holds fewer than 2**31 values, got {indptr[-1]}")
        return cls(
            (len(lengths), n_columns.pop()),
            indptr.astype(np.int32),
            np.concatenate([m.indices for m in matrices]),
            np.concatenate([m.values for m in matrices]),
        )

    @property
    def nnz(self) -> int:
        """Number of stored values."""
        return len(self.values)

    @property
    def nbytes(self) -> int:
        """Size of the three arrays in bytes."""
        return self.indptr.nbytes + self.indices.nbytes + self.values.nbytes

    def to_device(self, like: Any = None) -> CsrMatrix:
        """Copy the matrix to the device of an array, by default CuPy's current device."""
        from nbflow_kernels.cuda import to_device

        arrays = (to_device(a, like) for a in (self.indptr, self.indices, self.values))
        return CsrMatrix(self.shape, *arrays)

    def to_host(self) -> CsrMatrix:
        """Copy the matrix to NumPy arrays."""
        from nbflow_kernels.cuda import to_host

        return CsrMatrix(
            self.shape, *(to_host(a) for a in (self.indptr, self.indices, self.values))
        )

    def to_dense(self) -> NDArray[np.float32]:
        """Return the matrix as a dense array."""
        dense = np.zeros(self.shape, np.float32)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.indptr))
        dense[rows, self.indices] = self.values
        return dense

    def rows(self, chosen: Any) -> CsrMatrix:
        """Return the rows of a slice without step, or of an array of row indices."""
        if is_cuda(self.indptr):
            return self.to_host().rows(chosen).to_device(self.indptr)
        numbers = np.arange(self.shape[0])[chosen]
        lengths = np.diff(self.indptr)[numbers]
        indptr = np.zeros(len(numbers) + 1, np.int32)
        np.cumsum(lengths, out=indptr[1:])
        # value i of the result is value indptr[row] + (i - first value of its row) of this matrix
        places = np.repeat(self.indptr[numbers] - indptr[:-1], lengths) + np.arange(indptr[-1])
        return CsrMatrix(
            (len(numbers), self.shape[1]), indptr, self.indices[places], self.values[places]
        )

    def columns(self, start: int, stop: int) -> CsrMatrix:
        """Return columns [start, stop)."""
        if is_cuda(self.indptr):
            return self.to_host().columns(start, stop).to_device(self.indptr)
        kept = (self.indices >= start) & (self.indices < stop)
        before = np.concatenate([[0], np.cumsum(kept)])
        return CsrMatrix(
            (self.shape[0], stop - start),
            before[self.indptr].astype(np.int32),
            self.indices[kept] - np.int32(start),
            self.values[kept],
        )
