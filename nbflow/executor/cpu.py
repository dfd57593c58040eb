"""Run a program with the Numba CPU kernels.

For each shape of step the program is bound once: every op becomes compiled calls with their
buffers cut to length (`nbflow.executor.bind`), and all calls between two communications one list
that the thread pool runs without Python in between.  Running a step is copying its numbers
into arrays, planning the attention, and running the lists.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from nbflow.executor.bind import Binder, PythonOp, is_blocks
from nbflow.executor.executor import Executor
from nbflow.executor.step import Step
from nbflow.executor.step_buffers import StepArrays
from nbflow.kv_cache.block_table import PageView
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode
from nbflow_kernels.cpu.parallel_for import count_kernel_seconds, get_num_threads, run_graph
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows

MAX_BOUND = 128
"""Bound shapes kept, of some 15 KB a layer; prompts of many lengths would otherwise fill memory.
As requests come and go, steps have some dozens of shapes."""
LEAST_ROOM = 32
"""Least number of pages that the sequences of a bound step can have together: with pages of 64
tokens the keys of so many are not divided, and no partial results are to be added."""


@dataclass
class Segment:
    """Compiled calls between two ops that are Python."""

    calls: CpuGraph
    kinds: tuple[str, ...]
    """Kind of op of each call."""


@dataclass
class Bound:
    """A program bound for one shape of step."""

    arrays: StepArrays
    attention: Any
    """Fills the work items of the attention; None without layers."""
    segments: list[Segment | PythonOp]
    storages: tuple[int, int]
    """Versions of the storages it was bound to."""
    room: tuple[int, int]
    """Page numbers that there is room for, of the sequences and of the encoder's."""
    repeated: dict[Any, list[Segment | PythonOp]] = field(default_factory=dict)
    """The calls of a whole step with further ones behind them; see `CpuExecutor.run_repeated`."""


class CpuExecutor(Executor):
    """Executor of one rank's program on the CPU; parameters as of `Executor`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bound: dict[tuple[int, ...], Bound] = {}
        self._int8_rows: dict[int, Int8Rows] = {}  # by columns

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of the buffers."""
        return super().workspace_bytes + sum(b.nbytes for b in self._int8_rows.values())

    def int8_rows(self, n_rows: int, n_columns: int) -> Int8Rows:
        """Return room for activations as int8; ops of one width share it, one after the other."""
        have = self._int8_rows.get(n_columns)
        if have is None or len(have.codes) < n_rows:
            have = self._int8_rows[n_columns] = Int8Rows.empty(n_rows, n_columns)
        return have.first(n_rows)

    def reserve(self, n_tokens: int, n_logits: int) -> None:
        """Make the buffers large enough for such steps now."""
        super().reserve(n_tokens, n_logits)
        for op, operands in zip(self.program.ops, self.weights.operands, strict=True):
            if op.kind == "linear" and self.activations == "int8" and any(map(is_blocks, operands)):
                buffer = self.program.buffers[op.inputs[0]]
                rows = buffer.n_rows(n_tokens, n_logits, n_logits)
                self.int8_rows(rows, buffer.width)

    def bind_anew(self) -> None:
        """Forget what the program was bound to: operands or settings have changed."""
        self._bound.clear()

    def run(self, step: Step) -> None:
        """Run the program once; results are in its buffers."""
        segments = self._prepared(step).segments
        for segment in segments:
            self._run_segment(segment)

    def run_repeated(
        self,
        step: Step,
        key: Any,
        further: Callable[[Bound], Sequence[GraphNode]],
        n: int,
        stop: Any,
    ) -> None:
        """Run the program up to `n` times, each time followed by further calls.

        The further calls draw the next tokens and put them into the step's arrays, so that no
        Python is needed between two tokens.

        Parameters
        ----------
        step : Step
            The first step.
        key : hashable
            Says what `further` will return; its calls are kept under it.
        further : callable
            Gives the further calls for a bound program.
        n : int
            Number of steps.
        stop : array of int64, shape (1,)
            No further step once this is not 0.
        """
        bound = self._prepared(step)
        if key not in bound.repeated:
            if len(bound.repeated) >= MAX_BOUND:
                bound.repeated.clear()
            bound.repeated[key] = self._with_further(bound, further(bound))
        *before, last = bound.repeated[key]
        if not before:
            self._run_segment(last, repeat=n, stop=stop)
            return
        for _ in range(n):  # some op is Python
            for segment in (*before, last):
                self._run_segment(segment)
            if stop[0]:
                return

    @staticmethod
    def _with_further(bound: Bound, calls: Sequence[GraphNode]) -> list[Segment | PythonOp]:
        """Return a step's segments with further calls at the end of the last one."""
        *before, last = bound.segments
        assert isinstance(last, Segment)  # it makes the logits
        joined = CpuGraph([*last.calls.calls, *calls], last.calls.n_threads)
        return [*before, Segment(joined, (*last.kinds, *("draw" for _ in calls)))]

    def _run_segment(self, segment: Segment | PythonOp, **options: Any) -> None:
        if self.seconds is not None:
            self._run_timed(segment, self.seconds, **options)
        elif isinstance(segment, Segment):
            run_graph(segment.calls, **options)
        else:
            segment.call()

    @staticmethod
    def _run_timed(
        segment: Segment | PythonOp, seconds: defaultdict[str, float], **options: Any
    ) -> None:
        started = time.perf_counter()
        if not isinstance(segment, Segment):
            segment.call()
            seconds[segment.kind] += time.perf_counter() - started
            return
        cycles = np.zeros(len(segment.kinds), np.int64)
        run_graph(segment.calls, cycles=cycles, **options)
        spent = time.perf_counter() - started
        count_kernel_seconds(spent)
        for kind, share in zip(segment.kinds, cycles / max(1, cycles.sum()), strict=True):
            seconds[kind] += spent * share

    def forget(self) -> None:
        """See `Executor.forget`."""
        self._bound.clear()

    # ---- binding ------------------------------------------------------------------------------

    def _prepared(self, step: Step) -> Bound:
        """Return the program bound for a step's shape, with the step's numbers in its arrays."""
        key = *step.size, len(step.pages.kv_lens), get_num_threads()
        bound = self._bound.pop(key, None)
        if bound is None or bound.storages != self._storages() or not _holds(bound.room, step):
            stale = bound is not None and bound.storages != self._storages()
            if self._reserve(*step.size) or stale:
                self._bound.clear()
            while len(self._bound) >= MAX_BOUND:  # the one used longest ago goes first
                del self._bound[next(iter(self._bound))]
            bound = self._bound[key] = self._bind(step)
            return bound
        self._bound[key] = bound
        bound.arrays.load(step)
        if bound.attention is not None:
            bound.attention.fill()
        return bound

    def _storages(self) -> tuple[int, int]:
        return self.storage.version, 0 if self.memory is None else self.memory.version

    def _bind(self, step: Step) -> Bound:
        room = _room(step.pages), 0 if step.memory is None else _room(step.memory)
        arrays = StepArrays(*step.size, len(step.pages.kv_lens), *room)
        arrays.load(step)
        binder = Binder(self, arrays)
        segments: list[Segment | PythonOp] = []
        waiting: list[tuple[str, GraphNode]] = []

        def close() -> None:
            if waiting:
                kinds, calls = zip(*waiting, strict=True)
                segments.append(Segment(CpuGraph(calls, get_num_threads()), kinds))
                waiting.clear()

        for op, made in binder.ops():
            if self.observe is not None and op.weights:
                close()
                inputs = tuple(self.view(name, *step.size) for name in op.inputs)
                segments.append(PythonOp("observe", partial(self.observe, op, inputs)))
            if isinstance(made, PythonOp):
                close()
                segments.append(made)
            else:
                waiting.extend((op.kind, call) for call in made)
        close()
        return Bound(arrays, binder.attention, segments, self._storages(), room)


def _room(pages: PageView) -> int:
    """Return for how many page numbers room is made: a power of two, so that it lasts a while."""
    return max(LEAST_ROOM, 1 << (len(pages.kv_indices) - 1).bit_length())


def _holds(room: tuple[int, int], step: Step) -> bool:
    n_memory = 0 if step.memory is None else len(step.memory.kv_indices)
    return len(step.pages.kv_indices) <= room[0] and n_memory <= room[1]
