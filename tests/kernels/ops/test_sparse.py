"""Sparse matrices; the product itself is tested through its cases."""

from __future__ import annotations

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError


def _random(rng: np.random.Generator) -> np.ndarray:
    dense = rng.standard_normal((7, 20), dtype=np.float32)
    dense[rng.random(dense.shape) < 0.8] = 0
    return dense


def test_there_and_back_and_rows() -> None:
    dense = _random(np.random.default_rng(0))
    m = nk.CsrMatrix.from_dense(dense)
    assert np.array_equal(m.to_dense(), dense)
    assert m.nnz == np.count_nonzero(dense)
    assert m.nbytes == 8 * m.nnz + 4 * 8
    for chosen in (slice(2, 5), slice(0, 0), np.array([6, 0, 6, 3])):
        assert np.array_equal(m.rows(chosen).to_dense(), dense[chosen])


def test_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(1)
    w = nk.CsrMatrix.from_dense(_random(rng))
    x = rng.standard_normal((5, 20), dtype=np.float32)
    together = nk.sparse_matmul(x, w)
    assert all(np.array_equal(nk.sparse_matmul(x[t : t + 1], w)[0], together[t]) for t in range(5))


def test_contradictions_are_refused() -> None:
    ints = lambda *values: np.array(values, np.int32)  # noqa: E731
    one = np.ones(1, np.float32)
    with pytest.raises(UsageError, match="indptr must start at 0"):
        nk.CsrMatrix((2, 3), ints(0, 2, 1), ints(0), one)
    with pytest.raises(UsageError, match=r"indices must lie in 0..2, got 3..3"):
        nk.CsrMatrix((1, 3), ints(0, 1), ints(3), one)
    with pytest.raises(UsageError, match="values must have shape"):
        nk.CsrMatrix((1, 3), ints(0, 1), ints(2), np.ones(2, np.float32))
    w = nk.CsrMatrix((1, 3), ints(0, 1), ints(2), one)
    x = np.ones((2, 3), np.float32)
    with pytest.raises(UsageError, match="accumulate=True needs out="):
        nk.sparse_matmul(x, w, accumulate=True)
    with pytest.raises(UsageError, match="out must not overlap x"):
        nk.sparse_matmul(x, w, out=x[:, :1])
    with pytest.raises(TypeError, match="w must be a CsrMatrix, got ndarray"):
        nk.sparse_matmul(x, np.ones((1, 3), np.float32))
