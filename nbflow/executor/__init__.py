"""Executors of a program: `cpu` (Numba kernels), `cuda`, `reference` (NumPy float64, op by op)."""

from __future__ import annotations

from typing import Any

from nbflow.distributed.device import HOST, Device, find_place
from nbflow.executor.cpu import CpuExecutor
from nbflow.executor.executor import Executor
from nbflow.executor.reference import ReferenceExecutor
from nbflow.executor.step import Step, make_step
from nbflow.executor.weight_loader import WeightLoader

__all__ = [
    "HOST",
    "CpuExecutor",
    "Device",
    "Executor",
    "ReferenceExecutor",
    "Step",
    "WeightLoader",
    "find_place",
    "make_executor",
    "make_step",
]


def make_executor(*args: Any, place: Device = HOST, **options: Any) -> Executor:
    """Return the executor of a place; further parameters as of `Executor`."""
    if place.on_host:
        from nbflow.executor.overlap import OverlappingExecutor

        return OverlappingExecutor(*args, place=place, **options)
    from nbflow.executor.cuda import CudaExecutor

    return CudaExecutor(*args, place=place, **options)
