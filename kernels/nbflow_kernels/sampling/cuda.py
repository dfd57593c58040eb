"""Sampling on a CUDA device: the place of the variants, which say so while there are none."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def softmax(logits: Any, temperature: Any, out: Any) -> None:
    """See `nbflow_kernels.softmax`."""
    no_cuda_variant("softmax")


def argmax(logits: Any, out: Any) -> None:
    """See `nbflow_kernels.argmax`."""
    no_cuda_variant("argmax")


def sample(
    ranks: Any,
    probs: Any,
    rows: Any,
    limits: Any,
    top_k_first: bool,
    seeds: Any,
    offsets: Any,
    out: Any,
    shares: Any,
) -> None:
    """See `nbflow_kernels.sampling.cpu.sample`."""
    no_cuda_variant("sampling_from_probs")


def sample_logits(
    logits: Any,
    rows: Any,
    temperature: Any,
    limits: Any,
    top_k_first: bool,
    seeds: Any,
    offsets: Any,
    out: Any,
) -> None:
    """See `nbflow_kernels.sampling.cpu.sample_logits`."""
    no_cuda_variant("sampling_from_logits")


def renorm(ranks: Any, probs: Any, limits: Any, out: Any, valid: Any) -> None:
    """See `nbflow_kernels.sampling.cpu.renorm`."""
    no_cuda_variant("top_k_renorm_probs")


def typical_ranks(probs: Any, ranks: Any) -> None:
    """See `nbflow_kernels.sampling.cpu_shapes.typical_ranks`."""
    no_cuda_variant("typical_sampling_from_probs")


def tail_free_counts(probs: Any, rows: Any, z: Any, first: int, counts: Any) -> None:
    """See `nbflow_kernels.sampling.cpu_shapes.tail_free_counts`."""
    no_cuda_variant("tail_free_sampling_from_probs")


def xtc(probs: Any, parameters: Any, seeds: Any, offsets: Any, out: Any, valid: Any) -> None:
    """See `nbflow_kernels.xtc_renorm_probs`."""
    no_cuda_variant("xtc_renorm_probs")


def top_k(x: Any, k: int, in_order: bool, values: Any, indices: Any) -> None:
    """See `nbflow_kernels.top_k`."""
    no_cuda_variant("top_k")


def top_k_mask(logits: Any, counts: Any, out: Any, valid: Any) -> None:
    """See `nbflow_kernels.top_k_mask_logits`."""
    no_cuda_variant("top_k_mask_logits")


def n_sigma_mask(logits: Any, n: Any, out: Any, valid: Any) -> None:
    """See `nbflow_kernels.top_n_sigma_mask_logits`."""
    no_cuda_variant("top_n_sigma_mask_logits")


def chain_speculative(
    draft_probs: Any,
    draft_token_ids: Any,
    target_probs: Any,
    seeds: Any,
    offsets: Any,
    out: Any,
    accepted: Any,
    emitted: Any,
) -> None:
    """See `nbflow_kernels.chain_speculative_sampling`."""
    no_cuda_variant("chain_speculative_sampling")
