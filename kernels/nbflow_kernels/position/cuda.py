"""Positions on CUDA devices: not built yet, the functions say so."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def apply_rope_with_cos_sin_cache_inplace(
    positions: Any, query: Any, key: Any, cos_sin_cache: Any, is_neox: bool
) -> None:
    """See `nbflow_kernels.apply_rope_with_cos_sin_cache_inplace`."""
    no_cuda_variant("apply_rope_with_cos_sin_cache_inplace")


def alibi_bias(slopes: Any, symmetric: bool, out: Any) -> None:
    """See `nbflow_kernels.alibi_bias`."""
    no_cuda_variant("alibi_bias")


def relative_position_bucket(
    relative_position: Any, bidirectional: bool, n: int, max_distance: int, out: Any
) -> None:
    """See `nbflow_kernels.relative_position_bucket`."""
    no_cuda_variant("relative_position_bucket")


def relative_position_bias(table: Any, buckets: Any, out: Any) -> None:
    """See `nbflow_kernels.relative_position_bias`."""
    no_cuda_variant("relative_position_bias")


def sinusoidal_position_embedding(
    positions: Any, frequencies: Any, interleave: bool, offset: int, padding_idx: Any, out: Any
) -> None:
    """See `nbflow_kernels.sinusoidal_position_embedding`."""
    no_cuda_variant("sinusoidal_position_embedding")


def add_learned_positions(x: Any, positions: Any, table: Any, offset: int, out: Any) -> None:
    """See `nbflow_kernels.add_learned_positions`."""
    no_cuda_variant("add_learned_positions")
