"""Selection of the keys that each query attends to (DeepSeek sparse attention)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_together, is_cuda, output
from nbflow_kernels.attention.cpu import select_keys as cpu
from nbflow_kernels.attention.cuda import select_keys as cuda
from nbflow_kernels.errors import UsageError


def select_top_keys(
    q: NDArray[np.float32],
    weights: NDArray[np.float32],
    k_cache: NDArray[np.float32],
    batch_indices: NDArray[np.int32],
    positions: NDArray[np.int32],
    kv_indices: NDArray[np.int32],
    kv_indptr: NDArray[np.int32],
    *,
    top_k: int,
    out: NDArray[np.int32] | None = None,
) -> Any:
    r"""Select the keys with the largest index scores among those up to each row's position.

    .. math:: I_{ts} = \sum_h w_{th} \max(0, q_{th} \cdot k_s)

    Parameters
    ----------
    q : array of float32, shape (T, H, D)
        Index queries, with any row stride.
    weights : array of float32, shape (T, H)
        Weights of the heads; a common positive factor has no effect.
    k_cache : array of float32, shape (pages, page_size, D)
        Index keys, which all heads share.
    batch_indices : array of int32, shape (T,)
        Sequence of each row.
    positions : array of int32, shape (T,)
        Position of each row; it sees the keys 0..position.  -1 for a row without keys.
    kv_indices, kv_indptr : array of int32, shapes (n,) and (B + 1,)
        Pages of sequence b are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
    top_k : int
        Keys per row.
    out : array of int32, shape (T, top_k), optional
        Output array.

    Returns
    -------
    array of int32, shape (T, top_k)
        Positions of the selected keys, ascending, then -1.  The lower position wins among equals.

    Raises
    ------
    UsageError
        If a shape does not fit, or `top_k` is not positive.
    TypeError
        If an array has another dtype.

    Notes
    -----
    Page numbers and positions are not checked.  A row's selection depends on no other row.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556, equation 1.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import select_top_keys
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> keys = np.float32([[[1], [5], [-2], [3]]])  # a page of four keys
    >>> select_top_keys(np.ones((2, 1, 1), np.float32), np.ones((2, 1), np.float32), keys,
    ...                 ints(0, 0), ints(1, 3), ints(0), ints(0, 1), top_k=2)
    array([[0, 1],
           [1, 3]], dtype=int32)
    """
    check_together(q=q, weights=weights, k_cache=k_cache, out=out)
    check_array("q", q, (None, None, None), rows=True)
    T, H, D = q.shape
    check_array("weights", weights, (T, H), rows=True)
    check_array("k_cache", k_cache, (None, None, D))
    for name, array in (("batch_indices", batch_indices), ("positions", positions)):
        check_array(name, array, (T,), np.int32)
    check_array("kv_indices", kv_indices, (None,), np.int32)
    check_array("kv_indptr", kv_indptr, (None,), np.int32)
    if top_k < 1:
        raise UsageError(f"top_k must be positive, got {top_k}")
    out = output(q, (T, top_k), out, np.int32)
    tables = (batch_indices, positions, kv_indices, kv_indptr)
    (cuda if is_cuda(q) else cpu).select_top_keys(q, weights, k_cache, *tables, out)
    return out
