"""Logits on CUDA devices: not built yet, the functions say so."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def log_softmax(logits: Any, temperature: Any, cap: float, out: Any) -> None:
    """See `nbflow_kernels.log_softmax`."""
    no_cuda_variant("log_softmax")


def token_log_probs(logits: Any, ids: Any, temperature: Any, cap: float, out: Any) -> None:
    """See `nbflow_kernels.token_log_probs`."""
    no_cuda_variant("token_log_probs")


def kl_divergence(logits_p: Any, logits_q: Any, out: Any) -> None:
    """See `nbflow_kernels.kl_divergence`."""
    no_cuda_variant("kl_divergence")


def top1_agreement(logits_p: Any, logits_q: Any, out: Any) -> None:
    """See `nbflow_kernels.top1_agreement`."""
    no_cuda_variant("top1_agreement")


def soft_cap(logits: Any, cap: float, out: Any) -> None:
    """See `nbflow_kernels.soft_cap`."""
    no_cuda_variant("soft_cap")


def masked_softmax(
    scores: Any, mask: Any, bias: Any, sm_scale: float, cap: float, causal: bool, out: Any
) -> None:
    """See `nbflow_kernels.masked_softmax`."""
    no_cuda_variant("masked_softmax")
