"""Sparse products in NumPy float64; see `nbflow_kernels.sparse`."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.formats.csr import CsrMatrix


def sparse_matmul(
    x: np.ndarray, w: CsrMatrix, *, accumulate: bool = False, out: Any = None
) -> np.ndarray:
    """See `nbflow_kernels.sparse_matmul`."""
    result = np.asarray(x, np.float64) @ w.to_dense().astype(np.float64).T
    if accumulate:
        out += result
        return out  # type: ignore[no-any-return]
    return result
