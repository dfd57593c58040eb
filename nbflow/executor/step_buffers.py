"""The present step as arrays that stay where they are.

Compiled calls hold the addresses of their arguments, so what changes from step to step is copied
into arrays that are made once for a number of tokens, sequences and pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.distributed.device import Device
from nbflow.executor.step import Step
from nbflow_kernels.attention.cuda.plan import StaticPlanBuffers


class StepArrays:
    """Arrays for steps of `n_tokens` tokens and `n_sequences` sequences.

    Parameters
    ----------
    n_tokens, n_states, n_logits, n_sequences : int
        Sizes of the steps; see `Step.size`.
    n_pages : int
        Most pages that the sequences of a step hold together.
    n_memory_pages : int
        The same of the encoder's hidden states; 0 without an encoder.
    """

    def __init__(
        self,
        n_tokens: int,
        n_states: int,
        n_logits: int,
        n_sequences: int,
        n_pages: int,
        n_memory_pages: int = 0,
    ) -> None:
        self.size = n_tokens, n_states, n_logits
        self.ids = np.zeros(n_tokens, np.int32)
        self.positions = np.zeros(n_tokens, np.int32)
        self.rope_rows = np.zeros(n_tokens, np.int32)
        self.types = np.zeros(n_tokens, np.int32)
        self.batch_indices = np.zeros(n_tokens, np.int32)
        self.logit_rows = np.zeros(n_states, np.int32)
        self.qo_indptr = np.zeros(n_sequences + 1, np.int32)
        self.kv_indptr = np.zeros(n_sequences + 1, np.int32)
        self.kv_indices = np.zeros(n_pages, np.int32)
        self.kv_lens = np.zeros(n_sequences, np.int32)
        self.memory_indptr = np.zeros(n_sequences + 1, np.int32)
        self.memory_indices = np.zeros(n_memory_pages, np.int32)
        self.memory_lens = np.zeros(n_sequences, np.int32)

    def load(self, step: Step) -> None:
        """Copy a step's numbers."""
        self.ids[:] = step.ids
        self.positions[:] = step.positions
        self.rope_rows[:] = step.rope_rows
        self.types[:] = step.types
        self.batch_indices[:] = step.batch_indices
        self.logit_rows[:] = step.logit_rows
        self.qo_indptr[:] = step.qo_indptr
        pages = step.pages
        self.kv_indptr[:] = pages.kv_indptr
        self.kv_indices[: len(pages.kv_indices)] = pages.kv_indices
        self.kv_lens[:] = pages.kv_lens
        if step.memory is not None:
            self.memory_indptr[:] = step.memory.kv_indptr
            self.memory_indices[: len(step.memory.kv_indices)] = step.memory.kv_indices
            self.memory_lens[:] = step.memory.kv_lens


class PaddedArrays(StepArrays):
    """Arrays for steps of at most so many sequences and new tokens.

    What device_buffer is more room for counts as tokens without a position and sequences without keys: rows
    are computed for them, which depend on nothing and which nobody reads, and nothing is written
    into pages.
    """

    def load(self, step: Step) -> None:
        """Copy a step's numbers."""
        pages = step.pages
        for own, given, rest in (
            (self.ids, step.ids, 0),
            (self.positions, step.positions, -1),
            (self.rope_rows, step.rope_rows, -1),
            (self.types, step.types, 0),
            (self.batch_indices, step.batch_indices, 0),
            (self.logit_rows, step.logit_rows, 0),
            (self.qo_indptr, step.qo_indptr, len(step.ids)),
            (self.kv_indptr, pages.kv_indptr, pages.kv_indptr[-1]),
            (self.kv_lens, pages.kv_lens, 0),
        ):
            own[: len(given)] = given
            own[len(given) :] = rest
        self.kv_indices[: len(pages.kv_indices)] = pages.kv_indices
        if step.memory is not None:
            memory, n = step.memory, len(step.memory.kv_lens)
            self.memory_indptr[: n + 1] = memory.kv_indptr
            self.memory_indptr[n + 1 :] = memory.kv_indptr[-1]
            self.memory_indices[: len(memory.kv_indices)] = memory.kv_indices
            self.memory_lens[:n], self.memory_lens[n:] = memory.kv_lens, 0


class Staging:
    """Host memory that is pinned, through which numbers go to a device while the host goes on.

    Parameters
    ----------
    place : Place
        The device.
    """

    N_BUFFERS = 2
    """A step's numbers are written while those of the step before may still be on their way."""

    def __init__(self, place: Device) -> None:
        cuda = place.xp.cuda
        self._allocate = cuda.alloc_pinned_memory
        self._buffers = [np.zeros(0, np.int32)] * self.N_BUFFERS
        self._sent = [cuda.Event(disable_timing=True) for _ in range(self.N_BUFFERS)]
        self._turn = 0

    def send(self, parts: Sequence[np.ndarray], device_buffer: Any, stream: Any) -> None:
        """Copy int32 arrays, one behind the other, to an array on the device."""
        self._turn = turn = (self._turn + 1) % self.N_BUFFERS
        n = sum(map(len, parts))
        if len(self._buffers[turn]) < n:
            self._sent[turn].synchronize()
            self._buffers[turn] = np.frombuffer(self._allocate(8 * n), np.int32, 2 * n)
        else:
            self._sent[turn].synchronize()  # what was in this buffer has arrived
        buffer = self._buffers[turn]
        np.concatenate(parts, out=buffer[:n])
        device_buffer.data.copy_from_host_async(buffer.ctypes.data, 4 * n, stream)
        self._sent[turn].record(stream)


class DeviceArrays:
    """What kernels on a device read of the present step: parts of one array, copied at once.

    Parameters
    ----------
    host : StepArrays
        Gives the sizes.
    place : Place
        Where they live.
    tables : sequence of FixedTables
        Tables of the attention that are copied with the rest.
    """

    NAMES = (
        *("ids", "positions", "rope_rows", "types", "batch_indices", "logit_rows"),
        *("kv_indptr", "kv_indices"),
    )

    def __init__(
        self, host: StepArrays, place: Device, tables: Sequence[StaticPlanBuffers] = ()
    ) -> None:
        self.size = host.size
        self._parts = [*(getattr(host, name) for name in self.NAMES), *(t.host for t in tables)]
        ends = np.cumsum([len(part) for part in self._parts]).tolist()
        self._whole: Any = place.zeros((ends[-1],), np.int32)
        views = [self._whole[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        for name, view in zip(self.NAMES, views, strict=False):
            setattr(self, name, view)
        for table, view in zip(tables, views[len(self.NAMES) :], strict=True):
            table.device_buffer = view

    @property
    def n_bytes(self) -> int:
        """Return the bytes on the device."""
        return int(self._whole.nbytes)

    def load(self, staging: Staging, stream: Any) -> None:
        """Start the copy of a step's numbers to the device."""
        staging.send(self._parts, self._whole, stream)
