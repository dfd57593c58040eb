"""Changes of logits on a CUDA device: not built yet, the functions say so."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def penalties(logits: Any, token_ids: Any, indptr: Any, parameters: Any, spans: Any) -> None:
    """See `nbflow_kernels.apply_penalties`."""
    no_cuda_variant("apply_penalties")


def no_repeat_ngram(logits: Any, token_ids: Any, indptr: Any, sizes: Any) -> None:
    """See `nbflow_kernels.apply_no_repeat_ngram`."""
    no_cuda_variant("apply_no_repeat_ngram")


def dry(
    logits: Any,
    token_ids: Any,
    indptr: Any,
    parameters: Any,
    spans: Any,
    words: Any,
    edges: Any,
) -> None:
    """See `nbflow_kernels.apply_dry_penalty`."""
    no_cuda_variant("apply_dry_penalty")


def logit_bias(logits: Any, token_ids: Any, biases: Any, indptr: Any) -> None:
    """See `nbflow_kernels.apply_logit_bias`."""
    no_cuda_variant("apply_logit_bias")


def mask(logits: Any, token_ids: Any, indptr: Any, keep: bool) -> None:
    """See `nbflow_kernels.mask_token_ids`."""
    no_cuda_variant("mask_token_ids")


def bitmask(logits: Any, bits: Any) -> None:
    """See `nbflow_kernels.apply_token_bitmask`."""
    no_cuda_variant("apply_token_bitmask")
