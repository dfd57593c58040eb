"""Run a program with the CUDA kernels, on a device or in the emulator.

Weights, pages, buffers and the step's numbers live on the device; a step copies its numbers there
once, through pinned memory, starts its kernels on a stream of the executor's own, and waits for
nothing.  Only what is asked for (`buffer`) comes back.

Steps that give each sequence one token, or all together a few, are bound for a number of sequences,
tokens and pages, from the second time on as CUDA graphs (`nbflow.executor.cuda_graphs`).
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow.executor.bind import PythonOp
from nbflow.executor.bind_cuda import CudaBinder
from nbflow.executor.cuda_fusion import find_fusions
from nbflow.executor.cuda_graphs import StepGraphs, batch_bucket, capture, page_bucket
from nbflow.executor.executor import Executor
from nbflow.executor.step import Step
from nbflow.executor.step_buffers import DeviceArrays, PaddedArrays, Staging, StepArrays
from nbflow.program.records import COMMUNICATION
from nbflow.utils.rank_status import status
from nbflow_kernels.attention.cuda.plan import StaticPlanBuffers
from nbflow_kernels.cuda import device_of
from nbflow_kernels.cuda.workspace import buffers, release
from nbflow_kernels.quantized_matmul.cuda import FEW

MAX_BOUND = 32
"""Bound shapes kept."""
MOST_PINNED_BYTES = 1 << 26
"""Larger arrays (the logits of a long prompt) go through ordinary memory: what is pinned is taken
from all programs of the machine."""
ROWS_OF_THEIR_OWN = COMMUNICATION | {"experts"}
"""Ops that take exactly the rows of a step: more would be sent, or read experts for nothing."""


@dataclass
class Bound:
    """A program bound for one shape of step."""

    host: StepArrays
    device: DeviceArrays
    attention: Any
    """Divides the attention's work; None without layers."""
    tables: list[StaticPlanBuffers]
    """What the attention reads, of shapes that graphs are captured of."""
    ops: list[PythonOp]
    storages: tuple[int, int]
    """Versions of the storages it was bound to."""
    scratch: list[Any]
    """Arrays of its ops."""
    n_runs: int = 0
    graphs: StepGraphs | None = None

    @property
    def n_bytes(self) -> int:
        """Return what it holds on the device besides buffers."""
        kinds = () if self.attention is None else self.attention.kinds
        plans = [plan for kind in kinds for plan in kind.plan.on_devices.values()]
        graphs = 0 if self.graphs is None else self.graphs.n_bytes + self.graphs.pool.total_bytes()
        arrays = sum(int(array.nbytes) for array in self.scratch)
        total: int = self.device.n_bytes + arrays + sum(plan.n_bytes for plan in plans) + graphs
        return total

    def load(self, step: Step) -> None:
        """Take the numbers of another step of this shape."""
        self.host.load(step)
        if self.attention is not None:
            self.attention.fill()
        for table in self.tables:
            table.fill()


class CudaExecutor(Executor):
    """Executor of one rank's program on a CUDA device; parameters as of `Executor`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        cuda = self.place.xp.cuda
        self._bound: dict[tuple[Any, ...], Bound] = {}
        self.fusions = find_fusions(self.program)
        self._stream = cuda.Stream(non_blocking=True)
        self._events = [cuda.Event(disable_timing=True) for _ in range(2)]
        self._landed = cuda.Event(disable_timing=True)
        self._staging = Staging(self.place)
        self._pinned: dict[str, np.ndarray] = {}
        self._graphs_wanted = self.place.graphs
        self._finalizer: Any = None
        self.steps_by_graph, self.steps_by_kernel = 0, 0
        """Steps that were started as graphs, and kernel by kernel."""

    def forget(self) -> None:
        """See `Executor.forget`."""
        self._bound.clear()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Give work to the executor's stream, behind what the caller's stream has been given.

        The caller's stream then waits for it: nobody else needs to know that there is another one.
        """
        outer = self.place.xp.cuda.get_current_stream()
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
        """Return the first rows of a buffer, as the last step left them, in host memory.

        The next call for the same buffer may write to the same memory.
        """
        view = self.view(name, n_rows, n_rows, n_rows)
        with self._own_stream():
            return self.to_host(view, name)

    # ---- pinned memory ------------------------------------------------------------------------

    def _memory(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return host memory, float32: pinned and the same for a name, but for large arrays."""
        size = int(np.prod(shape))
        if 4 * size > MOST_PINNED_BYTES:
            return np.empty(shape, np.float32)
        have = self._pinned.get(name)
        if have is None or len(have) < size:
            memory = self.place.xp.cuda.alloc_pinned_memory(4 * max(size, 1))
            have = self._pinned[name] = np.frombuffer(memory, np.float32, max(size, 1))
        return have[:size].reshape(shape)

    def to_host(self, x: Any, name: str = "sent") -> np.ndarray:
        """Wait for an array and return its contents, where those of the next one will be."""
        found: np.ndarray = x.get(out=self._memory(name, x.shape))
        return found

    def landing(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return memory to fill and give to `to_device`."""
        self._landed.synchronize()  # what was there may still be on its way
        return self._memory("received", shape)

    def to_device(self, host: np.ndarray, x: Any) -> None:
        """Start the copy of memory from `landing` to an array."""
        if host.nbytes > MOST_PINNED_BYTES:
            x.set(host)
            return
        x.data.copy_from_host_async(host.ctypes.data, host.nbytes, self._stream)
        self._landed.record(self._stream)

    @property
    def step_bytes(self) -> int:
        """Return what lies on the device besides weights, pages and buffers.

        The numbers of steps and the division of attention's work, what thread blocks share while
        they run, and graphs.
        """
        with self._stream:
            shared = buffers(self._device) if self._buffers else []
        bound = sum(b.n_bytes for b in self._bound.values())
        return sum(int(piece.nbytes) for piece in shared) + bound

    def report(self) -> str:
        """Return how the steps so far were started."""
        n_steps = self.steps_by_graph + self.steps_by_kernel
        n_shapes = sum(bound.graphs is not None for bound in self._bound.values())
        return (
            f"{self.place.name}: {self.steps_by_graph} of {n_steps} steps as CUDA graphs, of "
            f"{n_shapes} shapes"
        )

    def run(self, step: Step) -> None:
        """Start the kernels of one step; results are in its buffers when the device is done."""
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
                    for op in bound.ops:
                        op.call()
                    self.steps_by_kernel += 1
                bound.n_runs += 1
        except BaseException as error:
            status.failed()
            if isinstance(error, MemoryError):
                place = self.place.purposed("what kernels write in passing")
                raise place.full(None, error) from error
            raise
        if self.comm.size > 1:
            status.idle()

    def _run_timed(self, bound: Bound) -> None:
        """Run op by op, and add up the time of each kind."""
        assert self.seconds is not None
        for op in bound.ops:
            self._stream.synchronize()
            started = time.perf_counter()
            op.call()
            self._stream.synchronize()
            self.seconds[op.kind] += time.perf_counter() - started

    def _has_graphs(self, bound: Bound) -> bool:
        """Return whether a step runs as graphs, which are captured when it is due."""
        if bound.graphs is None and bound.tables and self._graphs_wanted and bound.n_runs:
            try:
                bound.graphs = capture(bound.ops, self.place.xp, self._stream, self._device)
            except (RuntimeError, MemoryError) as error:  # the driver's: go on kernel by kernel
                self._graphs_wanted = False
                warnings.warn(
                    f"a step could not be captured into a CUDA graph ({error}); its kernels are "
                    "started one by one. graphs=False says so from the start",
                    RuntimeWarning,
                    stacklevel=4,
                )
        return bound.graphs is not None

    # ---- binding ------------------------------------------------------------------------------

    @property
    def _device(self) -> Any:
        return device_of(next(iter(self._buffers.values())))

    def _shape(self, step: Step) -> tuple[int, ...]:
        """Return what a step is bound for: tokens, hidden states, logits, sequences, pages.

        In front of them how many tokens a sequence may have, or 0 if no graph is made.
        """
        (n, n_states, n_logits), n_sequences = step.size, len(step.pages.kv_lens)
        n_pages = page_bucket(len(step.pages.kv_indices))
        n_memory = 0 if step.memory is None else page_bucket(len(step.memory.kv_indices))
        one_each, causal = n == n_logits == n_sequences, self.program.spec.causal
        few = (one_each or n <= FEW) and bool(self.program.layers)
        if not few or self.memory_is_missing(step) or not causal:
            return 0, n, n_states, n_logits, n_sequences, n_pages, n_memory
        if not any(op.kind in ROWS_OF_THEIR_OWN for op in self.program.ops):
            n, n_states, n_logits, n_sequences = map(
                batch_bucket, (n, n_states, n_logits, n_sequences)
            )
        return 1 if one_each else n, n, n_states, n_logits, n_sequences, n_pages, n_memory

    def memory_is_missing(self, step: Step) -> bool:
        """Return whether the program attends to an encoder that the step has nothing of."""
        return self.memory is not None and step.memory is None

    def _prepared(self, step: Step) -> Bound:
        """Return the program bound for a step's shape, with the step's numbers in its arrays."""
        key = self._shape(step)
        bound = self._bound.pop(key, None)
        storages = self.storage.version, 0 if self.memory is None else self.memory.version
        if self._reserve(*key[1:4]):
            self._bound.clear()
            bound = None
        if bound is not None and bound.storages != storages:
            self._bound.clear()  # the others hold pages that are no more, too
            bound = None
        if bound is None:
            while len(self._bound) >= MAX_BOUND:  # the one used longest ago goes first
                del self._bound[next(iter(self._bound))]
            bound = self._bind(step, key, storages)
        else:
            bound.load(step)
        self._bound[key] = bound
        return bound

    def _bind(self, step: Step, key: tuple[Any, ...], storages: tuple[int, int]) -> Bound:
        if self._finalizer is None:  # what kernels share is kept for each stream
            streams = self._device.key, self._device.stream
            self._finalizer = weakref.finalize(self, release, *streams)
        rows_each, *sizes = key
        host = (PaddedArrays if rows_each else StepArrays)(*sizes)
        host.load(step)
        binder = CudaBinder(self, host, rows_each, self.fusions)
        ops = [op for _, op in binder.ops() if isinstance(op, PythonOp)]
        return Bound(
            host, binder.arrays, binder.attention, binder.tables, ops, storages,
            binder.scratch,
        )  # fmt: skip
