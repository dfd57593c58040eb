"""Product of activations with sparse weights, such as the outliers of a quantized tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, is_cuda, output_array
from nbflow_kernels.formats.csr import CsrMatrix
from nbflow_kernels.sparse import cpu, cuda

__all__ = ["CsrMatrix", "sparse_matmul"]


def sparse_matmul(
    x: NDArray[np.float32],
    w: CsrMatrix,
    *,
    accumulate: bool = False,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Multiply activations by the transpose of a sparse weight matrix.

    .. math:: y_{tn} = \sum_{k \in \mathrm{row}\,n} x_{tk} \, w_{nk} \; (+ \; y_{tn})

    Parameters
    ----------
    x : array of float32, shape (T, K)
        Activations.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    w : CsrMatrix, shape (N, K)
        Weights, a row for each output.
    accumulate : bool
        Add to what `out` holds instead of replacing it.
    out : array of float32, shape (T, N), optional
        Output array; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (T, N)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If the shapes do not fit, `out` overlaps `x`, or `accumulate` is given without `out`.
    TypeError
        If `w` is not a `CsrMatrix`, or an array has another dtype.

    Notes
    -----
    The values of a row are added in their order, in float32: a row of the result is bitwise the
    same whatever other rows are in the call, for any number of threads.  With `accumulate` the old
    output comes last.

    Examples
    --------
    >>> import numpy as np
    >>> import nbflow_kernels as nk
    >>> w = nk.CsrMatrix.from_dense(np.float32([[0, 2, 0], [0, 0, 0]]))
    >>> nk.sparse_matmul(np.float32([[1, 10, 100]]), w)
    array([[20.,  0.]], dtype=float32)
    """
    if not isinstance(w, CsrMatrix):
        raise TypeError(f"w must be a CsrMatrix, got {type(w).__name__}")
    check_array("x", x, (None, w.shape[1]), rows=True)
    out = output_array(x, (x.shape[0], w.shape[0]), out, accumulate, rows=True)
    (cuda if is_cuda(x) else cpu).sparse_matmul(x, w, bool(accumulate), out)
    return out
