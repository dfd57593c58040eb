"""Matrix product with quantized weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import as_rows, check_array, check_together, is_cuda, output_array
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.quantized_matmul import cpu, cuda

__all__ = ["ACTIVATIONS", "qmatmul"]

ACTIVATIONS = ("f32", "bf16", "int8")
"""Types of activations in a product."""


def qmatmul(
    x: NDArray[np.float32],
    w: QuantTensor,
    *,
    bias: NDArray[np.float32] | None = None,
    accumulate: bool = False,
    activations: str = "f32",
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Multiply activations by the transpose of a quantized weight matrix.

    .. math:: y_{tn} = \sum_k x_{tk} \, \mathrm{dequantize}(w)_{nk} + b_n \; (+ \; y_{tn})

    Parameters
    ----------
    x : array of float32, shape (T, K) or (..., K)
        Activations.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    w : QuantTensor, shape (N, K)
        Weights, a row per output, in any format of `nbflow_kernels.FORMATS`.
    bias : array of float32, shape (N,), optional
        Added to every row of the result.
    accumulate : bool
        Add to what `out` holds instead of replacing it.
    activations : {"f32", "bf16", "int8"}
        "bf16" rounds `x` and the dequantized weights to bfloat16: half the time for many rows on
        processors that multiply pairs of bfloat16, with an error of 0.23 % of the result's root
        mean square.
        "int8" quantizes `x` to 8 bits with a scale per 32 columns and multiplies integers: 2 to 4
        times as fast for many rows, with an error of 0.5 % of the result's root mean square.  It
        needs weights in a block format.
    out : array of float32, shape (T, N) or (..., N), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (T, N) or (..., N)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If the shapes do not fit, `out` overlaps `x`, `accumulate` is given without `out`,
        `activations` is unknown or does not suit the weights, or some are on a CUDA device and
        others are not.
    TypeError
        If `w` is not a `QuantTensor`, or an array has another dtype.

    See Also
    --------
    nbflow_kernels.matmul : The same with weights in float32, float16 or bfloat16.
    nbflow_kernels.quantized_matmul.reference.qmatmul : The NumPy reference.

    Notes
    -----
    The first product of a tensor creates its compute layout, as large as the stored one (up to 4 %
    larger where integer scales are widened to bytes).  Weights are dequantized panel by panel,
    never as a whole matrix.  Products are added in an order that depends only on K: a row of the
    result is bitwise the same whatever other rows are in the call, for any number of threads.  The
    product with the outliers of `w`, if it has any, is added last.

    Products of two bfloat16 are exact in float32; processors with an instruction for them flush
    denormal numbers to zero, others do not.

    With "int8", the activations of 32 columns become ``q = rint(x * (127 / max|x|))`` and a scale
    ``d = max|x| / 127``, in float32; where the largest magnitude is below 2 ** -100 all q are 0;
    infinities and NaN propagate to the result.  Weights are ``scale * (code - zero) + base``.  Sums
    of ``(code - zero) * q`` over the columns that share both scales (32, or 16) are exact integers;
    they are multiplied by ``scale * d`` and added in float32, and so are the bases, times d and the
    sum of the q.  The result has the same bits on every processor; on a CUDA device the integers
    are the same, and the float32 sums are taken in another order.

    Examples
    --------
    >>> import numpy as np
    >>> import nbflow_kernels as nk
    >>> w = nk.quantize(127 * np.eye(3, 64, dtype=np.float32), "q8")
    >>> nk.qmatmul(np.arange(64, dtype=np.float32)[None], w)
    array([[  0., 127., 254.]], dtype=float32)
    >>> nk.qmatmul(np.arange(64, dtype=np.float32)[None], w, activations="int8").round(1)
    array([[  0., 124., 248.]], dtype=float32)
    """
    if not isinstance(w, QuantTensor):
        raise TypeError(f"w must be a QuantTensor, got {type(w).__name__}; use matmul for arrays")
    if len(w.shape) != 2:
        raise UsageError(f"w must have shape (N, K), got {w.shape}")
    if activations not in ACTIVATIONS:
        raise unknown_name("kind of activations", activations, ACTIVATIONS)
    if activations == "int8" and not w.format.takes_int8:
        raise UsageError(
            f"activations='int8' needs weights in a block format of integers, got {w.format.name}; "
            "use activations='f32'"
        )
    check_together(x=x, w=w, bias=bias, out=out)
    given = out
    x, out, shape = as_rows(x, out, w.shape[0])
    check_array("x", x, (None, w.shape[1]), rows=True)
    if bias is not None:
        check_array("bias", bias, (w.shape[0],))
    out = output_array(x, (x.shape[0], w.shape[0]), out, accumulate, rows=True)
    variant = cuda if is_cuda(x) else cpu
    variant.qmatmul(x, w, bias, bool(accumulate), activations, out)
    if not shape:
        return out
    return out.reshape(shape) if given is None else given
