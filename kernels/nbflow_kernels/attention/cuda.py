"""Attention on CUDA devices: the place of the kernels, not built yet."""

from __future__ import annotations

from typing import NoReturn

from nbflow_kernels._dispatch import no_cuda_variant


def attend(*args: object) -> NoReturn:
    """See `nbflow_kernels.attention.cpu.attend`."""
    no_cuda_variant("attention")


def merge_state(*args: object) -> NoReturn:
    """See `nbflow_kernels.merge_state`."""
    no_cuda_variant("merge_state")


def merge_states(*args: object) -> NoReturn:
    """See `nbflow_kernels.merge_states`."""
    no_cuda_variant("merge_states")
