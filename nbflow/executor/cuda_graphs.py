"""CUDA graphs of steps.

A graph fixes kernels, grids and addresses when it is captured.  Whatever changes from step to step
lies in arrays at fixed addresses (`StepArrays`, `StaticPlanBuffers`): one graph serves all
steps of a bucket of sequences and pages, and with prompts of a bucket of tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from nbflow.executor.bind import PythonOp
from nbflow_kernels.attention.cuda.plan import partial_floats
from nbflow_kernels.cuda import KernelDevice, record_launches
from nbflow_kernels.cuda.workspace import buffers
from nbflow_kernels.quantized_matmul.cuda import GEMV_MAX_ROWS

MIN_PAGES = 32
"""Smallest bucket of pages, all sequences together."""
MAX_PROMPT_TOKENS = 1024
"""Largest step with prompts that is captured: longer ones take the device longer than the host."""
MAX_PROMPT_GRAPHS = 16
"""Shapes of steps with prompts whose graphs are kept."""
MAX_PROMPT_GRAPH_BYTES = 1 << 28
"""Device memory that the driver may allocate for the graphs of these."""
PROMPT_SPLITS_PER_SM = 8
"""Work items of attention reserved for split tiles of a prompt, per multiprocessor."""
MAX_PROMPT_PARTIAL_BYTES = 1 << 25
"""Largest workspace of split-KV attention of a prompt."""


class HostOp(PythonOp):
    """Op in which the host waits or computes: it runs between two graphs."""


class CollectiveOp(PythonOp):
    """Collective on the stream of the step (NCCL).

    A graph may hold it if all ranks of the collective capture it (`capture`).
    """


@dataclass
class StepGraphs:
    """Graphs of a step, and the host ops between them."""

    parts: list[Callable[[], Any]]
    """Launches of graphs and calls of ops, in order."""
    n_graphs: int
    n_collectives: tuple[int, ...]
    """Collectives in each graph, the same on all ranks of a stage."""
    n_bytes: int
    """Device memory that the driver allocated for the graphs; the most of a stage's ranks."""
    pool: Any
    """Memory pool of scratch arrays that the graphs write to."""
    keep: list[Any] = field(default_factory=list)
    """Kernel workspaces whose addresses the graphs hold."""
    sent: list[tuple[Counter[str], Counter[str]]] = field(default_factory=list)
    """Byte counters of communicators, and the bytes that a launch of the graphs adds to each."""

    def launch(self) -> None:
        """Launch the graphs and host ops in order."""
        for part in self.parts:
            part()
        for counter, of_a_launch in self.sent:
            counter.update(of_a_launch)


def capture(
    ops: Iterable[PythonOp],
    xp: Any,
    stream: Any,
    device: KernelDevice,
    *,
    collectives: bool = True,
    counters: Sequence[Counter[str]] = (),
    pool: Any = None,
) -> StepGraphs:
    """Capture ops that have run before, without running them.

    Parameters
    ----------
    ops : iterable of PythonOp
        Ops of a step.
    xp : module
        CuPy or the emulator's stand-in; its current stream is not the null stream.
    stream : Stream
        Stream to capture, the current one.
    device : KernelDevice
        Device of the ops.
    collectives : bool
        Capture `CollectiveOp`; otherwise they run between graphs, as `HostOp` does.
    counters : sequence of Counter
        Byte counters of the communicators (`Comm.sent`), which calls of captured ops change.
    pool : MemoryPool, optional
        Pool of scratch arrays, which graphs of one stream may share.
    """
    free = xp.cuda.runtime.memGetInfo()[0]
    pool = xp.cuda.MemoryPool() if pool is None else pool
    held = pool.total_bytes()
    parts: list[Callable[[], Any]] = []
    in_graphs: list[int] = []
    between = HostOp if collectives else (HostOp, CollectiveOp)
    before = [Counter(counter) for counter in counters]
    try:
        with xp.cuda.using_allocator(pool.malloc):
            for on_host, run in groupby(ops, lambda op: isinstance(op, between)):
                if on_host:
                    parts += [op.call for op in run]
                    continue
                captured = list(run)
                graph = _captured(captured, stream)
                graph.upload(stream)
                parts.append(functools.partial(graph.launch, stream))
                in_graphs.append(sum(isinstance(op, CollectiveOp) for op in captured))
    finally:
        sent = [_taken_back(*both) for both in zip(counters, before, strict=True)]
    taken = free - xp.cuda.runtime.memGetInfo()[0] - (pool.total_bytes() - held)
    return StepGraphs(
        parts, len(in_graphs), tuple(in_graphs), max(0, taken), pool, buffers(device), sent
    )


@dataclass
class RecordedOps:
    """Ops of a step that does not run as graphs, without the Python code of most of them."""

    calls: list[Callable[[], Any]]
    """Launches of kernels and calls of other ops, in order."""
    pool: Any
    """Memory pool of scratch arrays that the launches write to."""
    keep: list[Any]
    """Kernel workspaces whose addresses the launches hold."""


def record(ops: Iterable[PythonOp], xp: Any, device: KernelDevice, pool: Any) -> RecordedOps:
    """Run ops that have run before, and return the launches that repeat them.

    Parameters
    ----------
    ops, xp, device
        As for `capture`.
    pool : MemoryPool
        Pool of scratch arrays, which graphs and recorded ops of one stream may share.
    """
    calls: list[Callable[[], Any]] = []
    for op in ops:
        if not op.is_fixed:
            op.call()
            calls.append(op.call)
            continue
        with xp.cuda.using_allocator(pool.malloc), record_launches() as launches:
            op.call()
        calls += launches
    return RecordedOps(calls, pool, buffers(device))


def _taken_back(counter: Counter[str], before: Counter[str]) -> tuple[Counter[str], Counter[str]]:
    """Reset a counter to its state before the capture; return it and the difference."""
    added = counter - before
    counter.subtract(added)
    return counter, added


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


def attention_limits(
    heads: tuple[int, int, int, int], rows_each: int, n_sms: int
) -> dict[str, Any]:
    """Return the options of static attention plans for sequences of up to `rows_each` tokens."""
    if rows_each <= GEMV_MAX_ROWS:
        return {}
    return {
        "max_splits": PROMPT_SPLITS_PER_SM * n_sms,
        "max_partials": MAX_PROMPT_PARTIAL_BYTES // (4 * partial_floats(heads)),
        "prefill": True,
    }


# A step is padded to the buckets of its numbers, so that graphs repeat (docs/cuda.md, Graphs).


def batch_bucket(n: int) -> int:
    """Return the bucket of `n` sequences, or tokens of a decode step: a power of two, or 0."""
    return 1 << (n - 1).bit_length() if n else 0


def prompt_bucket(n: int) -> int:
    """Return the bucket of `n` tokens of a step with prompts: at most an eighth more, or 7.

    Examples
    --------
    >>> [prompt_bucket(n) for n in (9, 64, 65, 300)]
    [16, 64, 80, 320]
    """
    step = max(8, batch_bucket(n) // 8)
    return -(-n // step) * step


def page_bucket(n: int) -> int:
    """Return the bucket of `n` pages: a power of two, at least `MIN_PAGES`."""
    return max(MIN_PAGES, batch_bucket(n))
