"""Rotary embedding on a CUDA device: the place of the variant; it says so while there is none."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def apply_rope_with_cos_sin_cache_inplace(
    positions: Any, query: Any, key: Any, cos_sin_cache: Any, is_neox: bool
) -> None:
    """See `nbflow_kernels.apply_rope_with_cos_sin_cache_inplace`."""
    no_cuda_variant("apply_rope_with_cos_sin_cache_inplace")
