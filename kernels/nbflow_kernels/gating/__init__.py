"""Gates: products with an activation of another array, limits, and decays of recurrent states.

Gates of attention outputs, of recurrent layers and of short convolutions are columns of other
arrays than what they multiply; `nbflow_kernels.glu` is for two halves of one array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_together, is_cuda, output_array
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.gating import cpu, cuda

__all__ = ["clip", "extend_heads", "gated_product", "log_decay"]


def gated_product(
    gate: NDArray[np.float32],
    x: NDArray[np.float32],
    activation: str = "sigmoid",
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Multiply each element by an activation of its gate.

    .. math:: y_{ti} = f(\mathrm{gate}_{ti}) \, x_{ti}

    Parameters
    ----------
    gate : array of float32, shape (T, I)
        Gates.  Rows may be strided (a slice of columns of a wider matrix).  A NumPy array runs on
        the CPU; an array on a CUDA device runs there.
    x : array of float32, shape (T, I)
        Factors; rows may be strided.
    activation : {"sigmoid", "silu", "identity"}
        Function f.
    out : array of float32, shape (T, I), optional
        Output array; rows may be strided.  It may be `x` or `gate` itself.

    Returns
    -------
    array of float32, shape (T, I)
        `out` if given, else a new array on the device of `gate`.

    Raises
    ------
    UsageError
        If the shapes differ, or the activation is unknown.
    TypeError
        If an array is not of float32.

    See Also
    --------
    nbflow_kernels.glu : For gate and factor in one array.

    References
    ----------
    .. [1] Z. Qiu et al., "Gated Attention for Large Language Models", arXiv:2505.06708.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gated_product
    >>> gates, x = np.array([[0.0, 2.0]], np.float32), np.array([[4.0, 3.0]], np.float32)
    >>> gated_product(gates, x).round(4)
    array([[2.    , 2.6424]], dtype=float32)
    >>> gated_product(gates, x, "identity")
    array([[0., 6.]], dtype=float32)
    """
    check_together(gate=gate, x=x, out=out)
    check_array("gate", gate, (None, None), rows=True)
    check_array("x", x, gate.shape, rows=True)
    if activation not in cpu.GATES:
        raise unknown_name("activation", activation, cpu.GATES)
    if out is not x and out is not gate:
        out = output_array(x, gate.shape, out, rows=True)
    variant: Any = cuda if is_cuda(gate) else cpu
    variant.gated_product(gate, x, activation, out)
    return out


def clip(x: NDArray[np.float32], limit: float, out: NDArray[np.float32] | None = None) -> Any:
    r"""Limit the magnitude of each element.

    .. math:: y_{ti} = \min(\max(x_{ti}, -L), L)

    Parameters
    ----------
    x : array of float32, shape (T, I)
        Input; rows may be strided.  A NumPy array runs on the CPU; an array on a CUDA device runs
        there.
    limit : float
        L, above 0.
    out : array of float32, shape (T, I), optional
        Output array; rows may be strided.  It may be `x` itself.

    Returns
    -------
    array of float32, shape (T, I)
        `out` if given, else a new array on the device of `x`.  NaN stays NaN.

    Raises
    ------
    UsageError
        If the shapes differ, or `limit` is not above 0.
    TypeError
        If an array is not of float32.

    Notes
    -----
    OLMo, MPT and DBRX limit queries, keys and values (``clip_qkv``).

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import clip
    >>> clip(np.array([[-9.0, 0.5, 9.0]], np.float32), 8.0)
    array([[-8. ,  0.5,  8. ]], dtype=float32)
    """
    check_together(x=x, out=out)
    check_array("x", x, (None, None), rows=True)
    if not limit > 0:
        raise UsageError(f"limit must be above 0, got {limit}")
    if out is not x:
        out = output_array(x, x.shape, out, rows=True)
    variant: Any = cuda if is_cuda(x) else cpu
    variant.clip(x, float(limit), out)
    return out


def log_decay(
    x: NDArray[np.float32],
    rate: NDArray[np.float32],
    bias: NDArray[np.float32],
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Return the logarithms of the decays of a recurrent state, for `gated_delta_rule`.

    .. math:: g_{th} = r_h \, \log(1 + e^{x_{th} + b_h})

    Parameters
    ----------
    x : array of float32, shape (T, H)
        Projection of the tokens; rows may be strided.  A NumPy array runs on the CPU; an array on
        a CUDA device runs there.
    rate : array of float32, shape (H,)
        Decay rate of each head, negative: ``-exp(A_log)`` of a checkpoint.
    bias : array of float32, shape (H,)
        Added to `x`.
    out : array of float32, shape (T, H), optional
        Output array; rows may be strided.  It may be `x` itself.

    Returns
    -------
    array of float32, shape (T, H)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If a shape does not fit.
    TypeError
        If an array is not of float32.

    References
    ----------
    .. [1] S. Yang, J. Kautz and A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta
       Rule", arXiv:2412.06464, section 3.4; the form of the decay is Mamba-2's.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import log_decay
    >>> rate, zero = np.array([-2.0], np.float32), np.zeros((1, 1), np.float32)
    >>> log_decay(zero, rate, zero[0]).round(4)
    array([[-1.3863]], dtype=float32)
    """
    check_together(x=x, rate=rate, bias=bias, out=out)
    check_array("x", x, (None, None), rows=True)
    for name, vector in (("rate", rate), ("bias", bias)):
        check_array(name, vector, x.shape[1:])
    if out is not x:
        out = output_array(x, x.shape, out, rows=True)
    variant: Any = cuda if is_cuda(x) else cpu
    variant.log_decay(x, rate, bias, out)
    return out


def extend_heads(
    x: NDArray[np.float32],
    numbers: NDArray[np.float32],
    n_columns: int,
    out: NDArray[np.float32] | None = None,
    *,
    exponential: bool = False,
) -> Any:
    r"""Append a column to each head, so that a product of heads gets one more term.

    .. math:: y_{th} = (x_{th}, f(n_{th}), 0, \ldots, 0)

    Keys that end in a number b and queries that end in ``1 / sm_scale`` have attention scores with
    b added: a mask that depends on the key alone, computed by any attention kernel.

    Parameters
    ----------
    x : array of float32, shape (T, H, D)
        Heads; rows may be strided.  A NumPy array runs on the CPU; an array on a CUDA device runs
        there.
    numbers : array of float32, shape (T, H)
        n; rows may be strided.
    n_columns : int
        Columns to append, at least 1; zeros follow the number.
    out : array of float32, shape (T, H, D + n_columns), optional
        Output array.
    exponential : bool
        f is the exponential function instead of the identity.

    Returns
    -------
    array of float32, shape (T, H, D + n_columns)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If a shape does not fit, or `n_columns` is below 1.
    TypeError
        If an array is not of float32.

    References
    ----------
    .. [1] J. Shi et al., "Wonderful Matrices: Combining for a More Efficient and Effective
       Foundation Model Architecture", arXiv:2412.11834; the dynamic mask of Doge.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import extend_heads
    >>> heads, numbers = np.array([[[3.0, 4.0]]], np.float32), np.array([[0.5]], np.float32)
    >>> extend_heads(heads, numbers, 2)
    array([[[3. , 4. , 0.5, 0. ]]], dtype=float32)
    """
    check_together(x=x, numbers=numbers, out=out)
    check_array("x", x, (None, None, None), rows=True)
    check_array("numbers", numbers, x.shape[:2], rows=True)
    if n_columns < 1:
        raise UsageError(f"n_columns must be at least 1, got {n_columns}")
    out = output_array(x, (*x.shape[:2], x.shape[2] + int(n_columns)), out)
    variant: Any = cuda if is_cuda(x) else cpu
    variant.extend_heads(x, numbers, bool(exponential), out)
    return out
