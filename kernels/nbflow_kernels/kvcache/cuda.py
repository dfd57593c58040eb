"""Cache operations on a CUDA device: the place of the variants; it says so while there are none."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def append_paged_kv_cache(
    key: Any,
    value: Any,
    batch_indices: Any,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_layout: str,
    kind: int,
) -> None:
    """See `nbflow_kernels.append_paged_kv_cache`."""
    no_cuda_variant("append_paged_kv_cache")


def append_paged_mla_kv_cache(
    ckv: Any,
    kpe: Any,
    batch_indices: Any,
    positions: Any,
    ckv_cache: Any,
    kpe_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kind: int,
) -> None:
    """See `nbflow_kernels.append_paged_mla_kv_cache`."""
    no_cuda_variant("append_paged_mla_kv_cache")
