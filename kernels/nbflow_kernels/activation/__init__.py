"""Elementwise and gated (GLU) activations.

In feed-forward layers and the ops named ``*_and_mul`` the gate comes first: the activation is
applied to columns [0, I) and multiplied by columns [I, 2 * I).  PyTorch's ``glu`` has the gate
second, which is the default of `glu`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.activation import cpu, cuda
from nbflow_kernels.activation.xielu import xielu
from nbflow_kernels.arrays import check_array, is_cuda, output
from nbflow_kernels.errors import UsageError, unknown_name

__all__ = [
    "gelu", "gelu_and_mul", "gelu_quick", "gelu_quick_and_mul", "gelu_tanh", "gelu_tanh_and_mul",
    "glu", "relu", "relu2", "relu2_and_mul", "relu_and_mul", "sigmoid", "sigmoid_and_mul", "silu",
    "silu_and_mul", "swigluoai_and_mul", "xielu",
]  # fmt: skip


class Activation(Protocol):
    """Signature of the functions generated from the table."""

    def __call__(self, x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
        """Apply the function; `out` if given, else a new array on the device of `x`."""


class _Row(NamedTuple):
    summary: str
    formula: str
    result: str
    """Printed result for -1, 0 and 2."""
    name: str
    """Name of the function in the docstring of the gated form."""
    gated_result: str
    """Printed result for the gate 2, -1 and the factors 3, 5."""
    reference: str = ""
    note: str = ""


_TAIL_NOTE = "        -infinity gives NaN, as in PyTorch; large negative numbers give 0.\n"
_GELU_PAPER = 'D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv:1606.08415'
_TABLE = {
    "silu": _Row(
        "Multiply each element by its logistic function (also called swish).",
        r"y = \frac{x}{1 + e^{-x}}", "[-0.2689,  0.    ,  1.7616]",
        "SiLU", "[[ 5.2848, -1.3447]]",
        'S. Elfwing, E. Uchibe and K. Doya, "Sigmoid-Weighted Linear Units for Neural Network\n'
        '       Function Approximation in Reinforcement Learning", arXiv:1702.03118.',
        _TAIL_NOTE,
    ),
    "gelu": _Row(
        "Multiply each element by its normal distribution function.",
        r"y = x \, \Phi(x) = \frac{x}{2} \left( 1 + \operatorname{erf}(x / \sqrt 2) \right)",
        "[-0.1587,  0.    ,  1.9545]", "GELU", "[[ 5.8635, -0.7933]]",
        f"{_GELU_PAPER},\n       the exact form.", _TAIL_NOTE,
    ),
    "gelu_tanh": _Row(
        "Approximate `gelu` by a hyperbolic tangent, as GPT-2 and Gemma do.",
        r"y = \frac{x}{2} \left( 1 + \tanh u \right), "
        r"\qquad u = \sqrt{2 / \pi} \, (x + 0.044715 x^3)",
        "[-0.1588,  0.    ,  1.9546]", "GELU's tanh form", "[[ 5.8638, -0.794 ]]",
        f"{_GELU_PAPER},\n       section 2.", _TAIL_NOTE,
    ),
    "gelu_quick": _Row(
        "Approximate `gelu` by a logistic function, as CLIP does.",
        r"y = \frac{x}{1 + e^{-1.702 x}}", "[-0.1542,  0.    ,  1.9357]",
        "quick GELU", "[[ 5.807, -0.771]]", f"{_GELU_PAPER},\n       section 2.", _TAIL_NOTE,
    ),
    "relu": _Row(
        "Replace negative elements by zero; NaN stays NaN.",
        r"y = \max(x, 0)", "[0., 0., 2.]", "ReLU", "[[6., 0.]]",
    ),
    "relu2": _Row(
        "Replace negative elements by zero and square the others; NaN stays NaN.",
        r"y = \max(x, 0)^2", "[0., 0., 4.]", "squared ReLU", "[[12.,  0.]]",
        'D. So et al., "Primer: Searching for Efficient Transformers for Language Modeling",\n'
        "       arXiv:2109.08668, section 3.1.",
    ),
    "sigmoid": _Row(
        "Return the logistic function of each element.",
        r"y = \frac{1}{1 + e^{-x}}", "[0.2689, 0.5   , 0.8808]",
        "the logistic function", "[[2.6424, 1.3447]]",
        note="        The error is at most 4e-38 where the result is below 1e-38.\n",
    ),
}  # fmt: skip

_DOC = r"""SUMMARY

    .. math:: FORMULA

    Parameters
    ----------
    x : array of float32, any shape of one or more axes
        Input.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    out : array of float32, shape of `x`, optional
        Output array.  It may be `x` itself.

    Returns
    -------
    array of float32, shape of `x`
        `out` if given, else a new array on the device of `x`.
NOTE
    Raises
    ------
    UsageError
        If `out` does not have the shape of `x`, or an array is not C-contiguous.
    TypeError
        If `x` or `out` is not a float32 array.

    See Also
    --------
    nbflow_kernels.NAME_and_mul : The gated form.
REFERENCE
    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import NAME
    >>> NAME(np.array([-1.0, 0.0, 2.0], np.float32)).round(4)
    array(RESULT, dtype=float32)
    """
_GATED_DOC = r"""Multiply FUNCTION of the first half of the columns by the second half.

    .. math:: y_{ti} = \operatorname{ESCAPED}(x_{ti}) \, x_{t,I+i}

    Parameters
    ----------
    x : array of float32, shape (..., 2 * I)
        Gate in columns [0, I), up projection in columns [I, 2 * I).
    out : array of float32, shape (..., I), optional
        Output array; it must not overlap `x`.

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
    nbflow_kernels.NAME : The activation alone.

    References
    ----------
    .. [1] N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import NAME_and_mul
    >>> NAME_and_mul(np.array([[2.0, -1.0, 3.0, 5.0]], np.float32)).round(4)
    array(RESULT, dtype=float32)
    """


def _named(function: Any, name: str, doc: str, **words: str) -> Activation:
    """Set a function's name and its docstring, with the capital words replaced."""
    for word, text in {**words, "NAME": name.removesuffix("_and_mul")}.items():
        doc = doc.replace(word, text)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function  # type: ignore[no-any-return]


def _elementwise(name: str) -> Activation:
    """Return the element-wise op of a row of the table."""

    def apply(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
        check_array("x", x, (None,) * max(1, getattr(x, "ndim", 1)))
        out = output(x, x.shape, out)
        if x.size:
            rows = (-1, x.shape[-1])
            (cuda if is_cuda(x) else cpu).elementwise(x.reshape(rows), name, out.reshape(rows))
        return out

    row = _TABLE[name]
    source = (
        f"\n    References\n    ----------\n    .. [1] {row.reference}\n" if row.reference else ""
    )
    return _named(
        apply, name, _DOC, SUMMARY=row.summary, FORMULA=row.formula, RESULT=row.result,
        REFERENCE=source, NOTE=row.note,
    )  # fmt: skip


def _and_mul(name: str) -> Activation:
    """Return the gated op of a row of the table."""

    def apply(x: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Any:
        variant, rows, out_rows, out = _halves(x, out)
        variant.glu(rows, name, True, out_rows)
        return out

    row, escaped = _TABLE[name], name.replace("_", r"\_")
    words = {"FUNCTION": row.name, "ESCAPED": escaped, "RESULT": row.gated_result}
    return _named(apply, f"{name}_and_mul", _GATED_DOC, **words)


def _halves(x: Any, out: Any) -> tuple[Any, Any, Any, Any]:
    """Check the arguments; return the variant, `x` and `out` as matrices, and the result array."""
    ndim = max(1, getattr(x, "ndim", 1))
    check_array("x", x, (None,) * ndim)
    columns = x.shape[-1]
    if columns % 2:
        raise UsageError(f"x must have shape (..., 2 * I), gate and up columns, got {x.shape}")
    out = output(x, (*x.shape[:-1], columns // 2), out)
    variant = cuda if is_cuda(x) else cpu
    if ndim == 2:
        return variant, x, out, out
    rows = x.size // columns if columns else 0
    return variant, x.reshape(rows, columns), out.reshape(rows, columns // 2), out


silu = _elementwise("silu")
gelu = _elementwise("gelu")
gelu_tanh = _elementwise("gelu_tanh")
gelu_quick = _elementwise("gelu_quick")
relu = _elementwise("relu")
relu2 = _elementwise("relu2")
sigmoid = _elementwise("sigmoid")
silu_and_mul = _and_mul("silu")
gelu_and_mul = _and_mul("gelu")
gelu_tanh_and_mul = _and_mul("gelu_tanh")
gelu_quick_and_mul = _and_mul("gelu_quick")
relu_and_mul = _and_mul("relu")
relu2_and_mul = _and_mul("relu2")
sigmoid_and_mul = _and_mul("sigmoid")


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
        The two halves.
    activation : str
        f: ``sigmoid`` (the original gated linear unit), ``silu``, ``gelu``, ``gelu_tanh``,
        ``gelu_quick``, ``relu`` or ``relu2``.
    gate_first : bool
        False: f of the second half, PyTorch's convention.  True: f of the first half, the
        convention of feed-forward layers and of the ops named ``*_and_mul``.
    out : array of float32, shape (..., I), optional
        Output array; it must not overlap `x`.

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
        Clamping limit L; positive, infinity for no limit.
    interleaved : bool
        True: gate in the even columns, up in the odd ones, as gpt-oss stores its weights.
        False: gate in columns [0, I), up in columns [I, 2 * I).
    out
        As in `glu`; so are the result and the errors.

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
