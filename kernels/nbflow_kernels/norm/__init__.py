"""Normalization of vectors: root mean square, layer norm, length; with the residual sum or a gate.

A vector is the last axis of the input: a row of the hidden state (T, E), or one head of query or
key rows (T, H, E), for models that normalize each head before the rotary embedding.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, is_cuda, output
from nbflow_kernels.errors import UsageError
from nbflow_kernels.norm import cpu, cuda
from nbflow_kernels.norm.arguments import check_columns, check_vectors
from nbflow_kernels.norm.float8_results import (
    fused_add_rmsnorm_quant,
    layernorm_quant,
    rmsnorm_quant,
)
from nbflow_kernels.norm.gated import gated_rmsnorm

__all__ = [
    "fused_add_layernorm", "fused_add_rmsnorm", "fused_add_rmsnorm_quant", "gated_rmsnorm",
    "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "l2norm", "layernorm", "layernorm_quant",
    "linear_norm", "rmsnorm", "rmsnorm_quant",
]  # fmt: skip


def rmsnorm(
    x: NDArray[np.float32],
    weight: NDArray[np.float32] | None,
    eps: float = 1e-6,
    out: NDArray[np.float32] | None = None,
    *,
    offset: float = 0.0,
) -> Any:
    r"""Divide each vector by its root mean square and scale it.

    .. math:: y_{te} = \frac{x_{te}}{\sqrt{\frac{1}{E} \sum_j x_{tj}^2 + \varepsilon}}
        \, (w_e + \mathrm{offset})

    Parameters
    ----------
    x : array of float32, shape (T, E) or (T, H, E)
        Input; the last axis is normalized.  Rows may be strided (a slice of columns of a wider
        matrix).  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    weight : array of float32, shape (E,) or, for three axes, (H, E); or None
        Scale for each column, or for each head and column; None is a scale of one, and then
        `offset` has no meaning.
    eps : float
        Added to the mean square before the root, in the units of ``x ** 2``.
        Llama uses 1e-5 or 1e-6; take it from the model specification.
    out : array of float32, shape of `x`, optional
        Output array.  It may be `x` itself.
    offset : float
        Added to the weight: 1.0 for Gemma, whose checkpoints store the weight minus one.

    Returns
    -------
    array of float32, shape of `x`
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `x`, `weight` or `out` does not have the shape above, or there is an `offset` without
        a weight.
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
    check_vectors("x", x)
    check_columns("weight", weight, x)
    if weight is None and offset != 0.0:
        raise UsageError(f"offset is added to the weight; without one it must be 0, got {offset}")
    out = output(x, x.shape, out, rows=True)
    _variant(x).rmsnorm(x, weight, float(eps), float(offset), out)
    return out


def gemma_rmsnorm(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: float = 1e-6,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Divide each vector by its root mean square and scale it by the weight plus one.

    .. math:: y_{te} = \frac{x_{te}}{\sqrt{\frac{1}{E} \sum_j x_{tj}^2 + \varepsilon}} \, (w_e + 1)

    Parameters
    ----------
    x, out
        As in `rmsnorm`; so are the result and the errors.
    weight : array of float32, shape (E,) or, for three axes, (H, E)
        Scale for each column, minus one, as Gemma's checkpoints store it.  GGUF files hold the
        sum; use `rmsnorm` for them.
    eps : float
        As in `rmsnorm`; Gemma uses 1e-6.

    See Also
    --------
    nbflow_kernels.rmsnorm : The same with ``offset=1.0``, bit for bit.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gemma_rmsnorm
    >>> gemma_rmsnorm(np.array([[3.0, 4.0]], np.float32), np.zeros(2, np.float32), 0.0).round(3)
    array([[0.849, 1.131]], dtype=float32)
    """
    return rmsnorm(x, weight, eps, out, offset=1.0)


def layernorm(
    x: NDArray[np.float32],
    weight: NDArray[np.float32] | None,
    bias: NDArray[np.float32] | None = None,
    eps: float = 1e-6,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Subtract each vector's mean, divide by its standard deviation, scale and shift.

    .. math:: y_{te} = \frac{x_{te} - \mu_t}{\sqrt{\sigma_t^2 + \varepsilon}} \, w_e + b_e

    Parameters
    ----------
    x, weight, out
        As in `rmsnorm`; so are the result and the errors.
    bias : array of float32, shape as for `weight`, optional
        Shift for each column; none is a shift of zero.
    eps : float
        Added to the variance (the mean of squares, not divided by E - 1) before the root.
        FlashInfer's default is 1e-6, PyTorch's 1e-5.

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
    check_vectors("x", x)
    check_columns("weight", weight, x)
    check_columns("bias", bias, x)
    out = output(x, x.shape, out, rows=True)
    _variant(x).layernorm(x, weight, bias, float(eps), out)
    return out


def fused_add_rmsnorm(
    x: NDArray[np.float32],
    residual: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
) -> None:
    """Add `x` to the residual, then put the normalized residual into `x`; both in place.

    Parameters
    ----------
    x : array of float32, shape (T, E) or (T, H, E)
        Output of the previous layer; becomes ``rmsnorm(residual + x)``.
    residual : array of float32, shape of `x`
        The residual stream; becomes ``residual + x``.
    weight, eps, offset
        As in `rmsnorm`; so are the errors.

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
    check_vectors("x", x)
    check_array("residual", residual, x.shape, rows=True)
    check_columns("weight", weight, x)
    _variant(x).rmsnorm(x, weight, float(eps), float(offset), x, residual=residual)


def gemma_fused_add_rmsnorm(
    x: NDArray[np.float32],
    residual: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: float = 1e-6,
) -> None:
    """Add `x` to the residual, then put the residual's `gemma_rmsnorm` into `x`; both in place.

    Parameters
    ----------
    x, residual
        As in `fused_add_rmsnorm`; so are the errors.
    weight, eps
        As in `gemma_rmsnorm`.

    See Also
    --------
    nbflow_kernels.fused_add_rmsnorm : The same with ``offset=1.0``, bit for bit.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gemma_fused_add_rmsnorm
    >>> x, residual = np.array([[1.0, 2.0]], np.float32), np.array([[2.0, 2.0]], np.float32)
    >>> gemma_fused_add_rmsnorm(x, residual, np.zeros(2, np.float32), eps=0.0)
    >>> x.round(3)
    array([[0.849, 1.131]], dtype=float32)
    """
    fused_add_rmsnorm(x, residual, weight, eps, offset=1.0)


def fused_add_layernorm(
    x: NDArray[np.float32],
    residual: NDArray[np.float32],
    weight: NDArray[np.float32] | None,
    bias: NDArray[np.float32] | None = None,
    eps: float = 1e-6,
) -> None:
    """Add `x` to the residual, then put the residual's layer norm into `x`; both in place.

    Parameters
    ----------
    x, residual
        As in `fused_add_rmsnorm`; so are the errors.
    weight, bias, eps
        As in `layernorm`.

    See Also
    --------
    nbflow_kernels.layernorm : The same without the addition; bitwise equal to it after one.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import fused_add_layernorm
    >>> x, residual = np.array([[1.0, 2.0]], np.float32), np.array([[2.0, 3.0]], np.float32)
    >>> fused_add_layernorm(x, residual, np.ones(2, np.float32), eps=0.0)
    >>> residual
    array([[3., 5.]], dtype=float32)
    >>> x
    array([[-1.,  1.]], dtype=float32)
    """
    check_vectors("x", x)
    check_array("residual", residual, x.shape, rows=True)
    check_columns("weight", weight, x)
    check_columns("bias", bias, x)
    _variant(x).layernorm(x, weight, bias, float(eps), x, residual=residual)


def l2norm(
    x: NDArray[np.float32], eps: float = 1e-6, out: NDArray[np.float32] | None = None
) -> Any:
    r"""Divide each vector by its length.

    .. math:: y_{te} = \frac{x_{te}}{\sqrt{\sum_j x_{tj}^2 + \varepsilon}}

    Parameters
    ----------
    x, out
        As in `rmsnorm`; so are the result and the errors.
    eps : float
        Added to the sum of squares before the root, in the units of ``x ** 2``.

    Notes
    -----
    The form with eps under the root is that of the linear-attention models (queries and keys of
    Qwen3-Next).  PyTorch's ``normalize`` divides by ``max(length, 1e-12)`` instead: the same for
    every vector longer than 1e-6 with ``eps=1e-24``, and for a vector of zeros.  Baichuan2 divides
    the rows of its output matrix that way.  The "L2 norm" of queries and keys in
    Llama 4 is `rmsnorm` without a weight.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import l2norm
    >>> l2norm(np.array([[3.0, 4.0]], np.float32), eps=0.0)
    array([[0.6, 0.8]], dtype=float32)
    """
    check_vectors("x", x)
    out = output(x, x.shape, out, rows=True)
    _variant(x).rmsnorm(x, None, float(eps), 0.0, out, divisor=1.0)
    return out


def linear_norm(
    x: NDArray[np.float32],
    scale: float | None = None,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Multiply all vectors by one number: the root of their length unless given.

    .. math:: y_{te} = x_{te} \, s, \qquad s = \sqrt{E} \text{ by default}

    Parameters
    ----------
    x, out
        As in `rmsnorm`; so are the result and the errors.
    scale : float, optional
        The factor; the square root of E unless given.

    See Also
    --------
    nbflow_kernels.embedding : Has a `scale` argument, which most models use.

    Notes
    -----
    Inferflow calls this step a norm and lets a specification put it after the embedding (the
    original Transformer, Gemma and M2M-100 multiply embeddings by the root of their size; MiniCPM
    by 12); it takes a scale up to 1e-4 as "not given".

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import linear_norm
    >>> linear_norm(np.array([[1.0, 2.0, 3.0, 4.0]], np.float32))
    array([[2., 4., 6., 8.]], dtype=float32)
    """
    check_vectors("x", x)
    out = output(x, x.shape, out, rows=True)
    factor = math.sqrt(x.shape[-1]) if scale is None else float(scale)
    _variant(x).linear_norm(x, factor, out)
    return out


def _variant(x):
    return cuda if is_cuda(x) else cpu
