"""Attention on a CUDA device: the place of the variants, which say so while there are none."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def batch_attention(plan: Any, q: Any, k_cache: Any, v_cache: Any, out: Any, lse: Any) -> None:
    """See `nbflow_kernels.attention.cpu.batch_attention`."""
    no_cuda_variant("batch_attention")


def attend(plan: Any, q: Any, k_cache: Any, v_cache: Any, out: Any, lse: Any, visible: Any) -> None:
    """See `nbflow_kernels.attention.cpu.attend`."""
    no_cuda_variant("single_prefill_with_kv_cache")


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any, v_out: Any, s_out: Any) -> None:
    """See `nbflow_kernels.merge_state`."""
    no_cuda_variant("merge_state")
