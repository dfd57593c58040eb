"""Grouped GEMM: a weight matrix per segment of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_together, is_cuda, output_array
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.moe import cpu, cuda
from nbflow_kernels.quantized_matmul import ACTIVATIONS

DTYPES = (np.float32, np.float16, np.uint16)


def grouped_matmul(
    x: NDArray[np.float32],
    weights: NDArray[Any] | QuantTensor | Sequence[NDArray[Any] | QuantTensor],
    indptr: NDArray[np.int32],
    *,
    rows: NDArray[np.int32] | None = None,
    bias: NDArray[np.float32] | None = None,
    activations: str = "f32",
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Multiply each segment of rows by the transpose of its own weight matrix.

    .. math:: y_{rn} = \sum_k x_{rk} w_{ekn}^T + b_{en}, \quad
        \mathrm{indptr}_e \le r < \mathrm{indptr}_{e+1}

    Parameters
    ----------
    x : array of float32, shape (M, K)
        Activations, in order of segments unless `rows` is given.
    weights : array, QuantTensor or sequence of them
        The matrices: an array (E, N, K) of float32, float16 or uint16 (bits of bfloat16), a
        `QuantTensor` (E, N, K), or E matrices (N, K) of any of these kinds.
    indptr : array of int32, shape (E + 1,)
        Start and end of each segment.
    rows : array of int32, shape (P,), optional
        The row of `x` for each row of the result, e.g. the first result of `moe_permute`; by
        default row r for row r.
    bias : array of float32, shape (E, N), optional
        Added to the rows of each segment.
    activations : {"f32", "bf16", "int8"}
        Arithmetic of quantized matrices, as of `qmatmul`; "int8" leaves float formats at "f32".
        Arrays are multiplied in float32.
    out : array of float32, shape (P, N), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (P, N)
        `out` if given, else a new array; rows from ``indptr[E]`` on are 0.

    Raises
    ------
    UsageError
        If the shapes do not fit, `activations` is unknown, or `indptr` or `rows` are out of range,
        which is not checked on a CUDA device.
    TypeError
        If an array has another dtype or `weights` another type.

    See Also
    --------
    nbflow_kernels.matmul : Product with one matrix.

    Notes
    -----
    A row of the result is bitwise that of `matmul` or `qmatmul` with its matrix.  An empty segment
    costs nothing, and the load is balanced over the threads whatever the lengths of the others.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import grouped_matmul
    >>> x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    >>> weights = np.array([[[1, 0]], [[9, 9]], [[0, 1]]], np.float32)
    >>> grouped_matmul(x, weights, np.array([0, 2, 2, 3], np.int32))
    array([[1.],
           [3.],
           [6.]], dtype=float32)
    """
    check_activations(activations)
    matrices, N = list_matrices("weights", weights, x.shape[-1])
    check_together(x=x, weights=matrices[0], indptr=indptr, rows=rows, bias=bias, out=out)
    check_array("x", x, (None, None))
    check_array("indptr", indptr, (len(matrices) + 1,), np.int32)
    if rows is not None:
        check_array("rows", rows, (None,), np.int32)
    P = len(x) if rows is None else len(rows)
    if bias is not None:
        check_array("bias", bias, (len(matrices), N))
    out = output_array(x, (P, N), out)
    if is_cuda(x):
        stack = weights if hasattr(weights, "shape") else list(matrices)
        cuda.grouped(x, stack, indptr, bias, out, rows, activations)
        return out
    if indptr[0] != 0 or indptr[-1] > P or (np.diff(indptr) < 0).any():
        raise UsageError(f"indptr must rise from 0 to at most the number of rows, {P}")
    if rows is not None:
        if P and (rows.min() < 0 or rows.max() >= len(x)):
            raise UsageError(f"rows must lie in 0..{len(x) - 1}, got {rows.min()}..{rows.max()}")
        x = x[rows]
    cpu.grouped(x, matrices, indptr, bias, out, activations)
    return out


def check_activations(activations: str) -> None:
    """Raise unless grouped products have this arithmetic."""
    if activations not in ACTIVATIONS:
        raise unknown_name("kind of activations", activations, ACTIVATIONS)


def list_matrices(name: str, weights: Any, K: int) -> tuple[Sequence[Any], int]:
    """Check the shapes of a stack or sequence of matrices; return them and their number of rows."""
    if isinstance(weights, QuantTensor):
        if len(weights.shape) != 3:
            raise UsageError(f"{name} must have shape (E, N, K), got {weights.shape}")
        matrices: Sequence[Any] = weights.matrices()
    elif isinstance(weights, np.ndarray) or is_cuda(weights):
        check_array(name, weights, (None, None, None), DTYPES)
        matrices = weights
    else:
        matrices = list(weights)
    if len(matrices) == 0:
        raise UsageError(f"{name} must have at least one matrix")
    for w in matrices if isinstance(matrices, list) else matrices[:1]:
        check_matrix(f"a matrix of {name}", w, matrices[0].shape[0], K)
    return matrices, int(matrices[0].shape[0])


def check_matrix(name: str, w: Any, N: int | None, K: int) -> None:
    """Raise unless `w` is a float or quantized matrix (N, K)."""
    if not isinstance(w, QuantTensor):
        check_array(name, w, (N, K), DTYPES)
    elif len(w.shape) != 2 or w.shape[1] != K or N not in (None, w.shape[0]):
        raise UsageError(
            f"{name} must have shape ({'any' if N is None else N}, {K}), got {w.shape}"
        )


class SegmentGEMMWrapper:
    """Grouped GEMM with the interface of FlashInfer's class, e.g. for batches of LoRA adapters.

    Parameters
    ----------
    float_workspace_buffer : array, optional
        Left as it is: the products need no workspace.
    backend : {"auto"}
        Only "auto".

    Raises
    ------
    UsageError
        If `backend` is another one.
    TypeError
        If the workspace is not an array.

    See Also
    --------
    nbflow_kernels.grouped_matmul : The same as a function.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import SegmentGEMMWrapper
    >>> x = np.ones((3, 2), np.float32)
    >>> adapters = np.array([[[1, 2]], [[3, 4]]], np.float32)  # (2, 1, 2)
    >>> SegmentGEMMWrapper().run(
    ...     x, adapters, 2, True, seg_lens=np.array([1, 2]), weight_indices=np.array([1, 0])
    ... )
    array([[7.],
           [3.],
           [3.]], dtype=float32)
    """

    def __init__(self, float_workspace_buffer: Any = None, backend: str = "auto") -> None:
        held = float_workspace_buffer
        if held is not None and not isinstance(held, np.ndarray) and not is_cuda(held):
            raise TypeError(
                f"float_workspace_buffer must be an array or None, got {type(held).__name__}"
            )
        if backend != "auto":
            raise UsageError(f"backend must be 'auto', got {backend!r}")

    def run(
        self,
        x: NDArray[np.float32],
        weights: NDArray[Any],
        batch_size: int,
        weight_column_major: bool,
        out: NDArray[np.float32] | None = None,
        seg_lens: NDArray[np.integer] | None = None,
        seg_indptr: NDArray[np.integer] | None = None,
        weight_indices: NDArray[np.integer] | None = None,
    ) -> Any:
        """Multiply each segment of `x` by its matrix.

        Parameters
        ----------
        x : array of float32, shape (M, K)
            Activations.
        weights : array or QuantTensor, shape (E, N, K) or (E, K, N)
            The matrices, as in `grouped_matmul`.
        batch_size : int
            Number of segments B.
        weight_column_major : bool
            True for (E, N, K).  (E, K, N) is copied into that order at every call and must be an
            array.
        out : array of float32, shape (M, N), optional
            Where to write the result.
        seg_lens : array of int, shape (B,), optional
            Rows of each segment; needed unless `seg_indptr` is given.
        seg_indptr : array of int, shape (B + 1,), optional
            Start and end of each segment.
        weight_indices : array of int, shape (B,), optional
            The matrix of each segment; by default matrix i for segment i.

        Returns
        -------
        array of float32, shape (M, N)
            `out` if given, else a new array.

        Raises
        ------
        UsageError, TypeError
            As `grouped_matmul`; UsageError unless one of `seg_lens` and `seg_indptr` is given.
        """
        if (seg_lens is None) == (seg_indptr is None):
            raise UsageError("give one of seg_lens and seg_indptr")
        if seg_lens is not None:
            seg_indptr = np.concatenate([[0], np.cumsum(seg_lens)])
        indptr = np.ascontiguousarray(seg_indptr, np.int32)
        if indptr.shape != (batch_size + 1,):
            raise UsageError(
                f"batch_size is {batch_size}, but there are {len(indptr) - 1} segments"
            )
        if not weight_column_major:
            if is_cuda(x):
                raise UsageError("weight_column_major=False needs arrays in host memory")
            check_array("weights", weights, (None, None, None), DTYPES)
            weights = np.ascontiguousarray(weights.transpose(0, 2, 1))
        matrices = list_matrices("weights", weights, x.shape[-1])[0]
        order = np.arange(batch_size) if weight_indices is None else np.asarray(weight_indices)
        if order.shape != (batch_size,) or (batch_size and order.max() >= len(matrices)):
            raise UsageError(
                f"weight_indices must name one of {len(matrices)} matrices for each of "
                f"{batch_size} segments"
            )
        if is_cuda(x):
            from nbflow_kernels.cuda import to_device

            indptr = to_device(indptr, x)
        return grouped_matmul(x, [matrices[int(i)] for i in order], indptr, out=out)
