"""Masks on a CUDA device: the place of the variants; it says so while there are none."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def packbits(x: Any, bitorder: str) -> Any:
    """See `nbflow_kernels.packbits`."""
    no_cuda_variant("packbits")


def segment_packbits(x: Any, indptr: Any, bitorder: str) -> Any:
    """See `nbflow_kernels.segment_packbits`."""
    no_cuda_variant("segment_packbits")


def convert_bsr_mask_layout(mask: Any, indptr: Any) -> Any:
    """See `nbflow_kernels.convert_bsr_mask_layout`."""
    no_cuda_variant("convert_bsr_mask_layout")
