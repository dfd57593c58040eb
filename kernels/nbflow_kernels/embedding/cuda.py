"""Embedding rows on CUDA devices: not built yet, the function says so."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def embedding(ids: Any, table: Any, out: Any) -> None:
    """See `nbflow_kernels.embedding`."""
    no_cuda_variant("embedding")


def scale_rows(out: Any, scale: float) -> None:
    """Multiply all rows by `scale`, in place."""
    no_cuda_variant("embedding")
