"""Sparse products on CUDA devices."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def sparse_matmul(x: Any, w: Any, accumulate: bool, out: Any) -> None:
    """See `nbflow_kernels.sparse_matmul`."""
    no_cuda_variant("sparse_matmul")
