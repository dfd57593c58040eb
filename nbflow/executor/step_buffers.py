"""Index arrays of a step at fixed addresses.

Captured calls and CUDA graphs hold the addresses of their arguments, so each step is copied into
arrays that are allocated once per shape of step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.distributed.device import Device
from nbflow.executor.step import Step
from nbflow_kernels.attention.cuda.plan import StaticPlanBuffers


class StepArrays:
    """Host arrays for steps of one shape.

    Parameters
    ----------
    n_tokens, n_states, n_logits, n_sequences : int
        Sizes of the steps; see `Step.size`.
    n_pages : int
        Capacity for page numbers of all sequences together.
    n_cross_pages : int
        Capacity for page numbers of the encoder's hidden states; 0 without an encoder.
    """

    def __init__(
        self,
        n_tokens: int,
        n_states: int,
        n_logits: int,
        n_sequences: int,
        n_pages: int,
        n_cross_pages: int = 0,
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
        self.cross_indptr = np.zeros(n_sequences + 1, np.int32)
        self.cross_indices = np.zeros(n_cross_pages, np.int32)
        self.cross_lens = np.zeros(n_sequences, np.int32)

    def load(self, step: Step) -> None:
        """Copy the arrays of a step."""
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
        if step.cross_pages is not None:
            self.cross_indptr[:] = step.cross_pages.kv_indptr
            self.cross_indices[: len(step.cross_pages.kv_indices)] = step.cross_pages.kv_indices
            self.cross_lens[:] = step.cross_pages.kv_lens


class PaddedStepArrays(StepArrays):
    """Host arrays padded to a batch bucket, for CUDA graphs.

    Padding tokens have position -1 and padding sequences have no keys: their rows are computed and
    ignored, and they write nothing to the KV cache.
    """

    def load(self, step: Step) -> None:
        """Copy the arrays of a step."""
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
        if step.cross_pages is not None:
            cross, n = step.cross_pages, len(step.cross_pages.kv_lens)
            self.cross_indptr[: n + 1] = cross.kv_indptr
            self.cross_indptr[n + 1 :] = cross.kv_indptr[-1]
            self.cross_indices[: len(cross.kv_indices)] = cross.kv_indices
            self.cross_lens[:n], self.cross_lens[n:] = cross.kv_lens, 0


class Staging:
    """Pinned staging buffers for asynchronous copies of a step's index arrays to a device."""

    N_BUFFERS = 2
    """Double buffering: one step is written while the copy of the previous one is in flight."""

    def __init__(self, device: Device) -> None:
        cuda = device.xp.cuda
        self._allocate = cuda.alloc_pinned_memory
        self._buffers = [np.zeros(0, np.int32)] * self.N_BUFFERS
        self._sent = [cuda.Event(disable_timing=True) for _ in range(self.N_BUFFERS)]
        self._index = 0

    def send(self, parts: Sequence[np.ndarray], target: Any, stream: Any) -> None:
        """Start the copy of int32 arrays, concatenated, to an array on the device."""
        self._index = index = (self._index + 1) % self.N_BUFFERS
        n = sum(map(len, parts))
        self._sent[index].synchronize()  # the last copy from this buffer has completed
        if len(self._buffers[index]) < n:
            self._buffers[index] = np.frombuffer(self._allocate(8 * n), np.int32, 2 * n)
        buffer = self._buffers[index]
        np.concatenate(parts, out=buffer[:n])
        target.data.copy_from_host_async(buffer.ctypes.data, 4 * n, stream)
        self._sent[index].record(stream)


class CudaStepArrays:
    """Index arrays of a step on the device: views of one array, copied at once.

    Parameters
    ----------
    host : StepArrays
        Host arrays of the step.
    device : Device
        The device.
    tables : sequence of StaticPlanBuffers
        Attention plans that are copied along.
    """

    NAMES = (
        *("ids", "positions", "rope_rows", "types", "batch_indices", "logit_rows"),
        *("kv_indptr", "kv_indices"),
    )

    def __init__(
        self, host: StepArrays, device: Device, tables: Sequence[StaticPlanBuffers] = ()
    ) -> None:
        self.size = host.size
        self._parts = [*(getattr(host, name) for name in self.NAMES), *(t.host for t in tables)]
        ends = np.cumsum([len(part) for part in self._parts]).tolist()
        self._whole: Any = device.zeros((ends[-1],), np.int32)
        views = [self._whole[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        for name, view in zip(self.NAMES, views, strict=False):
            setattr(self, name, view)
        for table, view in zip(tables, views[len(self.NAMES) :], strict=True):
            table.device_buffer = view

    @property
    def n_bytes(self) -> int:
        """Bytes on the device."""
        return int(self._whole.nbytes)

    def load(self, staging: Staging, stream: Any) -> None:
        """Start the copy of the host arrays to the device."""
        staging.send(self._parts, self._whole, stream)
