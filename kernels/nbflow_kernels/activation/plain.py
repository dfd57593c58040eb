"""Activations element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels._dispatch import check_array, empty, is_cuda
from nbflow_kernels.activation import cpu, cuda


def _apply(op: str, x: Any, out: Any) -> Any:
    """Check, then run the variant of an element-wise op on the rows of `x`."""
    check_array("x", x, (None,) * max(1, getattr(x, "ndim", 1)))
    if out is None:
        out = empty(x, x.shape)
    else:
        check_array("out", out, x.shape)
    variant = cuda if is_cuda(x) else cpu
    if x.size:
        rows = (-1, x.shape[-1])
        getattr(variant, op)(x.reshape(rows), out.reshape(rows))
    return out


def silu(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply each element by its logistic function (also called swish).

    .. math:: y = \frac{x}{1 + e^{-x}}

    Parameters
    ----------
    x : array of float32, any shape of one or more axes
        Input.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    out : array of float32, shape of `x`, optional
        Where to write the result.  It may be `x` itself.

    Returns
    -------
    array of float32, shape of `x`
        `out` if given, else a new array on the device of `x`.
        -infinity gives NaN, as in PyTorch; large negative numbers give 0.

    Raises
    ------
    UsageError
        If `out` does not have the shape of `x`, or an array is not C-contiguous.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.silu_and_mul : The gated form.

    References
    ----------
    .. [1] S. Elfwing, E. Uchibe and K. Doya, "Sigmoid-Weighted Linear Units for Neural Network
       Function Approximation in Reinforcement Learning", arXiv:1702.03118.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import silu
    >>> silu(np.array([-1.0, 0.0, 2.0], np.float32)).round(4)
    array([-0.2689,  0.    ,  1.7616], dtype=float32)
    """
    return _apply("silu", x, out)


def gelu(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply each element by the normal distribution function of it.

    .. math:: y = x \, \Phi(x) = \frac{x}{2} \left( 1 + \operatorname{erf}(x / \sqrt 2) \right)

    Parameters
    ----------
    x : array of float32, any shape of one or more axes
        Input.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    out : array of float32, shape of `x`, optional
        Where to write the result.  It may be `x` itself.

    Returns
    -------
    array of float32, shape of `x`
        `out` if given, else a new array on the device of `x`.
        -infinity gives NaN, as in PyTorch; large negative numbers give 0.

    Raises
    ------
    UsageError
        If `out` does not have the shape of `x`, or an array is not C-contiguous.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.gelu_and_mul : The gated form.

    References
    ----------
    .. [1] D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv:1606.08415,
       the exact form.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gelu
    >>> gelu(np.array([-1.0, 0.0, 2.0], np.float32)).round(4)
    array([-0.1587,  0.    ,  1.9545], dtype=float32)
    """
    return _apply("gelu", x, out)


def gelu_tanh(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Approximate `gelu` by a hyperbolic tangent, as GPT-2 and Gemma do.

    .. math:: y = \frac{x}{2} \left( 1 + \tanh u \right),
        \qquad u = \sqrt{2 / \pi} \, (x + 0.044715 x^3)

    Parameters
    ----------
    x : array of float32, any shape of one or more axes
        Input.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    out : array of float32, shape of `x`, optional
        Where to write the result.  It may be `x` itself.

    Returns
    -------
    array of float32, shape of `x`
        `out` if given, else a new array on the device of `x`.
        -infinity gives NaN, as in PyTorch; large negative numbers give 0.

    Raises
    ------
    UsageError
        If `out` does not have the shape of `x`, or an array is not C-contiguous.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.gelu_tanh_and_mul : The gated form.

    References
    ----------
    .. [1] D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv:1606.08415,
       section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gelu_tanh
    >>> gelu_tanh(np.array([-1.0, 0.0, 2.0], np.float32)).round(4)
    array([-0.1588,  0.    ,  1.9546], dtype=float32)
    """
    return _apply("gelu_tanh", x, out)


def gelu_quick(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Approximate `gelu` by a logistic function, as CLIP does.

    .. math:: y = \frac{x}{1 + e^{-1.702 x}}

    Parameters
    ----------
    x : array of float32, any shape of one or more axes
        Input.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    out : array of float32, shape of `x`, optional
        Where to write the result.  It may be `x` itself.

    Returns
    -------
    array of float32, shape of `x`
        `out` if given, else a new array on the device of `x`.
        -infinity gives NaN, as in PyTorch; large negative numbers give 0.

    Raises
    ------
    UsageError
        If `out` does not have the shape of `x`, or an array is not C-contiguous.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.gelu_quick_and_mul : The gated form.

    References
    ----------
    .. [1] D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv:1606.08415,
       section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gelu_quick
    >>> gelu_quick(np.array([-1.0, 0.0, 2.0], np.float32)).round(4)
    array([-0.1542,  0.    ,  1.9357], dtype=float32)
    """
    return _apply("gelu_quick", x, out)


def relu(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Replace negative elements by zero; NaN stays NaN.

    .. math:: y = \max(x, 0)

    Parameters
    ----------
    x : array of float32, any shape of one or more axes
        Input.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    out : array of float32, shape of `x`, optional
        Where to write the result.  It may be `x` itself.

    Returns
    -------
    array of float32, shape of `x`
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `out` does not have the shape of `x`, or an array is not C-contiguous.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.relu_and_mul : The gated form.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import relu
    >>> relu(np.array([-1.0, 0.0, 2.0], np.float32)).round(4)
    array([0., 0., 2.], dtype=float32)
    """
    return _apply("relu", x, out)


def relu2(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Replace negative elements by zero and square the others; NaN stays NaN.

    .. math:: y = \max(x, 0)^2

    Parameters
    ----------
    x : array of float32, any shape of one or more axes
        Input.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    out : array of float32, shape of `x`, optional
        Where to write the result.  It may be `x` itself.

    Returns
    -------
    array of float32, shape of `x`
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `out` does not have the shape of `x`, or an array is not C-contiguous.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.relu2_and_mul : The gated form.

    References
    ----------
    .. [1] D. So et al., "Primer: Searching for Efficient Transformers for Language Modeling",
       arXiv:2109.08668, section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import relu2
    >>> relu2(np.array([-1.0, 0.0, 2.0], np.float32)).round(4)
    array([0., 0., 4.], dtype=float32)
    """
    return _apply("relu2", x, out)


def sigmoid(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Return the logistic function of each element.

    .. math:: y = \frac{1}{1 + e^{-x}}

    Parameters
    ----------
    x : array of float32, any shape of one or more axes
        Input.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    out : array of float32, shape of `x`, optional
        Where to write the result.  It may be `x` itself.

    Returns
    -------
    array of float32, shape of `x`
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `out` does not have the shape of `x`, or an array is not C-contiguous.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.sigmoid_and_mul : The gated form.

    Notes
    -----
    Off by no more than 4e-38 where the result is below 1e-38.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import sigmoid
    >>> sigmoid(np.array([-1.0, 0.0, 2.0], np.float32)).round(4)
    array([0.2689, 0.5   , 0.8808], dtype=float32)
    """
    return _apply("sigmoid", x, out)
