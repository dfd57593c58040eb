"""Executors of a program: `cpu` (Numba kernels), `cuda`, `reference` (NumPy float64, op by op)."""

from __future__ import annotations

from typing import Any

from nbflow.distributed.device import HOST, Device, find_device
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
    "find_device",
    "make_executor",
    "make_step",
]


def make_executor(*args: Any, device: Device = HOST, **options: Any) -> Executor:
    """Make the executor of a device; further parameters as in `Executor`."""
    if device.on_host:
        from nbflow.executor.overlap import OverlappingExecutor

        return OverlappingExecutor(*args, device=device, **options)
    from nbflow.executor.cuda import CudaExecutor

    return CudaExecutor(*args, device=device, **options)
