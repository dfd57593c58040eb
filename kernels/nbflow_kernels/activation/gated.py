"""Gated activations: one half of the columns, through a function, times the other half.

Two conventions exist.  Feed-forward layers put the gate first: the columns that go through the
activation are [0, I), those it multiplies are [I, 2 * I); the ops named ``*_and_mul`` do that.
PyTorch's ``glu`` puts the gate second, as `glu` does unless told otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels._dispatch import check_array, empty, is_cuda
from nbflow_kernels.activation import cpu, cuda
from nbflow_kernels.errors import UsageError, unknown_name


def _halves(x: Any, out: Any) -> tuple[Any, Any, Any, Any]:
    """Check; return the variant, `x` and `out` as matrices, and `out` as the caller wants it."""
    ndim = max(1, getattr(x, "ndim", 1))
    check_array("x", x, (None,) * ndim)
    columns = x.shape[-1]
    if columns % 2:
        raise UsageError(
            f"x must have shape (..., 2 * I), the gate's columns beside the others, got {x.shape}"
        )
    shape = (*x.shape[:-1], columns // 2)
    if out is None:
        out = empty(x, shape)
    else:
        check_array("out", out, shape)
    variant = cuda if is_cuda(x) else cpu
    if ndim == 2:
        return variant, x, out, out
    rows = x.size // columns if columns else 0
    return variant, x.reshape(rows, columns), out.reshape(rows, columns // 2), out


def _apply_gated(op: str, x: Any, out: Any) -> Any:
    """Check, then run the variant of a gated op."""
    variant, rows, out_rows, out = _halves(x, out)
    getattr(variant, op)(rows, out_rows)
    return out


def silu_and_mul(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply SiLU of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{silu}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (..., 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (..., I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (..., I)
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


def gelu_and_mul(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply GELU of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{gelu}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (..., 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (..., I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (..., I)
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


def gelu_tanh_and_mul(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply GELU's tanh form of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{gelu\_tanh}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (..., 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (..., I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (..., I)
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


def gelu_quick_and_mul(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply quick GELU of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{gelu\_quick}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (..., 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (..., I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (..., I)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x` has an odd number of columns, or `out` another shape.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.gelu_quick : The activation alone.

    References
    ----------
    .. [1] N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gelu_quick_and_mul
    >>> gelu_quick_and_mul(np.array([[2.0, -1.0, 3.0, 5.0]], np.float32)).round(4)
    array([[ 5.807, -0.771]], dtype=float32)
    """
    return _apply_gated("gelu_quick_and_mul", x, out)


def relu_and_mul(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply ReLU of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{relu}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (..., 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (..., I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (..., I)
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


def relu2_and_mul(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply squared ReLU of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{relu2}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (..., 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (..., I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (..., I)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x` has an odd number of columns, or `out` another shape.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.relu2 : The activation alone.

    References
    ----------
    .. [1] N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import relu2_and_mul
    >>> relu2_and_mul(np.array([[2.0, -1.0, 3.0, 5.0]], np.float32)).round(4)
    array([[12.,  0.]], dtype=float32)
    """
    return _apply_gated("relu2_and_mul", x, out)


def sigmoid_and_mul(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Multiply the logistic function of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{sigmoid}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (..., 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (..., I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (..., I)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x` has an odd number of columns, or `out` another shape.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.sigmoid : The activation alone.

    References
    ----------
    .. [1] N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import sigmoid_and_mul
    >>> sigmoid_and_mul(np.array([[2.0, -1.0, 3.0, 5.0]], np.float32)).round(4)
    array([[2.6424, 1.3447]], dtype=float32)
    """
    return _apply_gated("sigmoid_and_mul", x, out)


def glu(
    x: NDArray[np.float32],
    activation: str = "sigmoid",
    *,
    gate_first: bool = False,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Multiply one half of the columns by an activation of the other half.

    .. math:: y_{ti} = x_{ti} \, f(x_{t,I+i}) \quad \text{or, gate first,} \quad
        y_{ti} = f(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (..., 2 * I)
        Both halves side by side.
    activation : str
        f: ``sigmoid`` (the original gated linear unit), ``silu``, ``gelu``, ``gelu_tanh``,
        ``gelu_quick``, ``relu`` or ``relu2``.
    gate_first : bool
        False: f of the second half, PyTorch's convention.  True: f of the first half, the
        convention of feed-forward layers and of the ops named ``*_and_mul``.
    out : array of float32, shape (..., I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (..., I)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x` has an odd number of columns, `out` another shape, or the activation is unknown.
    TypeError
        If `x` or `out` is not a float32 array.

    References
    ----------
    .. [1] Y. Dauphin, A. Fan, M. Auli and D. Grangier, "Language Modeling with Gated
       Convolutional Networks", arXiv:1612.08083, equation 1.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import glu
    >>> x = np.array([[2.0, -1.0, 3.0, 5.0]], np.float32)
    >>> glu(x).round(4)
    array([[ 1.9051, -0.9933]], dtype=float32)
    >>> glu(x, "silu", gate_first=True).round(4)
    array([[ 5.2848, -1.3447]], dtype=float32)
    """
    if activation not in cpu.ACTIVATIONS:
        raise unknown_name("activation", activation, cpu.ACTIVATIONS)
    variant, rows, out_rows, out = _halves(x, out)
    variant.glu(rows, activation, bool(gate_first), out_rows)
    return out


def swigluoai_and_mul(
    x: NDArray[np.float32],
    alpha: float = 1.702,
    limit: float = 7.0,
    *,
    interleaved: bool = True,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Return the clamped SwiGLU of gpt-oss.

    .. math:: y_{ti} = \frac{g}{1 + e^{-\alpha g}} \, (u + 1), \qquad
        g = \min(\mathrm{gate}_{ti}, L), \quad u = \min(\max(\mathrm{up}_{ti}, -L), L)

    Parameters
    ----------
    x : array of float32, shape (..., 2 * I)
        Gate and up projection.
    alpha : float
        Factor inside the logistic function.
    limit : float
        L, where both are cut off; positive, infinity for no limit.
    interleaved : bool
        True: gate in the even columns, up in the odd ones, as gpt-oss stores its weights.
        False: gate in columns [0, I), up in columns [I, 2 * I).
    out : array of float32, shape (..., I), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (..., I)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x` has an odd number of columns, `out` another shape, or `limit` is not positive.
    TypeError
        If `x` or `out` is not a float32 array.

    References
    ----------
    .. [1] OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925, section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import swigluoai_and_mul
    >>> swigluoai_and_mul(np.array([[2.0, 3.0, -1.0, 5.0]], np.float32)).round(4)
    array([[ 7.7426, -0.9252]], dtype=float32)
    """
    if not limit > 0:
        raise UsageError(f"limit must be positive, got {limit}")
    variant, rows, out_rows, out = _halves(x, out)
    variant.swigluoai_and_mul(rows, float(alpha), float(limit), bool(interleaved), out_rows)
    return out
