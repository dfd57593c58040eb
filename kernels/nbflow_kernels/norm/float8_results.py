"""Norms whose results are float8 codes: the norm, a division by a scale, one rounding.

The results are those of the norms in float32, bit for bit, before they are encoded; they do not go
through memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_writable, is_cuda
from nbflow_kernels.formats.float8 import (
    FLOAT8,
    Float8Codec,
    float8_codes,
    float8_format,
    number_of,
)
from nbflow_kernels.norm import cpu, cuda
from nbflow_kernels.norm.arguments import check_columns, check_vectors


def rmsnorm_quant(
    out: Any,
    x: NDArray[np.float32],
    weight: NDArray[np.float32] | None,
    scale: Any,
    eps: float = 1e-6,
    *,
    out_format: str | None = None,
) -> None:
    r"""Write ``rmsnorm(x, weight, eps) / scale`` in float8.

    Parameters
    ----------
    out : array of float8, shape of `x`
        Output array: uint8 codes with `out_format`, or a dtype float8_e4m3fn or float8_e5m2 of a
        package that has them (PyTorch, ml_dtypes).  Rows may be strided.
    x, weight, eps
        As in `rmsnorm`; so are the errors.
    scale : float or array of one number
        Positive divisor of the results: ``out * scale`` is the norm again.  An array on a device is
        copied to the host.
    out_format : {"f8_e4m3", "f8_e5m2"}, optional
        Format of `out`; by default that of its dtype.

    Raises
    ------
    UsageError
        If `scale` is not positive, or neither `out` nor `out_format` names a format.

    Notes
    -----
    FlashInfer's argument order.  The division is a multiplication by the float32 nearest to
    ``1 / scale``.  Numbers are rounded to nearest even; beyond the largest number (448; 57344) they
    become the largest one; NaN stays NaN.

    References
    ----------
    .. [1] P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import rmsnorm_quant
    >>> x, codes = np.array([[3.0, 4.0]], np.float32), np.zeros((1, 2), np.uint8)
    >>> rmsnorm_quant(codes, x, None, 0.01, 0.0, out_format="f8_e4m3")
    >>> codes  # of 88 and 112, for 84.9 and 113.1
    array([[107, 110]], dtype=uint8)
    """
    check_vectors("x", x)
    check_columns("weight", weight, x)
    codes, codec = _codes(out, x, scale, out_format)
    _variant(x).rmsnorm(x, weight, float(eps), 0.0, codes, codec=codec)


def fused_add_rmsnorm_quant(
    out: Any,
    x: NDArray[np.float32],
    residual: NDArray[np.float32],
    weight: NDArray[np.float32] | None,
    scale: Any,
    eps: float = 1e-6,
    *,
    out_format: str | None = None,
) -> None:
    """Add `x` to the residual in place, and write the normalized residual in float8.

    Parameters
    ----------
    out, weight, scale, eps, out_format
        As in `rmsnorm_quant`; so are the errors.
    x : array of float32, shape (T, E) or (T, H, E)
        Output of the previous layer; not changed.
    residual : array of float32, shape of `x`
        The residual stream; becomes ``residual + x``.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import fused_add_rmsnorm_quant
    >>> x, residual = np.array([[1.0, 2.0]], np.float32), np.array([[2.0, 2.0]], np.float32)
    >>> codes = np.zeros((1, 2), np.uint8)
    >>> fused_add_rmsnorm_quant(codes, x, residual, None, 0.01, 0.0, out_format="f8_e4m3")
    >>> codes, residual
    (array([[107, 110]], dtype=uint8), array([[3., 4.]], dtype=float32))
    """
    check_vectors("x", x)
    check_array("residual", residual, x.shape, rows=True)
    check_columns("weight", weight, x)
    codes, codec = _codes(out, x, scale, out_format)
    _variant(x).rmsnorm(x, weight, float(eps), 0.0, codes, residual=residual, codec=codec)


def layernorm_quant(
    out: Any,
    x: NDArray[np.float32],
    weight: NDArray[np.float32] | None,
    bias: NDArray[np.float32] | None,
    scale: Any,
    eps: float = 1e-6,
    *,
    out_format: str | None = None,
) -> None:
    """Write ``layernorm(x, weight, bias, eps) / scale`` in float8.

    Parameters
    ----------
    out, scale, out_format
        As in `rmsnorm_quant`; so are the errors.
    x, weight, bias, eps
        As in `layernorm`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import layernorm_quant
    >>> codes = np.zeros((1, 2), np.uint8)
    >>> x = np.array([[1.0, 3.0]], np.float32)
    >>> layernorm_quant(codes, x, None, None, 1.0, 0.0, out_format="f8_e4m3")
    >>> codes  # of -1 and 1
    array([[184,  56]], dtype=uint8)
    """
    check_vectors("x", x)
    check_columns("weight", weight, x)
    check_columns("bias", bias, x)
    codes, codec = _codes(out, x, scale, out_format)
    _variant(x).layernorm(x, weight, bias, float(eps), codes, codec=codec)


def _codes(out: Any, x: Any, scale: Any, out_format: str | None) -> tuple[Any, Float8Codec]:
    """Return the checked codes of `out`, and their type with the factor 1 / scale."""
    name = float8_format(out_format, out)
    codes = float8_codes("out", out, x.shape, rows=True)
    check_writable("out", codes)
    return codes, Float8Codec(FLOAT8[name], float(np.float32(1.0 / number_of("scale", scale))))


def _variant(x: Any) -> Any:
    return cuda if is_cuda(x) else cpu
