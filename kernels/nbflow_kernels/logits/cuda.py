"""Logits on CUDA devices: one thread block per row, see `logits.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.errors import UsageError

_THREADS = 512  # as in logits.cu


def _kernel(entry: str, parameters: str) -> cuda.Kernel:
    return cuda.cpp_kernel(__file__, "logits.cu", entry, parameters)


_log_softmax = _kernel("log_softmax", "f32* logits, f32* temperature, f32* out, i32 V, f32 cap")
_token_log_probs = _kernel(
    "token_log_probs",
    "f32* logits, i32* ids, f32* temperature, f64* out, i32 V, i32 K, f32 cap",
)
_kl_divergence = _kernel("kl_divergence", "f32* logits_p, f32* logits_q, f64* out, i32 V")
_top1_agreement = _kernel("top1_agreement", "f32* logits_p, f32* logits_q, u8* out, i32 V")
_soft_cap = _kernel("soft_cap", "f32* logits, f32* out, i64 n, f32 cap")
_masked_softmax = _kernel(
    "masked_softmax",
    "f32* scores, u8*? mask, f32*? bias, f32* out, i64 mask_b, i64 mask_h, i64 mask_i, i32 mask_j, "
    "i64 bias_b, i64 bias_h, i64 bias_i, i32 bias_j, i32 H, i32 Tq, i32 Tk, f32 sm_scale, f32 cap, "
    "i32 causal",
)


def log_softmax(logits: Any, temperature: Any, cap: float, out: Any) -> None:
    """See `nbflow_kernels.log_softmax`."""
    B, V = logits.shape
    if B:
        scale = cuda.to_device(temperature, logits)
        _log_softmax(B, _THREADS, (logits, scale, out, V, cap))


def token_log_probs(logits: Any, ids: Any, temperature: Any, cap: float, out: Any) -> None:
    """See `nbflow_kernels.token_log_probs`; an id out of range gives NaN."""
    B, V = logits.shape
    if out.size:
        scale = cuda.to_device(temperature, logits)
        _token_log_probs(B, _THREADS, (logits, ids, scale, out, V, ids.shape[1], cap))


def kl_divergence(logits_p: Any, logits_q: Any, out: Any) -> None:
    """See `nbflow_kernels.kl_divergence`."""
    B, V = logits_p.shape
    if B:
        _kl_divergence(B, _THREADS, (logits_p, logits_q, out, V))


def top1_agreement(logits_p: Any, logits_q: Any, out: Any) -> None:
    """See `nbflow_kernels.top1_agreement`."""
    B, V = logits_p.shape
    if B:
        _top1_agreement(B, _THREADS, (logits_p, logits_q, out, V))


def soft_cap(logits: Any, cap: float, out: Any) -> None:
    """See `nbflow_kernels.soft_cap`."""
    n = logits.size
    if n:
        _soft_cap(cuda.ceil_div(n, 256), 256, (logits, out, n, cap))


def masked_softmax(
    scores: Any, mask: Any, bias: Any, sm_scale: float, cap: float, causal: bool, out: Any
) -> None:
    """See `nbflow_kernels.masked_softmax`; mask and bias come from `spread`."""
    B, H, Tq, Tk = scores.shape
    if not scores.size:
        return
    mask, mask_steps = mask or (None, (0, 0, 0, 0))
    bias, bias_steps = bias or (None, (0, 0, 0, 0))
    args = (scores, mask, bias, out, *mask_steps, *bias_steps, H, Tq, Tk, sm_scale, cap, causal)
    _masked_softmax(B * H * Tq, _THREADS, args)


def spread(
    name: str, x: Any, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[Any, tuple[int, ...]]:
    """Return `x` and its strides in elements along the axes of `shape`, to which it broadcasts.

    Raises
    ------
    UsageError
        If it does not; `wanted` is the shape the message names.
    """
    missing = len(shape) - x.ndim
    sizes = (1,) * missing + tuple(x.shape)
    if missing < 0 or any(n not in (1, full) for n, full in zip(sizes, shape, strict=True)):
        raise UsageError(f"{name} must broadcast to shape {wanted}, got {x.shape}")
    steps = (0,) * missing + tuple(step // np.dtype(x.dtype).itemsize for step in x.strides)
    return x, tuple(0 if n == 1 else step for n, step in zip(sizes, steps, strict=True))
