"""Log-probabilities, KL divergence, soft capping and masked softmax of logits.

Rows are float32 and their exponentials too; sums over a row are float64, and results that are one
number for a row are float64.  Sampling, and the plain softmax it starts from, is in
`nbflow_kernels.sampling`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import (
    check_array,
    check_ids,
    check_rows,
    empty,
    is_cuda,
    output,
    temperatures,
)
from nbflow_kernels.errors import UsageError
from nbflow_kernels.logits import cpu, cuda

__all__ = [
    "kl_divergence", "log_softmax", "masked_softmax", "soft_cap", "token_log_probs",
    "top1_agreement",
]  # fmt: skip


def soft_cap(
    logits: NDArray[np.float32], cap: float, out: NDArray[np.float32] | None = None
) -> Any:
    r"""Bring logits smoothly between -cap and cap.

    .. math:: y = C \tanh(x / C)

    Parameters
    ----------
    logits : array of float32, any shape of one or more axes
        Logits, or attention scores.
    cap : float
        C, positive: 30 for Gemma 2's logits, 50 for its attention scores.
    out : array of float32, shape of `logits`, optional
        Output array.  It may be `logits` itself.

    Returns
    -------
    array of float32, shape of `logits`
        `out` if given, else a new array on the device of `logits`.  An excluded token (-inf)
        becomes -C: exclude tokens after capping.

    Raises
    ------
    UsageError
        If `cap` is not positive, or `out` has another shape.
    TypeError
        If an array is not of float32.

    References
    ----------
    .. [1] Gemma Team, "Gemma 2", arXiv:2408.00118, section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import soft_cap
    >>> soft_cap(np.array([0.0, 30.0, 1000.0], np.float32), 30.0).round(3)
    array([ 0.   , 22.848, 30.   ], dtype=float32)
    """
    check_array("logits", logits, (None,) * max(1, getattr(logits, "ndim", 1)))
    if not (cap > 0 and np.isfinite(cap)):
        raise UsageError(f"cap must be positive, got {cap}")
    out = output(logits, logits.shape, out)
    (cuda if is_cuda(logits) else cpu).soft_cap(logits, float(cap), out)
    return out


def log_softmax(
    logits: NDArray[np.float32],
    temperature: Any = None,
    logits_soft_cap: float | None = None,
    *,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Return the logarithms of the probabilities of logits.

    .. math:: y_{bv} = z_{bv} - \ln \sum_w e^{z_{bw}}, \qquad
        z_{bv} = \frac{C \tanh(x_{bv} / C)}{T_b}

    Parameters
    ----------
    logits : array of float32, shape (B, V)
        One row per token; -inf excludes a token of the vocabulary.
    temperature : float or array, shape (B,), optional
        T: capped logits are divided by it; positive.
    logits_soft_cap : float, optional
        C; None or 0 for no cap, which leaves x as it is.
    out : array of float32, shape (B, V), optional
        Output array; it may be `logits` itself.

    Returns
    -------
    array of float32, shape (B, V)
        Natural logarithms.  A row with a NaN or +inf, or with nothing above -inf, becomes NaN.

    Raises
    ------
    UsageError
        If a shape does not fit, a temperature is not positive or a cap negative.
    TypeError
        If `logits` is not an array of float32.

    See Also
    --------
    nbflow_kernels.token_log_probs : The numbers for given tokens, without this table.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import log_softmax
    >>> log_softmax(np.array([[0.0, 0.0, -np.inf]], np.float32)).round(4)
    array([[-0.6931, -0.6931,    -inf]], dtype=float32)
    """
    check_rows("logits", logits)
    scale, cap = temperatures(temperature, len(logits)), _cap(logits_soft_cap)
    out = output(logits, logits.shape, out)
    (cuda if is_cuda(logits) else cpu).log_softmax(logits, scale, cap, out)
    return out


def token_log_probs(
    logits: NDArray[np.float32],
    ids: NDArray[np.int32],
    temperature: Any = None,
    logits_soft_cap: float | None = None,
) -> Any:
    r"""Return the log-probabilities of given tokens, without making those of all others.

    .. math:: y_b = z_{b,i_b} - \ln \sum_w e^{z_{bw}}, \qquad
        z_{bv} = \frac{C \tanh(x_{bv} / C)}{T_b}

    The mean of ``-y`` over the tokens of a text is its cross entropy; e to that its perplexity.

    Parameters
    ----------
    logits, temperature, logits_soft_cap
        As in `log_softmax`; so are the errors.
    ids : array of int32, shape (B,) or (B, K)
        The tokens to look up in each row, 0..V - 1.

    Returns
    -------
    array of float64, shape of `ids`
        Natural logarithms; NaN for a row with a NaN or +inf, or with nothing above -inf.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import token_log_probs
    >>> logits = np.log(np.array([[1.0, 3.0], [1.0, 1.0]], np.float32))
    >>> token_log_probs(logits, np.array([1, 0], np.int32)).round(4)
    array([-0.2877, -0.6931])
    """
    check_rows("logits", logits)
    B, V = logits.shape
    check_array("ids", ids, (B, None) if getattr(ids, "ndim", 1) == 2 else (B,), np.int32)
    check_ids("ids", ids, V, "the columns of logits")
    scale, cap = temperatures(temperature, B), _cap(logits_soft_cap)
    out = empty(logits, ids.shape, np.float64)
    variant = cuda if is_cuda(logits) else cpu
    columns = (B, ids.size // B if B else 0)
    variant.token_log_probs(logits, ids.reshape(columns), scale, cap, out.reshape(columns))
    return out


def kl_divergence(logits_p: NDArray[np.float32], logits_q: NDArray[np.float32]) -> Any:
    r"""Return how far the distributions of one set of logits are from those of another.

    .. math:: D_b = \sum_v p_{bv} \ln \frac{p_{bv}}{q_{bv}}, \qquad
        p = \operatorname{softmax}(x), \; q = \operatorname{softmax}(y)

    Parameters
    ----------
    logits_p : array of float32, shape (B, V)
        Logits of the model that is right by definition; log-probabilities are logits too.
    logits_q : array of float32, shape (B, V)
        Logits of the model that is judged, e.g. the quantized one.

    Returns
    -------
    array of float64, shape (B,)
        Nats, not negative.  Infinite where q is -inf and p is not; NaN for a row with
        a NaN or +inf, or with nothing above -inf.  Equal rows give exactly 0.

    Raises
    ------
    UsageError
        If the shapes differ.
    TypeError
        If an array is not of float32.

    Notes
    -----
    Good to about 1e-6 nats: exponentials are float32, and a sum of 1024 of them is, before
    float64 takes over.

    References
    ----------
    .. [1] S. Kullback and R. A. Leibler, "On Information and Sufficiency", Annals of Mathematical
       Statistics 22, 1951, equation 2.4.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import kl_divergence
    >>> p, q = np.log(np.array([[[0.5, 0.5]], [[0.25, 0.75]]], np.float32))
    >>> kl_divergence(p, q).round(4)
    array([0.1438])
    """
    check_rows("logits_p", logits_p)
    check_array("logits_q", logits_q, logits_p.shape)
    out = empty(logits_p, (len(logits_p),), np.float64)
    (cuda if is_cuda(logits_p) else cpu).kl_divergence(logits_p, logits_q, out)
    return out


def top1_agreement(logits_p: NDArray[np.float32], logits_q: NDArray[np.float32]) -> Any:
    """Return for each row whether two sets of logits have their largest element in one place.

    Parameters
    ----------
    logits_p, logits_q
        As in `kl_divergence`; so are the errors.

    Returns
    -------
    array of bool, shape (B,)
        True where the lowest index of the largest element is the same; False for a row with a NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import top1_agreement
    >>> p = np.array([[1, 3, 3], [5, 1, 0]], np.float32)
    >>> top1_agreement(p, np.array([[0, 2, 1], [0, 9, 0]], np.float32))
    array([ True, False])
    """
    check_rows("logits_p", logits_p)
    check_array("logits_q", logits_q, logits_p.shape)
    out = empty(logits_p, (len(logits_p),), np.bool_)
    (cuda if is_cuda(logits_p) else cpu).top1_agreement(logits_p, logits_q, out)
    return out


def masked_softmax(
    scores: NDArray[np.float32],
    mask: NDArray[np.bool_] | None = None,
    *,
    bias: NDArray[np.float32] | None = None,
    sm_scale: float = 1.0,
    logits_soft_cap: float | None = None,
    causal: bool = False,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Return the softmax of attention scores over their last axis: for attention by hand.

    .. math:: p = \operatorname{softmax}\left( C \tanh(s \, x / C) + b \right)
        \quad \text{over the keys that are seen}

    Parameters
    ----------
    scores : array of float32, shape (..., Tq, Tk), two to four axes
        Products of queries and keys.
    mask : array of bool, any shape that broadcasts to that of `scores`, optional
        True where a query sees a key, as in FlashInfer's ``custom_mask``.
    bias : array of float32, any shape that broadcasts to that of `scores`, optional
        Added after scaling and capping: `alibi_bias`, `relative_position_bias`, or a mask of
        zeros and -inf (or float32's lowest number, which counts as -inf).
    sm_scale : float
        s, usually one over the root of the head's size.
    logits_soft_cap : float, optional
        C; None or 0 for no cap.
    causal : bool
        Let query i see the keys up to i + Tk - Tq: the queries are the last of the sequence.
    out : array of float32, shape of `scores`, optional
        Output array; it may be `scores` itself.

    Returns
    -------
    array of float32, shape of `scores`
        Rows of sum 1, zeros where a key is not seen; all zeros for a query that sees none, and
        NaN for one that sees a NaN or +inf.

    Raises
    ------
    UsageError
        If a shape does not fit or a cap is negative.
    TypeError
        If an array has another dtype.

    See Also
    --------
    nbflow_kernels.softmax : For sampling, with a temperature for each row.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import masked_softmax
    >>> masked_softmax(np.zeros((2, 3), np.float32), causal=True).round(3)
    array([[0.5  , 0.5  , 0.   ],
           [0.333, 0.333, 0.333]], dtype=float32)
    """
    ndim = min(max(getattr(scores, "ndim", 2), 2), 4)
    check_array("scores", scores, (None,) * ndim)
    cap = _cap(logits_soft_cap)
    out = output(scores, scores.shape, out)
    shape = (1,) * (4 - ndim) + scores.shape
    variant = cuda if is_cuda(scores) else cpu
    variant.masked_softmax(
        scores.reshape(shape),
        _spread("mask", mask, shape, scores.shape, np.bool_),
        _spread("bias", bias, shape, scores.shape, np.float32),
        float(sm_scale),
        cap,
        bool(causal),
        out.reshape(shape),
    )
    return out


def _spread(name: str, x: Any, shape: tuple[int, ...], wanted: tuple[int, ...], dtype: Any) -> Any:
    """Return `x` with four axes, without copying but for the last one."""
    if x is None:
        return None
    if not (isinstance(x, np.ndarray) or is_cuda(x)) or x.dtype != dtype:
        found = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"{name} must be an array of {np.dtype(dtype).name}, got {found}")
    if is_cuda(x):
        return cuda.spread(name, x, shape, wanted)
    try:
        spread = np.broadcast_to(x, shape)
    except ValueError:
        raise UsageError(f"{name} must broadcast to shape {wanted}, got {x.shape}") from None
    if shape[-1] > 1 and spread.strides[-1] != x.itemsize:
        last = np.broadcast_to(x, (*x.shape[:-1], shape[-1]))
        spread = np.broadcast_to(np.array(last, order="C"), shape)
    return spread


def _cap(cap: float | None) -> float:
    """Return the cap, 0 for none."""
    value = 0.0 if cap is None else float(cap)
    if not (value >= 0.0 and np.isfinite(value)):
        raise UsageError(f"logits_soft_cap must be positive, or None or 0 for none, got {cap}")
    return value
