"""Matrix product with float weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import as_rows, check_array, check_together, is_cuda, output_array
from nbflow_kernels.matmul import cpu, cuda

__all__ = ["matmul"]


def matmul(
    x: NDArray[np.float32],
    w: NDArray[Any],
    *,
    bias: NDArray[np.float32] | None = None,
    accumulate: bool = False,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Multiply activations by the transpose of a weight matrix.

    .. math:: y_{tn} = \sum_k x_{tk} w_{nk} + b_n \; (+ \; y_{tn})

    Parameters
    ----------
    x : array of float32, shape (T, K) or (..., K)
        Activations.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    w : array of float32, float16 or uint16, shape (N, K)
        Weights, a row per output; uint16 holds the bits of bfloat16.
    bias : array of float32, shape (N,), optional
        Added to every row of the result.
    accumulate : bool
        Add to what `out` holds instead of replacing it.
    out : array of float32, shape (T, N) or (..., N), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (T, N) or (..., N)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If the shapes do not fit, `out` overlaps `x`, `accumulate` is given without `out`, or some
        arrays are on a CUDA device and others are not.
    TypeError
        If an array has another dtype, or `w` is a QuantTensor, which `qmatmul` takes.

    See Also
    --------
    nbflow_kernels.qmatmul : The same with quantized weights.
    nbflow_kernels.matmul.reference.matmul : The NumPy reference.

    Notes
    -----
    Products are added in float32, in an order that depends only on K: a row of the result is
    bitwise the same whatever other rows are in the call, for any number of threads.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import matmul
    >>> x = np.array([[1.0, 2.0]], np.float32)
    >>> w = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 3.0]], np.float16)
    >>> matmul(x, w, bias=np.array([0.0, 0.0, 1.0], np.float32))
    array([[1. , 1.5, 7. ]], dtype=float32)
    """
    if not isinstance(w, np.ndarray) and not is_cuda(w):
        from nbflow_kernels.formats import QuantTensor

        if isinstance(w, QuantTensor):
            raise TypeError(
                "w must be an array of float32, float16 or uint16, got a QuantTensor of format "
                f"{w.format.name}; call qmatmul"
            )
    check_together(x=x, w=w, bias=bias, out=out)
    check_array("w", w, (None, None), (np.float32, np.float16, np.uint16))
    given = out
    x, out, shape = as_rows(x, out, w.shape[0])
    check_array("x", x, (None, None))
    check_array("w", w, (None, x.shape[1]), (np.float32, np.float16, np.uint16))
    if bias is not None:
        check_array("bias", bias, (w.shape[0],))
    out = output_array(x, (x.shape[0], w.shape[0]), out, accumulate)
    variant = cuda if is_cuda(x) else cpu
    variant.matmul(x, w, bias, bool(accumulate), out)
    if not shape:
        return out
    return out.reshape(shape) if given is None else given
