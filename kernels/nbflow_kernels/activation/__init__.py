"""Activations: element by element, and the gated forms of feed-forward layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels._dispatch import check_array, is_cuda
from nbflow_kernels.activation import cpu, cuda
from nbflow_kernels.errors import UsageError

__all__ = [
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "relu",
    "relu_and_mul",
    "silu",
    "silu_and_mul",
]


def _apply(op: str, x: Any, out: Any) -> Any:
    """Check, then run the variant of an element-wise op on the rows of `x`."""
    check_array("x", x, (None,) * max(1, getattr(x, "ndim", 1)))
    if out is None:
        out = np.empty_like(x)
    else:
        check_array("out", out, x.shape)
    variant = cuda if is_cuda(x) else cpu
    if x.size:
        rows = (-1, x.shape[-1])
        getattr(variant, op)(x.reshape(rows), out.reshape(rows))
    return out


def _apply_gated(op: str, x: Any, out: Any) -> Any:
    """Check, then run the variant of a gated op."""
    check_array("x", x, (None, None))
    T, columns = x.shape
    if columns % 2:
        raise UsageError(
            f"x must have shape (T, 2 * I), the gate's columns before the others, got {x.shape}"
        )
    if out is None:
        out = np.empty_like(x[:, : columns // 2])
    else:
        check_array("out", out, (T, columns // 2))
    variant = cuda if is_cuda(x) else cpu
    getattr(variant, op)(x, out)
    return out


def silu(x: NDArray[np.float32], *, out: NDArray[np.float32] | None = None) -> Any:
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


def silu_and_mul(x: NDArray[np.float32], *, out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply SiLU of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{silu}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (T, 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (T, I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (T, I)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x` has an odd number of columns, or `out` another shape.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.silu : The activation alone.

    References
    ----------
    .. [1] N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import silu_and_mul
    >>> silu_and_mul(np.array([[2.0, -1.0, 3.0, 5.0]], np.float32)).round(4)
    array([[ 5.2848, -1.3447]], dtype=float32)
    """
    return _apply_gated("silu_and_mul", x, out)


def gelu(x: NDArray[np.float32], *, out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply each element by the normal distribution function of it (exact GELU).

    .. math:: y = \frac{x}{2} \left(1 + \operatorname{erf} \frac{x}{\sqrt 2}\right)

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
    nbflow_kernels.gelu_and_mul : The gated form.

    References
    ----------
    .. [1] D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gelu
    >>> gelu(np.array([-1.0, 0.0, 2.0], np.float32)).round(4)
    array([-0.1587,  0.    ,  1.9545], dtype=float32)
    """
    return _apply("gelu", x, out)


def gelu_and_mul(x: NDArray[np.float32], *, out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply exact GELU of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{gelu}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (T, 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (T, I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (T, I)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x` has an odd number of columns, or `out` another shape.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.gelu : The activation alone.

    References
    ----------
    .. [1] N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gelu_and_mul
    >>> gelu_and_mul(np.array([[2.0, -1.0, 3.0, 5.0]], np.float32)).round(4)
    array([[ 5.8635, -0.7933]], dtype=float32)
    """
    return _apply_gated("gelu_and_mul", x, out)


def gelu_tanh(x: NDArray[np.float32], *, out: NDArray[np.float32] | None = None) -> Any:
    r"""Apply the tanh form of GELU (``gelu_pytorch_tanh``, ``gelu_new``).

    .. math:: y = \frac{x}{2} \left(1 + \tanh\left(\sqrt{2 / \pi}
        \, (x + 0.044715 x^3)\right)\right)

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
    nbflow_kernels.gelu_tanh_and_mul : The gated form.

    References
    ----------
    .. [1] D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gelu_tanh
    >>> gelu_tanh(np.array([-1.0, 0.0, 2.0], np.float32)).round(4)
    array([-0.1588,  0.    ,  1.9546], dtype=float32)
    """
    return _apply("gelu_tanh", x, out)


def gelu_tanh_and_mul(x: NDArray[np.float32], *, out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply the tanh form of GELU of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{gelu\_tanh}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (T, 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (T, I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (T, I)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x` has an odd number of columns, or `out` another shape.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.gelu_tanh : The activation alone.

    References
    ----------
    .. [1] N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gelu_tanh_and_mul
    >>> gelu_tanh_and_mul(np.array([[2.0, -1.0, 3.0, 5.0]], np.float32)).round(4)
    array([[ 5.8638, -0.794 ]], dtype=float32)
    """
    return _apply_gated("gelu_tanh_and_mul", x, out)


def relu(x: NDArray[np.float32], *, out: NDArray[np.float32] | None = None) -> Any:
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


def relu_and_mul(x: NDArray[np.float32], *, out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply ReLU of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{relu}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (T, 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (T, I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (T, I)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x` has an odd number of columns, or `out` another shape.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.relu : The activation alone.

    References
    ----------
    .. [1] N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import relu_and_mul
    >>> relu_and_mul(np.array([[2.0, -1.0, 3.0, 5.0]], np.float32)).round(4)
    array([[6., 0.]], dtype=float32)
    """
    return _apply_gated("relu_and_mul", x, out)
