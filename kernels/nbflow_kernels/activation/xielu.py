"""xIELU, an activation with learned parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.activation import cpu_xielu, cuda
from nbflow_kernels.arrays import check_array, is_cuda, output


def xielu_numbers(
    alpha_p: NDArray[Any], alpha_n: NDArray[Any], beta: NDArray[Any], eps: NDArray[Any]
) -> tuple[float, float, float, float]:
    """Return the arguments of `xielu` of the numbers that a checkpoint stores, arrays of one."""
    p, n, b, e = (float(number.item()) for number in (alpha_p, alpha_n, beta, eps))
    return float(np.logaddexp(0.0, p)), b + float(np.logaddexp(0.0, n)), b, e


def xielu(
    x: NDArray[np.float32],
    alpha_p: float,
    alpha_n: float,
    *,
    beta: float = 0.5,
    eps: float = -1e-6,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Apply the expanded integral of the exponential linear unit.

    .. math:: y = \alpha_p x^2 + \beta x \;\; (x > 0), \qquad
        y = \alpha_n (e^{\min(x, \varepsilon)} - 1 - x) + \beta x \;\; (x \le 0)

    Parameters
    ----------
    x : array of float32, any shape of one or more axes
        Input.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    alpha_p, alpha_n : float
        The layer's parameters, as the formula has them: for the numbers of a checkpoint
        ``softplus(alpha_p)`` and ``beta + softplus(alpha_n)``.
    beta : float
        Slope at 0.
    eps : float
        Upper limit of the exponent, a negative number near 0.
    out : array of float32, shape of `x`, optional
        Output array.  It may be `x` itself.

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

    Notes
    -----
    Apertus uses it, without a gate.

    References
    ----------
    .. [1] A. Huang and I. Schlag, "Deriving Activation Functions Using Integration",
       arXiv:2411.13010, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import xielu
    >>> xielu(np.array([-1.0, 2.0], np.float32), 0.8, 0.8).round(4)
    array([-0.2057,  4.2   ], dtype=float32)
    """
    check_array("x", x, (None,) * max(1, getattr(x, "ndim", 1)))
    out = output(x, x.shape, out)
    if x.size:
        rows = (-1, x.shape[-1])
        numbers = (float(alpha_p), float(alpha_n), float(beta), float(eps))
        (cuda if is_cuda(x) else cpu_xielu).xielu(x.reshape(rows), *numbers, out.reshape(rows))
    return out
