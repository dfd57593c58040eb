"""Run a program with the CUDA kernels, on a device or in the emulator.

Weights, pages, buffers and the step's numbers live on the device; a step copies its numbers there
once, starts the kernels of all ops one after the other, and waits for nothing.  Only what is asked
for (`buffer`) comes back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow.execute.bind import PythonOp
from nbflow.execute.bind_cuda import CudaBinder
from nbflow.execute.executor import Executor
from nbflow.execute.fusions import find_fusions
from nbflow.execute.step import Step
from nbflow.execute.step_arrays import DeviceArrays, StepArrays

MAX_BOUND = 32
"""Bound shapes kept."""


@dataclass
class Bound:
    """A program bound for one shape of step."""

    host: StepArrays
    device: DeviceArrays
    attention: Any
    """Divides the attention's work; None without layers."""
    ops: list[PythonOp]
    storages: tuple[int, int]
    """Versions of the storages it was bound to."""


class CudaExecutor(Executor):
    """Executor of one rank's program on a CUDA device; parameters as of `Executor`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bound: dict[tuple[int, ...], Bound] = {}
        self.fusions = find_fusions(self.program)

    def forget(self) -> None:
        """See `Executor.forget`."""
        self._bound.clear()

    def buffer(self, name: str, n_rows: int) -> np.ndarray:
        """Return the first rows of a buffer, as the last step left them, in host memory."""
        found: np.ndarray = self.view(name, n_rows, n_rows).get()
        return found

    def run(self, step: Step) -> None:
        """Start the kernels of one step; results are in its buffers when the device is done."""
        bound = self._prepared(step)
        for op in bound.ops:
            if self.seconds is None:
                op.call()
                continue
            self.place.synchronize()
            started = time.perf_counter()
            op.call()
            self.place.synchronize()
            self.seconds[op.kind] += time.perf_counter() - started

    def _prepared(self, step: Step) -> Bound:
        """Return the program bound for a step's shape, with the step's numbers on the device."""
        sizes = len(step.ids), len(step.logit_rows), len(step.pages.kv_lens)
        n_pages, memory = len(step.pages.kv_indices), step.memory
        key = (*sizes, n_pages, 0 if memory is None else len(memory.kv_indices))
        bound = self._bound.pop(key, None)
        storages = self.storage.version, 0 if self.memory is None else self.memory.version
        if self._reserve(*sizes[:2]):
            self._bound.clear()
            bound = None
        if bound is not None and bound.storages != storages:
            self._bound.clear()  # the others hold pages that are no more, too
            bound = None
        if bound is None:
            while len(self._bound) >= MAX_BOUND:  # the one used longest ago goes first
                del self._bound[next(iter(self._bound))]
            host = StepArrays(*sizes, *key[3:])
            host.load(step)
            device = DeviceArrays(host, self.place.purposed("the numbers of a step"))
            binder = CudaBinder(self, host, device)
            ops = [op for _, op in binder.ops() if isinstance(op, PythonOp)]
            bound = Bound(host, device, binder.attention, ops, storages)
        else:
            bound.host.load(step)
            if bound.attention is not None:
                bound.attention.fill()
        bound.device.load(bound.host)
        self._bound[key] = bound
        return bound
