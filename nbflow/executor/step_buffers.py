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
from nbflow.kv_cache.block_table import PageView
from nbflow_kernels.attention.cuda.plan import StaticPlanBuffers


class StepArrays:
    """Host arrays for steps of one shape (`Step.size`), or of smaller ones.

    `n_pages` and `n_cross_pages` are capacities for the page numbers of all sequences together.
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
        self.state_rows = np.zeros(n_sequences, np.int32)
        self.start_positions = np.zeros(n_sequences, np.int32)
        self.kv_indptr = np.zeros(n_sequences + 1, np.int32)
        self.kv_indices = np.zeros(n_pages, np.int32)
        self.kv_lens = np.zeros(n_sequences, np.int32)
        self.cross_indptr = np.zeros(n_sequences + 1, np.int32)
        self.cross_indices = np.zeros(n_cross_pages, np.int32)
        self.cross_lens = np.zeros(n_sequences, np.int32)

    def load(self, step: Step) -> None:
        """Copy the arrays of a step, and pad them to a larger shape (CUDA graphs).

        Padding tokens have position -1 and padding sequences have no keys: their rows are computed
        and ignored, and they write nothing to the KV cache.
        """
        for own, given, rest in (
            (self.ids, step.ids, 0),
            (self.positions, step.positions, -1),
            (self.rope_rows, step.rope_rows, -1),
            (self.types, step.types, 0),
            (self.batch_indices, step.batch_indices, 0),
            (self.logit_rows, step.logit_rows, 0),
            (self.qo_indptr, step.qo_indptr, len(step.ids)),
            (self.state_rows, step.state_rows, 0),
            (self.start_positions, step.start_positions, 0),
        ):
            _copy(given, own, rest)
        _copy_pages(step.pages, self.kv_indptr, self.kv_indices, self.kv_lens)
        if step.cross_pages is not None:
            cross = self.cross_indptr, self.cross_indices, self.cross_lens
            _copy_pages(step.cross_pages, *cross)


def _copy(given: np.ndarray, own: np.ndarray, rest: int) -> None:
    own[: len(given)] = given
    if len(given) < len(own):
        own[len(given) :] = rest


def _copy_pages(
    pages: PageView, indptr: np.ndarray, indices: np.ndarray, lengths: np.ndarray
) -> None:
    _copy(pages.kv_indptr, indptr, pages.kv_indptr[-1])
    indices[: len(pages.kv_indices)] = pages.kv_indices
    _copy(pages.kv_lens, lengths, 0)


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

    The attention plans `tables` are copied along.
    """

    NAMES = (
        *("ids", "positions", "rope_rows", "types", "batch_indices", "logit_rows"),
        *("kv_indptr", "kv_indices", "qo_indptr", "state_rows", "start_positions"),
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
