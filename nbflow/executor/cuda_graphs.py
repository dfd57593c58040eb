"""CUDA graphs of steps.

A graph fixes kernels, grids and addresses when it is captured.  Whatever changes from step to step
lies in arrays at fixed addresses (`StepArrays`, `StaticPlanBuffers`): one graph serves all
steps of a bucket of sequences and pages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from nbflow.executor.bind import PythonOp
from nbflow_kernels.cuda import KernelDevice
from nbflow_kernels.cuda.workspace import buffers

MIN_PAGES = 32
"""Smallest bucket of pages, all sequences together."""


class HostOp(PythonOp):
    """Op in which the host waits or computes: it runs between two graphs."""


@dataclass
class StepGraphs:
    """Graphs of a step, and the host ops between them."""

    parts: list[Callable[[], Any]]
    """Launches of graphs and calls of ops, in order."""
    n_graphs: int
    n_bytes: int
    """Device memory that the driver allocated for the graphs."""
    pool: Any
    """Memory pool of scratch arrays that the graphs write to."""
    keep: list[Any] = field(default_factory=list)
    """Kernel workspaces whose addresses the graphs hold."""

    def launch(self) -> None:
        """Launch the graphs and host ops in order."""
        for part in self.parts:
            part()


def capture(ops: Iterable[PythonOp], xp: Any, stream: Any, device: KernelDevice) -> StepGraphs:
    """Capture ops that have run before, without running them.

    `xp` is CuPy or the emulator's stand-in; the current stream is not the null stream.
    """
    free = xp.cuda.runtime.memGetInfo()[0]
    pool = xp.cuda.MemoryPool()
    parts: list[Callable[[], Any]] = []
    n_graphs = 0
    with xp.cuda.using_allocator(pool.malloc):
        for on_host, run in groupby(ops, lambda op: isinstance(op, HostOp)):
            if on_host:
                parts += [op.call for op in run]
                continue
            graph = _captured(run, stream)
            graph.upload(stream)
            parts.append(functools.partial(graph.launch, stream))
            n_graphs += 1
    taken = free - xp.cuda.runtime.memGetInfo()[0] - pool.total_bytes()
    return StepGraphs(parts, n_graphs, max(0, taken), pool, buffers(device))


def _captured(ops: Iterable[PythonOp], stream: Any) -> Any:
    """Return the graph of some ops."""
    stream.begin_capture()
    try:
        for op in ops:
            op.call()
    except BaseException:  # its message says more than the failed capture's
        with contextlib.suppress(Exception):
            stream.end_capture()  # a stream left capturing would be unusable
        raise
    return stream.end_capture()


def batch_bucket(n: int) -> int:
    """Return the bucket of `n` sequences or tokens: a power of two, or 0."""
    return 1 << (n - 1).bit_length() if n else 0


def page_bucket(n: int) -> int:
    """Return the bucket of `n` pages: a power of two."""
    return max(MIN_PAGES, 1 << (n - 1).bit_length())
