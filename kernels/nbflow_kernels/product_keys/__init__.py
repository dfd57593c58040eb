"""Retrieval of experts of one row each by product keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_together, empty, is_cuda, output_array
from nbflow_kernels.errors import UsageError
from nbflow_kernels.product_keys import cpu, cuda

__all__ = ["gathered_dot", "product_key_routing"]

MAX_KEYS, MAX_CHOSEN = 1024, 128
"""Bounds on keys of a half, and on experts of a token: those of the CUDA kernel's shared memory."""


def product_key_routing(
    scores: NDArray[np.float32],
    top_k: int,
    *,
    first: int = 0,
    n_experts: int | None = None,
) -> tuple[Any, Any]:
    r"""Choose experts whose keys are pairs, by the sums of the scores of both halves.

    Expert :math:`i K + j` has the score :math:`s_{ti} + s_{t, K + j}`; the weights are the softmax
    of the scores of the chosen ones.

    Parameters
    ----------
    scores : array of float32, shape (T, 2 K)
        Scores of the keys of the first half, then of the second half; K is at most 1024.  A NumPy
        array runs on the CPU; an array on a CUDA device runs there.
    top_k : int
        Experts for each token, at most K * K and 128.
    first, n_experts : int
        Experts that this rank holds; all of the K * K by default.

    Returns
    -------
    weights : array of float32, shape (T, top_k)
        Weights, the largest first.  Their sum is 1.
    ids : array of int32, shape (T, top_k)
        Experts, counted from `first`; -1 for those of other ranks.  The lowest expert wins among
        equals.

    Raises
    ------
    UsageError
        If a number is out of range.
    TypeError
        If `scores` is not of float32.

    See Also
    --------
    nbflow_kernels.gathered_dot : For the products with the chosen experts.
    nbflow_kernels.moe_combine : For the weighted sum of their rows.

    References
    ----------
    .. [1] G. Lample et al., "Large Memory Layers with Product Keys", arXiv:1907.05242, section 3.
    .. [2] X. O. He, "Mixture of A Million Experts", arXiv:2407.04153.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import product_key_routing
    >>> weights, ids = product_key_routing(np.array([[0.0, 1.0, 3.0, 1.0]], np.float32), 2)
    >>> weights.round(3), ids
    (array([[0.731, 0.269]], dtype=float32), array([[2, 0]], dtype=int32))
    """
    check_array("scores", scores, (None, None))
    T, n_keys = scores.shape[0], scores.shape[1] // 2
    if scores.shape[1] != 2 * n_keys or not 1 <= n_keys <= MAX_KEYS:
        raise UsageError(
            f"scores must have 2 to {2 * MAX_KEYS} columns, an even number, got {scores.shape[1]}"
        )
    most = min(n_keys * n_keys, MAX_CHOSEN)
    if not 1 <= top_k <= most:
        raise UsageError(f"top_k must be 1..{most} with {n_keys} keys, got {top_k}")
    n = n_keys * n_keys - first if n_experts is None else n_experts
    if first < 0 or n < 0:
        raise UsageError(f"first and n_experts must not be negative, got {first} and {n}")
    weights, ids = empty(scores, (T, top_k)), empty(scores, (T, top_k), np.int32)
    if T:
        (cuda if is_cuda(scores) else cpu).product_key_routing(scores, first, n, weights, ids)
    return weights, ids


def gathered_dot(
    x: NDArray[np.float32],
    table: NDArray[np.float32],
    ids: NDArray[np.int32],
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Multiply each row with rows of a table that its indices name.

    .. math:: y_{tr} = \sum_e x_{te} \, w_{i_{tr}, e}

    Parameters
    ----------
    x : array of float32, shape (T, E)
        Input; rows may be strided.  A NumPy array runs on the CPU; an array on a CUDA device runs
        there.
    table : array of float32, shape (N, E)
        Rows w.
    ids : array of int32, shape (T, R)
        Rows of the table; 0 is the result of those outside of 0..N-1.
    out : array of float32, shape (T, R), optional
        Output array.

    Returns
    -------
    array of float32, shape (T, R)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If a shape does not fit.
    TypeError
        If an array has another dtype.

    See Also
    --------
    nbflow_kernels.product_key_routing : For indices of experts.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gathered_dot
    >>> table = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    >>> gathered_dot(np.ones((1, 2), np.float32), table, np.array([[1, -1]], np.int32))
    array([[7., 0.]], dtype=float32)
    """
    check_together(x=x, table=table, ids=ids, out=out)
    check_array("x", x, (None, None), rows=True)
    check_array("table", table, (None, x.shape[1]))
    check_array("ids", ids, (len(x), None), np.int32)
    out = output_array(x, ids.shape, out)
    if ids.size:
        (cuda if is_cuda(x) else cpu).gathered_dot(x, table, ids, out)
    return out
