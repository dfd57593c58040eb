"""Mixture of experts on a CUDA device: not built yet, the functions say so."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def routing(
    logits: Any,
    bias: Any,
    sigmoid: bool,
    renormalize: bool,
    n_groups: int,
    top_k_groups: int,
    top2_sum: bool,
    scale: float,
    min_score: float,
    weights: Any,
    ids: Any,
) -> None:
    """See `nbflow_kernels.moe_routing`."""
    no_cuda_variant("moe_routing")


def permute(ids: Any, rows: Any, indptr: Any, inverse: Any) -> None:
    """See `nbflow_kernels.moe_permute`."""
    no_cuda_variant("moe_permute")


def grouped(x: Any, matrices: Any, indptr: Any, bias: Any, out: Any) -> None:
    """See `nbflow_kernels.grouped_matmul`."""
    no_cuda_variant("grouped_matmul")


def combine(y: Any, weights: Any, inverse: Any, accumulate: bool, out: Any) -> None:
    """See `nbflow_kernels.moe_combine`."""
    no_cuda_variant("moe_combine")
