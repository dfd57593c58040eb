"""Operations on logits in NumPy float64, as in the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def soft_cap(logits: Any, cap: float) -> NDArray[np.float64]:
    """See `nbflow_kernels.soft_cap`."""
    return np.asarray(cap * np.tanh(np.asarray(logits, np.float64) / cap))


def log_softmax(
    logits: Any, temperature: Any = None, logits_soft_cap: float | None = None
) -> NDArray[np.float64]:
    """See `nbflow_kernels.log_softmax`."""
    x = np.asarray(logits, np.float64)
    if logits_soft_cap:
        x = soft_cap(x, logits_soft_cap)
    if temperature is not None:
        x = x / np.broadcast_to(np.asarray(temperature, np.float64), len(x))[:, None]
    with np.errstate(invalid="ignore"):  # inf - inf in a row without a distribution
        x = x - x.max(axis=1, keepdims=True)
        return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))


def token_log_probs(
    logits: Any, ids: Any, temperature: Any = None, logits_soft_cap: float | None = None
) -> NDArray[np.float64]:
    """See `nbflow_kernels.token_log_probs`."""
    table = log_softmax(logits, temperature, logits_soft_cap)
    columns = ids if ids.ndim == 2 else ids[:, None]
    return np.take_along_axis(table, columns, axis=1).reshape(ids.shape)


def kl_divergence(logits_p: Any, logits_q: Any) -> NDArray[np.float64]:
    """See `nbflow_kernels.kl_divergence`."""
    p, q = log_softmax(logits_p), log_softmax(logits_q)
    result = np.zeros(len(p))
    for row in range(len(p)):
        for a, b in zip(p[row], q[row], strict=True):
            if a > -np.inf or np.isnan(a):  # 0 * log(0 / q) is 0
                result[row] += np.exp(a) * (a - b)
    return result


def top1_agreement(logits_p: Any, logits_q: Any) -> NDArray[np.bool_]:
    """See `nbflow_kernels.top1_agreement`."""
    valid = ~(np.isnan(logits_p).any(axis=1) | np.isnan(logits_q).any(axis=1))
    return np.asarray((logits_p.argmax(axis=1) == logits_q.argmax(axis=1)) & valid)


def masked_softmax(
    scores: Any,
    mask: Any = None,
    *,
    bias: Any = None,
    sm_scale: float = 1.0,
    logits_soft_cap: float | None = None,
    causal: bool = False,
) -> NDArray[np.float64]:
    """See `nbflow_kernels.masked_softmax`."""
    s = np.asarray(scores, np.float64) * sm_scale
    if logits_soft_cap:
        s = soft_cap(s, logits_soft_cap)
    if bias is not None:
        s = s + np.asarray(bias, np.float64)
    seen = np.ones(s.shape, bool) if mask is None else np.broadcast_to(mask, s.shape).copy()
    if causal:
        Tq, Tk = s.shape[-2:]
        seen &= np.arange(Tk) <= np.arange(Tk - Tq, Tk)[:, None]
    s = np.where(seen, s, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(top == -np.inf, 0.0, top))
    total = e.sum(axis=-1, keepdims=True)
    return np.asarray(e / np.where(total == 0.0, 1.0, total))
