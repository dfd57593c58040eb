"""Run a program with the CUDA kernels, on a device or in the emulator.

Weights, KV pages, buffers and index arrays live on the device.  A step copies its index arrays once
through pinned memory, launches its kernels on the executor's stream and does not synchronize;
`buffer` copies results to the host.

Steps are bound to buckets of sequences, tokens and pages, and run as CUDA graphs from the second
time on (`nbflow.executor.cuda_graphs`), except long prompts and encoders.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nbflow.executor.bind import PythonOp
from nbflow.executor.bind_cuda import CudaBinder
from nbflow.executor.cuda_fusion import find_fusions
from nbflow.executor.cuda_graphs import (
    MAX_PROMPT_GRAPH_BYTES,
    MAX_PROMPT_GRAPHS,
    MAX_PROMPT_TOKENS,
    CollectiveOp,
    RecordedOps,
    StepGraphs,
    batch_bucket,
    capture,
    page_bucket,
    prompt_bucket,
    record,
)
from nbflow.executor.executor import Executor
from nbflow.executor.step import Step
from nbflow.executor.step_buffers import CudaStepArrays, Staging, StepArrays
from nbflow.program.records import COMMUNICATION, Op
from nbflow.utils.rank_status import status
from nbflow_kernels.attention.cuda.plan import StaticPlanBuffers
from nbflow_kernels.cuda import device_of
from nbflow_kernels.cuda.workspace import buffers, release
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantized_matmul.cuda import GEMV_MAX_ROWS

MAX_BOUND = 32
"""Bound shapes kept."""
MAX_PINNED_BYTES = 1 << 26
"""Larger arrays (logits of a long prompt) go through pageable memory: pinned memory is scarce."""
UNPADDED_OPS = COMMUNICATION | {"experts", "input"}
"""Ops that must not see padding rows: these would be sent, would load experts in vain, or are not
in the rows that are copied in."""


@dataclass
class BoundProgram:
    """Program bound to one shape of step."""

    host: StepArrays
    device: CudaStepArrays
    attention: Any
    """`AttentionPlanGroup`; None without layers."""
    tables: list[StaticPlanBuffers]
    """Static attention plans of shapes that become graphs."""
    ops: list[PythonOp]
    storages: tuple[int, ...]
    """Versions of the KV storages it was bound to."""
    scratch: list[Any]
    """Scratch arrays of its ops."""
    workspaces: list[Any]
    """Kernel workspaces whose addresses its attention plans hold."""
    is_prompt: bool
    """True for a step with prompts, whose graphs are limited in number and bytes."""
    n_runs: int = 0
    graphs: StepGraphs | None = None
    recorded: RecordedOps | None = None
    fits: bool = True
    """False if its graphs alone take more than the limit."""

    @property
    def n_bytes(self) -> int:
        """Bytes on the device in addition to buffers, graphs and shared workspaces."""
        kinds = () if self.attention is None else self.attention.kinds
        plans = [plan for kind in kinds for plan in kind.plan.on_devices.values()]
        arrays = sum(int(array.nbytes) for array in self.scratch)
        of_plans: int = sum(plan.n_bytes for plan in plans)
        return self.device.n_bytes + arrays + of_plans

    @property
    def shared(self) -> list[Any]:
        """Kernel workspaces that it keeps alive; other steps may use them, too."""
        holders = (self.graphs, self.recorded)
        return self.workspaces + [a for h in holders if h is not None for a in h.keep]

    def load(self, step: Step) -> None:
        """Load another step of this shape."""
        self.host.load(step)
        if self.attention is not None:
            self.attention.fill()
        for table in self.tables:
            table.fill()


class CudaExecutor(Executor):
    """Executor of one rank's program on a CUDA device; parameters as in `Executor`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        ops = any(op.kind == "plugin" for op in self.program.ops)
        if ops or self.program.spec.attention is not None:
            what = "ops" if ops else "attention variants"
            raise UsageError(
                f"{self.program.spec.name}: {what} of plugins run on the CPU in models; load it "
                "with device='cpu'"
            )
        cuda = self.device.xp.cuda
        self.fusions = find_fusions(self.program)
        self._stream = cuda.Stream(non_blocking=True)
        self._events = [cuda.Event(disable_timing=True) for _ in range(2)]
        self._copied = cuda.Event(disable_timing=True)
        self._staging = Staging(self.device)
        self._pinned: dict[str, np.ndarray] = {}
        self._graphs_wanted = self._collectives_wanted = self.device.graphs
        self._prompts_wanted = self.device.graphs
        self._pool: Any = None
        """Pool of scratch arrays of all graphs and recorded launches: they run one by one."""
        self._reserved: tuple[int, ...] = (0, 0, 0)
        """Largest numbers of tokens, hidden states and logits that buffers were reserved for."""
        self._finalizer: Any = None
        self.steps_by_graph, self.steps_by_kernel = 0, 0
        """Steps that ran as graphs, and kernel by kernel."""

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Run work on the executor's stream, ordered with the caller's stream on both sides."""
        outer = self.device.xp.cuda.get_current_stream()
        before, after = self._events
        outer.record(before)
        self._stream.wait_event(before)
        try:
            with self._stream:
                yield
        finally:
            self._stream.record(after)
            outer.wait_event(after)

    def buffer(self, name: str, n_rows: int) -> np.ndarray:
        """Return the first rows of a buffer after the last step, in host memory.

        The next call for the same buffer may overwrite the array.
        """
        view = self.view(name, n_rows, n_rows, n_rows)
        with self._own_stream():
            return self.to_host(view, name)

    # ---- pinned memory ------------------------------------------------------------------------

    def _host_array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a float32 host array: pinned and reused by name, except for large ones."""
        size = int(np.prod(shape))
        if 4 * size > MAX_PINNED_BYTES:
            return np.empty(shape, np.float32)
        pinned = self._pinned.get(name)
        if pinned is None or len(pinned) < size:
            memory = self.device.xp.cuda.alloc_pinned_memory(4 * max(size, 1))
            pinned = self._pinned[name] = np.frombuffer(memory, np.float32, max(size, 1))
        return pinned[:size].reshape(shape)

    def to_host(self, x: Any, name: str = "sent") -> np.ndarray:
        """Synchronize and return a copy of an array in a reused host array."""
        found: np.ndarray = x.get(out=self._host_array(name, x.shape))
        return found

    def staging_array(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return a host array to fill and pass to `to_device`."""
        self._copied.synchronize()  # the previous copy may still be in flight
        return self._host_array("received", shape)

    def to_device(self, host: np.ndarray, x: Any) -> None:
        """Start the copy of a `staging_array` to a device array."""
        if host.nbytes > MAX_PINNED_BYTES:
            x.set(host)
            return
        x.data.copy_from_host_async(host.ctypes.data, host.nbytes, self._stream)
        self._copied.record(self._stream)

    @property
    def step_bytes(self) -> int:
        """Bytes on the device in addition to weights, pages and buffers.

        Index arrays, attention plans, kernel workspaces and graphs.
        """
        with self._stream:
            shared = buffers(self._kernel_device) if self._buffers else []
        bound: int = sum(b.n_bytes for b in self._bound.values())
        shared = [*shared, *(piece for b in self._bound.values() for piece in b.shared)]
        once = {id(piece): int(piece.nbytes) for piece in shared}
        return sum(once.values()) + bound + self.graph_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes of CUDA graphs, and of scratch arrays of these and of recorded launches."""
        graphs = [bound.graphs for bound in self._bound.values() if bound.graphs is not None]
        scratch = 0 if self._pool is None else int(self._pool.total_bytes())
        return int(sum(g.n_bytes for g in graphs)) + scratch

    def release_bindings(self) -> None:
        """See `Executor.release_bindings`."""
        super().release_bindings()
        self._pool = None

    def release_buffers(self) -> None:
        """Free the buffers of steps and the workspaces of kernels."""
        if self._buffers:
            with self._stream:
                release(self._kernel_device.key, self._kernel_device.stream)
        self._reserved = 0, 0, 0
        super().release_buffers()

    def report(self) -> str:
        """Return a line on how many steps ran as graphs."""
        n_steps = self.steps_by_graph + self.steps_by_kernel
        n_shapes = sum(bound.graphs is not None for bound in self._bound.values())
        transport, between = self.device_comms.transport, ""
        if transport is not None:
            reason = f" ({transport.reason})" if transport.reason else ""
            between = f"; arrays between ranks: {transport.name}{reason}"
        return (
            f"{self.device.name}: {self.steps_by_graph} of {n_steps} steps as CUDA graphs, of "
            f"{n_shapes} shapes{between}"
        )

    def run(self, step: Step) -> None:
        """Launch the kernels of one step; its buffers hold the results once the device is done."""
        try:
            with self._own_stream():
                bound = self._prepared(step)
                bound.device.load(self._staging, self._stream)
                if self.seconds is not None:
                    self._run_timed(bound)
                elif self._has_graphs(bound):
                    assert bound.graphs is not None
                    bound.graphs.launch()
                    self.steps_by_graph += 1
                else:
                    self._trace_begin(step)
                    self._run_ops(bound)
                    self._trace_end()
                    self.steps_by_kernel += 1
                bound.n_runs += 1
                if bound.n_runs <= 2:  # the first allocates scratch, the second graphs
                    self.device_memory.sample()
        except BaseException as error:
            status.failed()
            if isinstance(error, MemoryError):
                raise self.device.for_purpose("kernel scratch").full(None, error) from error
            raise
        if self.comm.size > 1:
            status.idle()

    def _run_ops(self, bound: BoundProgram) -> None:
        """Run the ops one by one; record their launches at the second run, and repeat them then."""
        if not bound.n_runs or self.trace is not None:
            for op in bound.ops:
                op.call()
        elif bound.recorded is None:
            bound.recorded = record(
                bound.ops, self.device.xp, self._kernel_device, self._scratch_pool()
            )
        else:
            for call in bound.recorded.calls:
                call()

    def _scratch_pool(self) -> Any:
        if self._pool is None:
            self._pool = self.device.xp.cuda.MemoryPool()
        return self._pool

    def _run_timed(self, bound: BoundProgram) -> None:
        """Run op by op and add up the seconds of each kind."""
        assert self.seconds is not None
        for op in bound.ops:
            self._stream.synchronize()
            started = time.perf_counter()
            op.call()
            self._stream.synchronize()
            self.seconds[op.kind] += time.perf_counter() - started

    def _has_graphs(self, bound: BoundProgram) -> bool:
        """Capture graphs on the second run of a shape; return True if the step runs as graphs."""
        wanted = self._prompts_wanted if bound.is_prompt else self._graphs_wanted
        wanted = wanted and self.trace is None
        if bound.graphs is None and bound.tables and wanted and bound.n_runs and bound.fits:
            if self._collectives_wanted and any(isinstance(op, CollectiveOp) for op in bound.ops):
                graphs, failure = self._capture(bound, collectives=True)
                failure = self._failure_of_ranks(graphs, failure)
                bound.graphs = None if failure else graphs
                if failure:
                    self._collectives_wanted = False
                    if all(comm.rank == 0 for comm in self.device_comms.groups.values()):
                        self._warn("a step's collectives", failure, "they run between graphs")
            if bound.graphs is None:
                bound.graphs, failure = self._capture(bound, collectives=False)
                if failure:  # of the driver: continue kernel by kernel
                    self._prompts_wanted = False
                    self._graphs_wanted &= bound.is_prompt
                    what = "a step with prompts" if bound.is_prompt else "a step"
                    self._warn(what, failure, "its kernels are launched one by one")
            if bound.is_prompt:
                self._limit_prompt_graphs(bound)
        return bound.graphs is not None

    def _limit_prompt_graphs(self, newest: BoundProgram) -> None:
        """Drop graphs of steps with prompts beyond the limits, the least recently used first.

        All ranks of a stage drop the same ones, as they capture collectives together.
        """
        kept = n_bytes = 0
        for bound in reversed(self._bound.values()):
            if not bound.is_prompt or bound.graphs is None:
                continue
            total = n_bytes + bound.graphs.n_bytes
            if kept < MAX_PROMPT_GRAPHS and total <= MAX_PROMPT_GRAPH_BYTES:
                kept, n_bytes = kept + 1, total
            else:
                bound.graphs, bound.n_runs = None, 0  # captured after another run
                bound.fits = bound is not newest

    def _capture(self, bound: BoundProgram, collectives: bool) -> tuple[StepGraphs | None, str]:
        """Return the graphs of a step, or None and the reason why the driver rejects them."""
        counters = [comm.sent for comm in self.device_comms.comms]
        try:
            return capture(
                bound.ops, self.device.xp, self._stream, self._kernel_device,
                collectives=collectives, counters=counters, pool=self._scratch_pool(),
            ), ""  # fmt: skip
        except (RuntimeError, MemoryError) as error:
            return None, str(error) or type(error).__name__

    def _failure_of_ranks(self, graphs: StepGraphs | None, failure: str) -> str:
        """Return why the ranks of this stage cannot launch their graphs; empty if they can.

        NCCL requires that all ranks capture a collective, in graphs that hold the same ones.
        """
        for comm in self.device_comms.groups.values():
            mine: tuple[str, tuple[int, ...], int] = (failure, (), 0)
            if graphs is not None:
                mine = failure, graphs.n_collectives, graphs.n_bytes
            found = comm.bcast_object(comm.gather_object(mine))
            failure = next((text for text, _, _ in found if text), failure)
            if not failure and len({held for _, held, _ in found}) > 1:
                failure = "the ranks' graphs hold different collectives"
            if graphs is not None:  # with which all ranks keep or drop the same graphs
                graphs.n_bytes = max(n_bytes for _, _, n_bytes in found)
        return failure

    @staticmethod
    def _warn(what: str, failure: str, instead: str) -> None:
        warnings.warn(
            f"{what} could not be captured into a CUDA graph ({failure}); {instead}; graphs=False "
            "avoids the attempt",
            RuntimeWarning,
            stacklevel=5,
        )

    def _trace_op(self, op: Op) -> None:
        self._stream.synchronize()
        super()._trace_op(op)

    # ---- binding ------------------------------------------------------------------------------

    @property
    def _kernel_device(self) -> Any:
        return device_of(next(iter(self._buffers.values())))

    def _shape(self, step: Step) -> tuple[int, ...]:
        """Return the shape a step is bound to, padded to buckets where it becomes a graph.

        Most tokens of a sequence (0: no graph), tokens, hidden states, logits, sequences, pages and
        pages of the encoder.  A sequence of up to 8 tokens is decoded, longer ones are prompts.
        """
        (n, n_states, n_logits), n_sequences = step.size, len(step.pages.kv_lens)
        n_pages = page_bucket(len(step.pages.kv_indices))
        n_cross_pages = (
            0 if step.cross_pages is None else page_bucket(len(step.cross_pages.kv_indices))
        )
        one_each, causal = n == n_logits == n_sequences, self.program.spec.causal
        few = one_each or n <= GEMV_MAX_ROWS
        captured = few or (self._prompts_wanted and n <= MAX_PROMPT_TOKENS)
        captured &= bool(self.program.layers) and causal and not self.lacks_cross_pages(step)
        if captured and not any(op.kind in UNPADDED_OPS for op in self.program.ops):
            rows = tuple(map(batch_bucket, step.size))
            if not few:  # buffers do not grow for padding: prompts are as long as they may be
                rows = prompt_bucket(n), *rows[1:]
                limits = map(max, step.size, self._reserved)
                rows = tuple(map(min, rows, limits))
            (n, n_states, n_logits), n_sequences = rows, batch_bucket(n_sequences)
        rows_each = 0 if not captured else 1 if one_each else n
        return rows_each, n, n_states, n_logits, n_sequences, n_pages, n_cross_pages

    def _reserve(self, n_tokens: int, n_states: int, n_logits: int) -> bool:
        sizes = n_tokens, n_states, n_logits
        self._reserved = tuple(map(max, self._reserved, sizes))
        return super()._reserve(*sizes)

    def lacks_cross_pages(self, step: Step) -> bool:
        """Return True if a cross-attending program gets a step without encoder pages."""
        return self.cross_storage is not None and step.cross_pages is None

    def _prepared(self, step: Step) -> BoundProgram:
        """Return the program bound to the step's shape, with the step loaded into its arrays."""
        key = self._shape(step)
        bound: BoundProgram | None = self._bound.pop(key, None)
        stale = bound is not None and bound.storages != self._storages()
        if self._reserve(*key[1:4]) or stale:
            self.release_bindings()  # the others also hold freed buffers or pages
            bound = None
        if bound is None:
            self._make_room(MAX_BOUND)
            bound = self._bind(step, key)
        else:
            bound.load(step)
        self._bound[key] = bound
        return bound

    def _bind(self, step: Step, key: tuple[Any, ...]) -> BoundProgram:
        if self._finalizer is None:  # kernel workspaces are kept per stream
            streams = self._kernel_device.key, self._kernel_device.stream
            self._finalizer = weakref.finalize(self, release, *streams)
        rows_each, *sizes = key
        host = StepArrays(*sizes)
        host.load(step)
        binder = CudaBinder(self, host, rows_each, self.fusions)
        ops = []
        for op, bound_op in binder.ops():
            if isinstance(bound_op, PythonOp):
                ops.append(bound_op)
                if self.trace is not None:
                    ops.append(PythonOp("trace", partial(self._trace_op, op)))
        return BoundProgram(
            host, binder.arrays, binder.attention, binder.tables, ops, self._storages(),
            binder.scratch, binder.workspaces, rows_each > GEMV_MAX_ROWS,
        )  # fmt: skip
