"""Ops on rows by their statistics: sparse activations, and rows as large as other ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_together, is_cuda, output, output_array
from nbflow_kernels.errors import UsageError
from nbflow_kernels.row_statistics import cpu, cuda

__all__ = ["gaussian_topk", "match_rms", "row_moments"]


def match_rms(
    x: NDArray[np.float32],
    like: NDArray[np.float32],
    least: float = 1e-5,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Scale each row to the root mean square of a row of another array.

    .. math:: y_t = x_t \sqrt{\frac{\operatorname{mean}(z_t^2)}
        {\max(\operatorname{mean}(x_t^2), \varepsilon)}}

    Parameters
    ----------
    x : array of float32, shape (T, E)
        Input; rows may be strided (a slice of columns of a wider matrix).  A NumPy array runs on
        the CPU; an array on a CUDA device runs there.
    like : array of float32, shape (T, E)
        z; rows may be strided.
    least : float
        Least mean square of a row of `x`, in the units of ``x ** 2``; positive.
    out : array of float32, shape (T, E), optional
        Output array.  It may be `x` itself.

    Returns
    -------
    array of float32, shape (T, E)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If the shapes differ, or `least` is not positive.
    TypeError
        If an array is not of float32.

    See Also
    --------
    nbflow_kernels.rmsnorm : For rows of the root mean square 1.

    References
    ----------
    .. [1] C. Baykal et al., "Alternating Updates for Efficient Transformers", arXiv:2301.13310; the
       projections of Gemma 3n's residual streams are scaled so.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import match_rms
    >>> match_rms(np.array([[3.0, -4.0]], np.float32), np.array([[1.0, 7.0]], np.float32)).round(3)
    array([[ 4.243, -5.657]], dtype=float32)
    """
    check_together(x=x, like=like, out=out)
    check_array("x", x, (None, None), rows=True)
    check_array("like", like, x.shape, rows=True)
    if not (least > 0 and math.isfinite(least)):
        raise UsageError(f"least must be positive, got {least}")
    out = output(x, x.shape, out, rows=True)
    if x.size:
        (cuda if is_cuda(x) else cpu).match_rms(x, like, float(least), out)
    return out


def row_moments(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
    r"""Return the sum and the sum of squares of each row.

    .. math:: y_t = \left( \sum_i x_{ti}, \sum_i x_{ti}^2 \right)

    Parameters
    ----------
    x : array of float32, shape (T, I)
        Input; rows may be strided.  A NumPy array runs on the CPU; an array on a CUDA device runs
        there.
    out : array of float32, shape (T, 2), optional
        Output array.

    Returns
    -------
    array of float32, shape (T, 2)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If a shape does not fit.
    TypeError
        If an array is not of float32.

    See Also
    --------
    nbflow_kernels.gaussian_topk : For the use of the sums.

    Notes
    -----
    The moments of a row whose columns several ranks hold are the sums of those of its shards.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import row_moments
    >>> row_moments(np.array([[1.0, 2.0, -4.0]], np.float32))
    array([[-1., 21.]], dtype=float32)
    """
    check_together(x=x, out=out)
    check_array("x", x, (None, None), rows=True)
    out = output_array(x, (len(x), 2), out)
    if len(x):
        (cuda if is_cuda(x) else cpu).row_moments(x, out)
    return out


def gaussian_topk(
    x: NDArray[np.float32],
    deviations: float,
    out: NDArray[np.float32] | None = None,
    *,
    moments: NDArray[np.float32] | None = None,
    width: int | None = None,
) -> Any:
    r"""Keep what exceeds a quantile of a normal distribution fitted to each row.

    .. math:: y_{ti} = \max(0, x_{ti} - \mu_t - d \, \sigma_t)

    with the mean and the standard deviation of the row.  With d the quantile of a share s, about
    that share of the elements becomes zero, without a sort.

    Parameters
    ----------
    x : array of float32, shape (T, I)
        Input; rows may be strided.  A NumPy array runs on the CPU; an array on a CUDA device runs
        there.
    deviations : float
        d, in standard deviations: 1.645 for 95 % zeros.
    out : array of float32, shape (T, I), optional
        Output array; rows may be strided.  It may be `x` itself.
    moments : array of float32, shape (T, 2), optional
        Sums and sums of squares of whole rows, of which `x` is a shard; `row_moments` of `x` by
        default.
    width : int, optional
        Columns of whole rows, with `moments`; I by default.

    Returns
    -------
    array of float32, shape (T, I)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If a shape does not fit, or `deviations` is not finite.
    TypeError
        If an array is not of float32.

    See Also
    --------
    nbflow_kernels.row_moments : For the sums of shards.

    Notes
    -----
    The variance is the mean square minus the square of the mean, in float64 from float32 sums: its
    error is 2**-24 of the mean square.

    References
    ----------
    .. [1] Gemma 3n (Google, 2025); statistical top-k of C. You et al., "Spark Transformer",
       arXiv:2506.06644, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gaussian_topk
    >>> gaussian_topk(np.array([[0.0, 1.0, 2.0, 5.0]], np.float32), 0.5).round(3)
    array([[0.   , 0.   , 0.   , 2.065]], dtype=float32)
    """
    check_together(x=x, moments=moments, out=out)
    check_array("x", x, (None, None), rows=True)
    if not math.isfinite(deviations):
        raise UsageError(f"deviations must be finite, got {deviations}")
    if moments is not None:
        check_array("moments", moments, (len(x), 2))
    columns = x.shape[1] if width is None else int(width)
    if columns < x.shape[1] or (width is not None and moments is None):
        raise UsageError(
            f"width must be at least the {x.shape[1]} columns of x, and goes with moments, got "
            f"{width}"
        )
    variant: Any = cuda if is_cuda(x) else cpu
    if out is not x:
        out = output_array(x, x.shape, out, rows=True)
    if x.size:
        sums = row_moments(x) if moments is None else moments
        variant.gaussian_topk(x, sums, columns, float(deviations), out)
    return out
