"""Run a program with the Numba CPU kernels.

The program is bound once per shape of step: ops become compiled calls (`nbflow.executor.bind`), and
the calls between two communication ops become one captured graph, which the thread pool runs
without Python.  A step copies its index arrays, plans attention and runs the graphs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from nbflow.executor.bind import Binder, PythonOp
from nbflow.executor.executor import Executor
from nbflow.executor.expert_bias import expert_biases, moe_arguments
from nbflow.executor.matmul_op import is_block_quantized
from nbflow.executor.step import Step
from nbflow.executor.step_buffers import StepArrays
from nbflow.kv_cache.block_table import PageView
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode
from nbflow_kernels.cpu.parallel_for import count_kernel_seconds, get_num_threads, run_graph
from nbflow_kernels.formats import QuantTensor
from nbflow_kernels.moe.cpu_captured import ExpertLayer, Scratch
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows

MAX_BOUND = 128
"""Bound shapes kept, about 15 KB a layer each; an LRU limit, as prompts have many lengths.
Continuous batching uses some dozens."""
MIN_PAGES = 32
"""Page numbers that a bound step has room for at least: up to 32 pages of 64 tokens, attention
needs no split-KV merge."""


@dataclass
class Segment:
    """Captured graph of the ops between two Python ops."""

    calls: CpuGraph
    kinds: tuple[str, ...]
    """Kind of op of each call."""


@dataclass
class BoundProgram:
    """Program bound to one shape of step."""

    arrays: StepArrays
    attention: Any
    """`AttentionPlanGroup`; None without layers."""
    segments: list[Segment | PythonOp]
    storages: tuple[int, ...]
    """Versions of the KV storages and states it was bound to."""
    page_capacity: tuple[int, int]
    """Page numbers that its arrays hold, of the sequences and of the encoder."""
    repeated: dict[Any, list[Segment | PythonOp]] = field(default_factory=dict)
    """Segments of a step followed by sampling calls, by key; see `CpuExecutor.run_repeated`."""


class CpuExecutor(Executor):
    """Executor of one rank's program on the CPU; parameters as in `Executor`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._int8_rows: dict[int, Int8Rows] = {}  # by number of columns
        self._scratch: dict[tuple[str, int], np.ndarray] = {}  # by name and number of columns
        self._expert_layers: dict[int, tuple[Any, ExpertLayer]] = {}
        """Matrices and layer of each `experts` op, by its index."""
        self.scratch = Scratch(self._scratch_floats, self.int8_rows)
        """Buffers of captured layers of experts."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the buffers and of the rotary tables."""
        own = sum(rows.nbytes for rows in self._int8_rows.values())
        return super().workspace_bytes + own + sum(x.nbytes for x in self._scratch.values())

    def expert_layer(self, index: int) -> ExpertLayer:
        """Return the layer of an `experts` op, made when its matrices are new."""
        op, matrices = self.program.ops[index], self.weights.operands[index]
        made_of, layer = self._expert_layers.get(index, (None, None))
        if layer is None or made_of is not matrices:
            bias = expert_biases(op, self.program.spec, self.weights.bias[index])
            arguments = moe_arguments(op, matrices, bias)
            layer = ExpertLayer(**arguments, activations=self.activations)
            self._expert_layers[index] = matrices, layer
        return layer

    def _scratch_floats(self, name: str, n_rows: int, n_columns: int) -> np.ndarray:
        """Return a float32 buffer; ops use those of one name and width in turn."""
        key = name, n_columns
        if key not in self._scratch or len(self._scratch[key]) < n_rows:
            self._scratch[key] = np.zeros((n_rows, n_columns), np.float32)
        return self._scratch[key][:n_rows]

    def int8_rows(self, n_rows: int, n_columns: int) -> Int8Rows:
        """Return a buffer for int8 activations; ops of one width share it in turn."""
        rows = self._int8_rows.get(n_columns)
        if rows is None or len(rows.codes) < n_rows:
            rows = self._int8_rows[n_columns] = Int8Rows.empty(n_rows, n_columns)
        return rows.first(n_rows)

    def gathered_rows(self, n_rows: int, n_columns: int) -> np.ndarray:
        """Return a buffer for activations in another order of columns, shared as `int8_rows`."""
        return self._scratch_floats("gathered", n_rows, n_columns)

    def reserve(self, n_tokens: int, n_logits: int) -> None:
        """Allocate buffers for steps of this size."""
        super().reserve(n_tokens, n_logits)
        moe = self.program.spec.moe
        for index, (op, operands) in enumerate(
            zip(self.program.ops, self.weights.operands, strict=True)
        ):
            if op.kind == "experts" and moe is not None:
                columns = self.program.buffers[op.inputs[0]].width
                self.expert_layer(index).reserve(columns, n_tokens, moe.top_k, self.scratch)
            if op.kind != "linear":
                continue
            rows = self.program.buffers[op.inputs[0]].n_rows(n_tokens, n_logits, n_logits)
            for weight in operands:
                if not isinstance(weight, QuantTensor):
                    continue
                if self.activations == "int8" and is_block_quantized(weight):
                    self.int8_rows(rows, weight.n_stored_columns)
                if weight.column_order is not None:
                    self.gathered_rows(rows, weight.n_stored_columns)

    def release_buffers(self) -> None:
        """Free the buffers of steps; the next step allocates those it needs."""
        super().release_buffers()
        self._int8_rows.clear()
        self._scratch.clear()

    def run(self, step: Step) -> None:
        """Run the program once; results are in its buffers."""
        segments = self._prepared(step).segments
        self._trace_begin(step)
        for segment in segments:
            self._run_segment(segment)
        self._trace_end()

    def run_repeated(
        self,
        step: Step,
        key: Any,
        sampling_calls: Callable[[BoundProgram], Sequence[GraphNode]],
        n: int,
        stop: Any,
    ) -> None:
        """Run up to `n` decode steps, each followed by sampling calls.

        The sampling calls write the next tokens into the step's arrays, so that no Python runs
        between two tokens.  They are cached under `key`.  A nonzero ``stop[0]`` ends the loop.
        """
        bound = self._prepared(step)
        if key not in bound.repeated:
            if len(bound.repeated) >= MAX_BOUND:
                bound.repeated.clear()
            bound.repeated[key] = self._with_calls(bound, sampling_calls(bound))
        *before, last = bound.repeated[key]
        if not before:
            self._run_segment(last, repeat=n, stop=stop)
            return
        for _ in range(n):  # some ops are Python
            self._trace_begin(step)
            for segment in (*before, last):
                self._run_segment(segment)
            self._trace_end()
            if stop[0]:
                return

    @staticmethod
    def _with_calls(bound: BoundProgram, calls: Sequence[GraphNode]) -> list[Segment | PythonOp]:
        """Return a step's segments with calls appended to the last one."""
        *before, last = bound.segments
        if not isinstance(last, Segment):  # a trace
            before, last = bound.segments, Segment(CpuGraph([], get_num_threads()), ())
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

    # ---- binding ------------------------------------------------------------------------------

    def _prepared(self, step: Step) -> BoundProgram:
        """Return the program bound to the step's shape, with the step loaded into its arrays."""
        key = *step.size, len(step.pages.kv_lens), get_num_threads()
        bound: BoundProgram | None = self._bound.pop(key, None)
        stale = bound is not None and bound.storages != self._storages()
        if bound is None or stale or not _holds(bound.page_capacity, step):
            if self._reserve(*step.size) or stale:
                self._bound.clear()
            self._make_room(MAX_BOUND)
            bound = self._bound[key] = self._bind(step)
            return bound
        self._bound[key] = bound
        bound.arrays.load(step)
        if bound.attention is not None:
            bound.attention.fill()
        return bound

    def _bind(self, step: Step) -> BoundProgram:
        cross = step.cross_pages
        capacity = _page_capacity(step.pages), 0 if cross is None else _page_capacity(cross)
        arrays = StepArrays(*step.size, len(step.pages.kv_lens), *capacity)
        arrays.load(step)
        binder = Binder(self, arrays)
        segments: list[Segment | PythonOp] = []
        pending: list[tuple[str, GraphNode]] = []

        def end_segment() -> None:
            if pending:
                kinds, calls = zip(*pending, strict=True)
                segments.append(Segment(CpuGraph(calls, get_num_threads()), kinds))
                pending.clear()

        for op, bound_op in binder.ops():
            if self.observe is not None and op.weights:
                end_segment()
                inputs = tuple(self.view(name, *step.size) for name in op.inputs)
                segments.append(PythonOp("observe", partial(self.observe, op, inputs)))
            if isinstance(bound_op, PythonOp):
                end_segment()
                segments.append(bound_op)
            else:
                pending.extend((op.kind, call) for call in bound_op)
            if self.trace is not None:
                end_segment()
                segments.append(PythonOp("trace", partial(self._trace_op, op)))
        end_segment()
        return BoundProgram(arrays, binder.attention, segments, self._storages(), capacity)


def _page_capacity(pages: PageView) -> int:
    """Return the capacity for page numbers: a power of two, so that few steps rebind."""
    return max(MIN_PAGES, 1 << (len(pages.kv_indices) - 1).bit_length())


def _holds(capacity: tuple[int, int], step: Step) -> bool:
    n_cross_pages = 0 if step.cross_pages is None else len(step.cross_pages.kv_indices)
    return len(step.pages.kv_indices) <= capacity[0] and n_cross_pages <= capacity[1]
