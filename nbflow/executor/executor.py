"""Base class of executors: program, weights, KV pages, buffers and communicators of one rank."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.distributed.comm import Comm, SelfComm
from nbflow.distributed.device import HOST, Device
from nbflow.distributed.device_comms import DeviceComms
from nbflow.executor.device_memory import DeviceMemory
from nbflow.executor.step import Step
from nbflow.executor.trace import TracePrinter
from nbflow.executor.weight_loader import WeightLoader
from nbflow.kv_cache.state_storage import StateStorage
from nbflow.kv_cache.storage import KVStorage
from nbflow.program.records import Op, Program
from nbflow.spec.layer_specs import RopeSpec

MIN_ROWS = 8
"""Rows that a buffer has at least."""


class Executor:
    """Executor of one rank's program.

    Parameters
    ----------
    program : Program
        The rank's program.
    weights : WeightLoader
        Its weights, finalized.
    storage : KVStorage
        Its KV cache.
    comm : Comm
        All ranks of the model.
    numbers : tuple of int
        Rank number in the partition string of each rank of `comm`.
    activations : {"f32", "int8", "bf16"}
        Arithmetic of matrix products with weights.
    cross_storage : KVStorage, optional
        KV cache of the encoder's hidden states, for cross-attention.
    device : Device
        Device of weights, KV cache and buffers.
    states : StateStorage, optional
        Recurrent states; none by default.
    """

    def __init__(
        self,
        program: Program,
        weights: WeightLoader,
        storage: KVStorage,
        comm: Comm | None = None,
        numbers: tuple[int, ...] = (0,),
        activations: str = "f32",
        cross_storage: KVStorage | None = None,
        device: Device = HOST,
        states: StateStorage | None = None,
    ) -> None:
        self.program = program
        self.states = states or StateStorage({})
        self.storage = storage
        self.cross_storage = cross_storage
        self.external_rows = np.zeros((0, 0), np.float32)
        """Rows that an `input` op copies in."""
        self.weights = weights
        self.comm = comm or SelfComm()
        self.numbers = numbers
        self.activations = activations
        self.groups: dict[tuple[int, ...], Comm] = {}
        self.device_comms = DeviceComms()
        self.seconds: defaultdict[str, float] | None = None
        """Seconds by kind of op; set it to a defaultdict to switch timing on."""
        self.observe: Callable[[Op, tuple[np.ndarray, ...]], None] | None = None
        """Hook called with each op that has weights and its inputs; set it before the first step.
        Of `CpuExecutor` only."""
        self.trace: TracePrinter | None = None
        """Trace of each op's time and output; set it before the first step."""
        self._traced_at, self._traced_size = 0.0, (0, 0, 0)
        self.device = device
        self.device_memory = DeviceMemory(device)
        self._buffers: dict[str, Any] = {}
        self._bound: dict[tuple[Any, ...], Any] = {}  # bound programs by shape, LRU first
        self.rope_tables: dict[RopeSpec, Any] = {}
        """Rotary tables of all positions, made on first use; executors may share them."""

    def rope_table(self, rope: RopeSpec) -> Any:
        """Return the rotary table: the rows for short sequences, then those for long ones."""
        if rope not in self.rope_tables:
            device, spec = self.device.for_purpose("the rotary angles"), self.program.spec
            try:
                parts = [
                    nk.rope_cos_sin_cache(n, rope.dim, theta=rope.theta, scaling=rope.scaling)
                    for n in spec.rope_lengths
                ]
                table = np.concatenate(parts)
            except MemoryError as error:  # a checkpoint may state millions of positions
                raise device.full(4 * sum(spec.rope_lengths) * rope.dim, error) from error
            self.rope_tables[rope] = device.put(table)
        return self.rope_tables[rope]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the buffers and of the rotary tables."""
        arrays = (*self._buffers.values(), *self.rope_tables.values())
        return sum(int(array.nbytes) for array in arrays)

    @property
    def step_bytes(self) -> int:
        """Bytes on a device that bound steps hold in addition to the buffers."""
        return 0

    @property
    def graph_bytes(self) -> int:
        """Bytes of CUDA graphs, a part of `step_bytes`."""
        return 0

    def report(self) -> str:
        """Return a line on how steps ran (CUDA graphs); empty on the CPU."""
        return ""

    def set_groups(
        self, groups: dict[tuple[int, ...], Comm], device_comms: DeviceComms | None = None
    ) -> None:
        """Set the communicators of the stages, by rank numbers, and those of device arrays."""
        self.groups = groups
        self.device_comms = device_comms or DeviceComms()

    def run(self, step: Step) -> None:
        """Run the program once; results are in its buffers."""
        raise NotImplementedError

    def _trace_begin(self, step: Step) -> None:
        if self.trace is not None:
            self.trace.begin(self.program.spec.name, len(step.ids), step.n_logits)
            self._traced_at, self._traced_size = time.perf_counter(), step.size

    def _trace_op(self, op: Op) -> None:
        """Trace an op that has just run; the time of printing does not count."""
        assert self.trace is not None
        seconds = time.perf_counter() - self._traced_at
        name = op.out if op.out in self.program.buffers else next(iter(op.inputs), "")
        output = self.view(name, *self._traced_size) if name in self.program.buffers else None
        self.trace.op(op, output, seconds)
        self._traced_at = time.perf_counter()

    def _trace_end(self) -> None:
        if self.trace is not None:
            self.trace.end()

    def release_bindings(self) -> None:
        """Drop cached step bindings, their graphs and their references to KV pages."""
        self._bound.clear()

    def release_buffers(self) -> None:
        """Free the buffers of steps; the next step allocates those it needs."""
        self.release_bindings()
        self._buffers.clear()

    def _make_room(self, most: int) -> None:
        """Drop the least recently used bindings until fewer than `most` are left."""
        while len(self._bound) >= most:
            del self._bound[next(iter(self._bound))]

    def _storages(self) -> tuple[int, ...]:
        """Return the versions of the KV storages and of the recurrent states."""
        cross = 0 if self.cross_storage is None else self.cross_storage.version
        return self.storage.version, cross, self.states.version

    def sizes(self, step: Step) -> list[tuple[int, int]]:
        """Return tokens and rows of logits of each part of a step; usually the step is one part."""
        return [(len(step.ids), step.n_logits)]

    def buffer(self, name: str, n_rows: int) -> np.ndarray:
        """Return the first rows of a buffer after the last step, in host memory."""
        found: np.ndarray = self.view(name, n_rows, n_rows, n_rows)
        return found

    def logits(self, n_rows: int) -> Any:
        """Return the last step's logits on their device; a copy to the host synchronizes."""
        found = self.view("logits", n_rows, n_rows, n_rows)
        return found if found.flags.c_contiguous else self.buffer("logits", n_rows)

    def view(self, name: str, n_tokens: int, n_states: int, n_logits: int) -> Any:
        """Return a buffer's rows for a step of this size (`Step.size`)."""
        buffer = self.program.buffers[name]
        rows = buffer.n_rows(n_tokens, n_states, n_logits)
        if buffer.base is None:
            return self._buffers[name][:rows]
        columns = slice(buffer.offset, buffer.offset + buffer.width)
        return self._buffers[buffer.base][:rows, columns]

    def reserve(self, n_tokens: int, n_logits: int) -> None:
        """Allocate buffers for steps of this size."""
        self._reserve(n_tokens, n_logits, n_logits)

    def _reserve(self, n_tokens: int, n_states: int, n_logits: int) -> bool:
        """Grow the buffers where needed; return True if any was replaced."""
        device = self.device.for_purpose("the buffers of a step")
        grown = False
        for name, buffer in self.program.buffers.items():
            rows = buffer.n_rows(n_tokens, n_states, n_logits)
            current = self._buffers.get(name)
            if buffer.base is None and (current is None or len(current) < rows):
                shape = (max(rows, MIN_ROWS), buffer.width)
                self._buffers[name] = device.zeros(shape, np.float32)
                grown = True
        return grown
