"""RMS norm of groups of columns with a gate, as state-space and linear-attention layers end."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_together, is_cuda, output
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.norm import cpu_gated, cuda


def gated_rmsnorm(
    x: NDArray[np.float32],
    gate: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: float = 1e-6,
    out: NDArray[np.float32] | None = None,
    *,
    group_size: int | None = None,
    gate_first: bool = False,
    activation: str = "silu",
) -> Any:
    r"""Divide each group of columns by its root mean square, scale it, and apply a gate.

    .. math::
        y = \frac{x}{\operatorname{rms}(x)} \, w \, f(g) \quad \text{or, gate first,} \quad
        y = \frac{x f(g)}{\operatorname{rms}(x f(g))} \, w

    with rms over the columns of a group, :math:`\sqrt{\operatorname{mean}(x^2) + \varepsilon}`.

    Parameters
    ----------
    x : array of float32, shape (T, C)
        Input.  Rows may be strided (a slice of columns of a wider matrix).  A NumPy array runs on
        the CPU; an array on a CUDA device runs there.
    gate : array of float32, shape (T, C)
        Gate g before its activation; rows may be strided.
    weight : array of float32, shape (C,) or (group_size,)
        Scale for each column, or for each column of a group, the same for all groups.
    eps : float
        Added to the mean square before the root, in the units of ``x ** 2``.
    out : array of float32, shape (T, C), optional
        Output array.  It may be `x` or `gate` itself.
    group_size : int, optional
        Columns normalized together, a divisor of C; all C unless given.
    gate_first : bool
        True: the gated vector is normalized (Mamba-2, Nemotron-H, Granite 4, Bamba, Zamba2).
        False: the gate is applied to the normalized vector (``norm_before_gate`` of the authors'
        code; Qwen3-Next, with a group per head).
    activation : str
        f: ``silu`` or ``sigmoid`` (Kimi Linear).

    Returns
    -------
    array of float32, shape (T, C)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If a shape does not fit, `group_size` does not divide C, or the activation is unknown.
    TypeError
        If an array is not float32.

    Notes
    -----
    The sum is taken in float32, in an order that depends on `group_size` alone.

    References
    ----------
    .. [1] T. Dao and A. Gu, "Transformers are SSMs", arXiv:2405.21060, section 7; the order of gate
       and norm is that of the authors' code.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import gated_rmsnorm
    >>> x, gate = np.array([[3.0, 4.0]], np.float32), np.array([[0.0, 2.0]], np.float32)
    >>> gated_rmsnorm(x, gate, np.ones(2, np.float32), 0.0).round(3)
    array([[0.   , 1.993]], dtype=float32)
    >>> gated_rmsnorm(x, gate, np.ones(2, np.float32), 0.0, gate_first=True).round(3)
    array([[0.   , 1.414]], dtype=float32)
    """
    check_array("x", x, (None, None), rows=True)
    check_array("gate", gate, x.shape, rows=True)
    C = x.shape[1]
    size = C if group_size is None else int(group_size)
    if C and (size < 1 or C % size):
        raise UsageError(f"group_size must divide the {C} columns of x, got {group_size}")
    per_group = getattr(weight, "shape", None) == (size,)
    check_array("weight", weight, (size if per_group else C,))
    check_together(x=x, gate=gate, weight=weight)
    if activation not in cpu_gated.ACTIVATIONS:
        raise unknown_name("activation", activation, cpu_gated.ACTIVATIONS)
    out = output(x, x.shape, out, rows=True)
    if x.size:
        (cuda if is_cuda(x) else cpu_gated).gated_rmsnorm(
            x, gate, weight, float(eps), size, bool(gate_first), activation, out
        )
    return out
