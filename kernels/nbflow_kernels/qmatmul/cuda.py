"""Quantized matrix product on CUDA devices: not built yet, the function says so."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._dispatch import no_cuda_variant


def qmatmul(x: Any, w: Any, bias: Any, accumulate: bool, activations: str, out: Any) -> None:
    """See `nbflow_kernels.qmatmul`."""
    no_cuda_variant("qmatmul")
