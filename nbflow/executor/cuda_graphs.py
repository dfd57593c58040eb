"""The kernels of a step as CUDA graphs: started by one call instead of one for each.

What a graph holds is fixed when it is captured: kernels, grids, addresses.  So everything that
changes from step to step lies in arrays that stay where they are (`PaddedArrays`, `FixedTables`),
and a graph serves all steps of one shape: up to so many sequences with up to so many pages.
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

LEAST_PAGES = 32
"""Least number of pages that a graph's sequences have together."""


class HostOp(PythonOp):
    """An op for which the host waits or computes: it runs between two graphs."""


@dataclass
class StepGraphs:
    """A step as graphs, with what the host does between them."""

    parts: list[Callable[[], Any]]
    """Launches of graphs and calls of ops, in order."""
    n_graphs: int
    n_bytes: int
    """What the driver took for them."""
    pool: Any
    """Where ops have made arrays in passing, which the graphs write to again."""
    keep: list[Any] = field(default_factory=list)
    """Memory that the kernels share and the graphs hold addresses of."""

    def launch(self) -> None:
        """Start all of it."""
        for part in self.parts:
            part()


def capture(ops: Iterable[PythonOp], xp: Any, stream: Any, device: KernelDevice) -> StepGraphs:
    """Capture ops that have run before; none runs now.

    Parameters
    ----------
    ops : iterable of PythonOp
        The step.
    xp : module
        CuPy, or what stands for it.
    stream : Stream
        The current stream; not the null stream.
    device : KernelDevice
        The current device.
    """
    free = xp.cuda.runtime.memGetInfo()[0]
    pool = xp.cuda.MemoryPool()
    parts: list[Callable[[], Any]] = []
    n_graphs = 0
    with xp.cuda.using_allocator(pool.malloc):
        for on_host, some in groupby(ops, lambda op: isinstance(op, HostOp)):
            if on_host:
                parts += [op.call for op in some]
                continue
            graph = _captured(some, stream)
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
    except BaseException:  # which says more than that the capture was spoilt by it
        with contextlib.suppress(Exception):
            stream.end_capture()  # a stream that goes on capturing could not be used
        raise
    return stream.end_capture()


def batch_bucket(n: int) -> int:
    """Return the number that a graph for `n` sequences (or tokens) has: a power of two, or 0."""
    return 1 << (n - 1).bit_length() if n else 0


def page_bucket(n: int) -> int:
    """Return for how many pages of all sequences together a graph is made: a power of two."""
    return max(LEAST_PAGES, 1 << (n - 1).bit_length())
