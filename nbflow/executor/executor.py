"""What all executors have: a program, its weights, pages and buffers, and the other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

import nbflow_kernels as nk
from nbflow.distributed.comm import Alone, Comm
from nbflow.distributed.device import HOST, Device
from nbflow.distributed.links import Links
from nbflow.executor.step import Step
from nbflow.executor.weight_loader import WeightLoader
from nbflow.kv_cache.storage import KVStorage
from nbflow.program.records import Op, Program
from nbflow.spec.architecture import RopeSpec
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows

LEAST_ROWS = 8
"""Least rows of a buffer."""


class Int8Executor(Protocol):
    """Executor whose products may take activations as int8."""

    activations: str
    """Arithmetic of the products with weights."""

    def int8_rows(self, n_rows: int, n_columns: int) -> Int8Rows:
        """Return room for activations as int8."""


class Executor:
    """Executor of one rank's program.

    Parameters
    ----------
    program : Program
        The rank's program.
    weights : WeightLoader
        Its weights.
    storage : KVStorage
        Its pages.
    comm : Comm
        All ranks of the model.
    numbers : tuple of int
        The number, in the partition string, of each rank of `comm`.
    activations : {"f32", "int8", "bf16"}
        Arithmetic of the products with weights.
    memory : KVStorage, optional
        Pages with the keys and values of the encoder's hidden states.
    place : Place
        Where all of this lives.
    """

    def __init__(
        self,
        program: Program,
        weights: WeightLoader,
        storage: KVStorage,
        comm: Comm | None = None,
        numbers: tuple[int, ...] = (0,),
        activations: str = "f32",
        memory: KVStorage | None = None,
        place: Device = HOST,
    ) -> None:
        self.program = program
        self.storage = storage
        self.memory = memory
        self.given = np.zeros((0, 0), np.float32)
        """The rows of an `input` op."""
        self.weights = weights
        self.comm = comm or Alone()
        self.numbers = numbers
        self.activations = activations
        self.groups: dict[tuple[int, ...], Comm] = {}
        self.links = Links()
        self.seconds: defaultdict[str, float] | None = None
        """Set to a dict to add up the time of each kind of op."""
        self.observe: Callable[[Op, tuple[np.ndarray, ...]], None] | None = None
        """Set before the first step of `CpuExecutor`: called before each op that has weights, with
        its inputs."""
        self.place = place
        self._buffers: dict[str, Any] = {}
        self.rope_tables: dict[RopeSpec, Any] = {}
        """Cosines and sines of all positions, made when first used; executors may share them."""

    def rope_table(self, rope: RopeSpec) -> Any:
        """Return the cosines and sines of all positions, for short and for long sequences."""
        if rope not in self.rope_tables:
            place, spec = self.place.purposed("the rotary angles"), self.program.spec
            try:
                parts = [
                    nk.rope_cos_sin_cache(n, rope.dim, theta=rope.theta, scaling=rope.scaling)
                    for n in spec.rope_lengths
                ]
                table = np.concatenate(parts)
            except MemoryError as error:  # a checkpoint may state millions of positions
                raise place.full(4 * sum(spec.rope_lengths) * rope.dim, error) from error
            self.rope_tables[rope] = place.put(table)
        return self.rope_tables[rope]

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of the buffers and of the rotations' tables."""
        arrays = (*self._buffers.values(), *self.rope_tables.values())
        return sum(int(array.nbytes) for array in arrays)

    @property
    def step_bytes(self) -> int:
        """Return the bytes that steps so far have taken besides buffers, on a device."""
        return 0

    def report(self) -> str:
        """Return what there is to say of how the steps so far ran; empty for nothing."""
        return ""

    def set_groups(self, groups: dict[tuple[int, ...], Comm], links: Links | None = None) -> None:
        """Give the communicator of each stage, by rank numbers, and those for device arrays."""
        self.groups = groups
        self.links = links or Links()

    def run(self, step: Step) -> None:
        """Run the program once; results are in its buffers."""
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of what was bound to steps so far, and of the pages that it holds."""
        raise NotImplementedError

    def sizes(self, step: Step) -> list[tuple[int, int]]:
        """Return the tokens and logit rows of the parts in which a step is run: one, as a rule."""
        return [(len(step.ids), step.n_logits)]

    def buffer(self, name: str, n_rows: int) -> np.ndarray:
        """Return the first rows of a buffer, as the last step left them, in host memory."""
        found: np.ndarray = self.view(name, n_rows, n_rows, n_rows)
        return found

    def logits(self, n_rows: int) -> Any:
        """Return the last step's rows of logits where they lie; what sees them waits for them."""
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
        """Make the buffers large enough for such steps now."""
        self._reserve(n_tokens, n_logits, n_logits)

    def _reserve(self, n_tokens: int, n_states: int, n_logits: int) -> bool:
        """Make the buffers large enough; return whether any was made anew."""
        place = self.place.purposed("the buffers of a step")
        grown = False
        for name, buffer in self.program.buffers.items():
            rows = buffer.n_rows(n_tokens, n_states, n_logits)
            have = self._buffers.get(name)
            if buffer.base is None and (have is None or len(have) < rows):
                shape = (max(rows, LEAST_ROWS), buffer.width)
                self._buffers[name] = place.zeros(shape, np.float32)
                grown = True
        return grown


class BindingTarget(Protocol):
    """Step that fused kernels are bound to: its executor, buffers and numbers."""

    executor: Executor

    @property
    def arrays(self) -> Any:
        """Return the step's numbers on the device."""

    def view(self, name: str) -> Any:
        """Return a buffer's rows of the step."""
