"""Normalization of rows: root mean square and layer norm."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels._dispatch import check_array, is_cuda
from nbflow_kernels.norm import cpu, cuda

__all__ = ["fused_add_rmsnorm", "layernorm", "rmsnorm"]


def rmsnorm(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    *,
    eps: float,
    offset: float = 0.0,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Divide each row by its root mean square and scale it.

    .. math:: y_{te} = \frac{x_{te}}{\sqrt{\frac{1}{E} \sum_j x_{tj}^2 + \varepsilon}}
        \, (w_e + \mathrm{offset})

    Parameters
    ----------
    x : array of float32, shape (T, E)
        Input rows.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    weight : array of float32, shape (E,)
        Scale for each column, on the same device as `x`.
    eps : float
        Added to the mean square before the root, in the units of ``x ** 2``.
        Llama uses 1e-5 or 1e-6; take it from the model specification.
    offset : float
        Added to the weight: 1.0 for Gemma, whose checkpoints store the weight minus one.
    out : array of float32, shape (T, E), optional
        Where to write the result.  It may be `x` itself.

    Returns
    -------
    array of float32, shape (T, E)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x`, `weight` or `out` does not have the shape above.
    TypeError
        If one of them is not a float32 array.

    See Also
    --------
    nbflow_kernels.norm.reference.rmsnorm : The NumPy form the variants are tested against.

    Notes
    -----
    The sum is taken in float32, in an order that depends on E alone: a row's result does not
    depend on the other rows.

    References
    ----------
    .. [1] B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019,
       arXiv:1910.07467, equation 4.  The paper has no eps; it comes from the Llama code.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import rmsnorm
    >>> rmsnorm(np.array([[3.0, 4.0]], np.float32), np.ones(2, np.float32), eps=0.0).round(3)
    array([[0.849, 1.131]], dtype=float32)
    """
    check_array("x", x, (None, None))
    check_array("weight", weight, (x.shape[1],))
    if out is None:
        out = np.empty_like(x)
    else:
        check_array("out", out, x.shape)
    variant = cuda if is_cuda(x) else cpu
    variant.rmsnorm(x, weight, float(eps), float(offset), out)
    return out


def layernorm(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
    *,
    eps: float,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Subtract each row's mean, divide by its standard deviation, scale and shift.

    .. math:: y_{te} = \frac{x_{te} - \mu_t}{\sqrt{\sigma_t^2 + \varepsilon}} \, w_e + b_e

    Parameters
    ----------
    x : array of float32, shape (T, E)
        Input rows.
    weight : array of float32, shape (E,)
        Scale for each column.
    bias : array of float32, shape (E,), optional
        Shift for each column; none is a shift of zero.
    eps : float
        Added to the variance (the mean of squares, not divided by E - 1) before the root.
    out : array of float32, shape (T, E), optional
        Where to write the result.  It may be `x` itself.

    Returns
    -------
    array of float32, shape (T, E)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x`, `weight`, `bias` or `out` does not have the shape above.
    TypeError
        If one of them is not a float32 array.

    See Also
    --------
    nbflow_kernels.norm.reference.layernorm : The NumPy form the variants are tested against.

    References
    ----------
    .. [1] J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer Normalization", arXiv:1607.06450.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import layernorm
    >>> layernorm(np.array([[1.0, 3.0]], np.float32), np.ones(2, np.float32), eps=0.0)
    array([[-1.,  1.]], dtype=float32)
    """
    check_array("x", x, (None, None))
    check_array("weight", weight, (x.shape[1],))
    if bias is not None:
        check_array("bias", bias, (x.shape[1],))
    if out is None:
        out = np.empty_like(x)
    else:
        check_array("out", out, x.shape)
    variant = cuda if is_cuda(x) else cpu
    variant.layernorm(x, weight, bias, float(eps), out)
    return out


def fused_add_rmsnorm(
    x: NDArray[np.float32],
    residual: NDArray[np.float32],
    weight: NDArray[np.float32],
    *,
    eps: float,
    offset: float = 0.0,
) -> None:
    """Add `x` to the residual, then put the normalized residual into `x`; both in place.

    Parameters
    ----------
    x : array of float32, shape (T, E)
        Output of the previous layer; becomes ``rmsnorm(residual + x)``.
    residual : array of float32, shape (T, E)
        The residual stream; becomes ``residual + x``.
    weight : array of float32, shape (E,)
        Scale for each column.
    eps : float
        As in `rmsnorm`.
    offset : float
        As in `rmsnorm`.

    Raises
    ------
    UsageError
        If `x`, `residual` or `weight` does not have the shape above.
    TypeError
        If one of them is not a float32 array.

    See Also
    --------
    nbflow_kernels.rmsnorm : The same without the addition; bitwise equal to it after one.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import fused_add_rmsnorm
    >>> x, residual = np.array([[1.0, 2.0]], np.float32), np.array([[2.0, 2.0]], np.float32)
    >>> fused_add_rmsnorm(x, residual, np.ones(2, np.float32), eps=0.0)
    >>> residual
    array([[3., 4.]], dtype=float32)
    >>> x.round(3)
    array([[0.849, 1.131]], dtype=float32)
    """
    check_array("x", x, (None, None))
    check_array("residual", residual, x.shape)
    check_array("weight", weight, (x.shape[1],))
    variant = cuda if is_cuda(x) else cpu
    variant.fused_add_rmsnorm(x, residual, weight, float(eps), float(offset))
