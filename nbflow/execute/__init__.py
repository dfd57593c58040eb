"""Executors of a program: `cpu` (Numba kernels), `cuda`, `reference` (NumPy float64, op by op)."""

from __future__ import annotations

from typing import Any

from nbflow.execute.cpu import CpuExecutor
from nbflow.execute.executor import Executor
from nbflow.execute.place import HOST, Place, find_place
from nbflow.execute.reference import ReferenceExecutor
from nbflow.execute.step import Step, make_step
from nbflow.execute.weights import RankWeights

__all__ = [
    "HOST",
    "CpuExecutor",
    "Executor",
    "Place",
    "RankWeights",
    "ReferenceExecutor",
    "Step",
    "find_place",
    "make_executor",
    "make_step",
]


def make_executor(*args: Any, place: Place = HOST, **options: Any) -> Executor:
    """Return the executor of a place; further parameters as of `Executor`."""
    if place.on_host:
        from nbflow.execute.overlap import OverlappingExecutor

        return OverlappingExecutor(*args, place=place, **options)
    from nbflow.execute.cuda import CudaExecutor

    return CudaExecutor(*args, place=place, **options)
