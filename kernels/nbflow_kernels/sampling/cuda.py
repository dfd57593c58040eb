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
    probs: Any, rows: Any, limits: Any, top_k_first: bool, seeds: Any, offsets: Any, out: Any
) -> None:
    """See `nbflow_kernels.sampling.cpu.sample`."""
    no_cuda_variant("sampling_from_probs")


def renorm(probs: Any, limits: Any, out: Any) -> Any:
    """See `nbflow_kernels.sampling.cpu.renorm`."""
    no_cuda_variant("top_k_renorm_probs")
