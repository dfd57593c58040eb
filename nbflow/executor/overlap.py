"""Overlap of all-reduce and compute: large steps run as two micro-batches.

While a background thread all-reduces the partial sums of one half, the rank computes the other
half.  Weights are read twice, which is free for compute-bound steps; decode steps stay whole.

The kernels are batch invariant, so results are the same to the bit.  A half may end within a
sequence: layer by layer, its keys and values are written before the second half's attention reads
them, and its recurrent states updated before the second half's layer continues from them; a prompt
cut between two chunks of a recurrence has the same bits only if the chunks begin there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from nbflow.distributed.comm import Comm
from nbflow.distributed.device_comms import DeviceComms
from nbflow.executor.bind import PythonOp
from nbflow.executor.cpu import CpuExecutor, Segment
from nbflow.executor.step import Step
from nbflow.kv_cache.block_table import PageView

MIN_TOKENS = 128
"""Tokens of the smallest step that is split: its halves are still compute-bound."""
OVERLAPPED = ("all_reduce",)
"""Communication that overlaps with the other half."""
RESULTS = ("logits", "y")
"""Buffers that are read after a step."""
Phase = tuple[list[Segment | PythonOp], PythonOp | None]
"""Segments up to a communication op, and that op; None after the last one."""


class OverlappingExecutor(CpuExecutor):
    """`CpuExecutor` that runs large steps in two halves where ranks are on several hosts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._second = CpuExecutor(*args, **options)
        self._background: ThreadPoolExecutor | None = None

    def set_groups(
        self, groups: dict[tuple[int, ...], Comm], device_comms: DeviceComms | None = None
    ) -> None:
        """Set the communicators, which say whether large steps are split."""
        super().set_groups(groups, device_comms)
        self._second.set_groups(groups, device_comms)
        if self.device_comms.overlap:
            self._background = ThreadPoolExecutor(1, "nbflow-exchange")

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the buffers of both halves and of the rotary tables."""
        return super().workspace_bytes + self._second.workspace_bytes

    def reserve(self, n_tokens: int, n_logits: int) -> None:
        """Allocate buffers for steps of this size."""
        super().reserve(n_tokens, n_logits)
        if self._background is not None and n_tokens >= MIN_TOKENS:
            self._second.reserve(n_tokens - n_tokens // 2, n_logits)

    def release_buffers(self) -> None:
        """Free the buffers of both halves."""
        super().release_buffers()
        self._second.release_buffers()

    def sizes(self, step: Step) -> list[tuple[int, int]]:
        """Return tokens and rows of logits of each part of a step."""
        return [(len(part.ids), part.n_logits) for part in self._parts(step)]

    def _parts(self, step: Step) -> list[Step]:
        plain = self.seconds is None and self.observe is None and self.trace is None
        if self._background is None or len(step.ids) < MIN_TOKENS or not plain:
            return [step]
        middle = len(step.ids) // 2
        page_size = self.storage.page_size
        return [
            slice_step(step, 0, middle, page_size),
            slice_step(step, middle, len(step.ids), page_size),
        ]

    def run(self, step: Step) -> None:
        """Run the program once; results are in its buffers."""
        parts = self._parts(step)
        if len(parts) == 1:
            super().run(step)
            return
        if self._reserve(*step.size):  # for the results of both halves
            self._bound.clear()
        halves = (self._prepared(parts[0]).segments, self._second._prepared(parts[1]).segments)
        self._run_both(*map(_phases, halves))
        self._join(parts[0].size, parts[1].size)

    def _run_both(self, *halves: Iterator[Phase]) -> None:
        """Alternate the phases of both halves, all-reduces in the background."""
        assert self._background is not None
        in_flight: list[Future[None] | None] = [None, None]
        for phases in zip(*halves, strict=True):
            for half, (segments, communication) in enumerate(phases):
                _wait(in_flight, half)
                for segment in segments:
                    self._run_segment(segment)
                if communication is None:
                    continue
                if communication.kind in OVERLAPPED:
                    in_flight[half] = self._background.submit(communication.call)
                else:
                    for other in (0, 1):  # the same order of communication on all ranks
                        _wait(in_flight, other)
                    communication.call()
        for half in (0, 1):
            _wait(in_flight, half)

    def _join(self, first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
        """Append the second half's results to the first's."""
        both = first[0] + second[0], first[1] + second[1], first[2] + second[2]
        for name in RESULTS:
            if name in self.program.buffers:
                result = self._second.view(name, *second)
                self.view(name, *both)[len(self.view(name, *first)) :] = result


def _phases(segments: list[Segment | PythonOp]) -> Iterator[Phase]:
    """Split the segments of a step after each communication op."""
    computed: list[Segment | PythonOp] = []
    for segment in segments:
        if isinstance(segment, PythonOp) and segment.is_communication:
            yield computed, segment
            computed = []
        else:
            computed.append(segment)
    yield computed, None


def _wait(in_flight: list[Future[None] | None], half: int) -> None:
    """Wait for the all-reduce of a half, if one is in flight."""
    future, in_flight[half] = in_flight[half], None
    if future is not None:
        future.result()


def slice_step(step: Step, start: int, stop: int, page_size: int) -> Step:
    """Return the tokens `start` to `stop` of a step as a separate step.

    Sequences are as long as after the last of these tokens.
    """
    first, last = int(step.batch_indices[start]), int(step.batch_indices[stop - 1])
    sequences = slice(first, last + 1)
    lengths = step.pages.kv_lens[sequences].copy()
    lengths[-1] -= step.qo_indptr[last + 1] - stop
    inside = (step.logit_rows >= start) & (step.logit_rows < stop)
    cross = step.cross_pages
    if cross is not None:
        cross = _pages(cross, first, cross.kv_lens[sequences], page_size)
    return dataclasses.replace(
        step,
        ids=step.ids[start:stop],
        positions=step.positions[start:stop],
        rope_rows=step.rope_rows[start:stop],
        batch_indices=step.batch_indices[start:stop] - np.int32(first),
        qo_indptr=np.clip(step.qo_indptr[first : last + 2], start, stop) - np.int32(start),
        pages=_pages(step.pages, first, lengths, page_size),
        logit_rows=step.logit_rows[inside] - np.int32(start),
        n_logits=int(inside[: step.n_logits].sum()),
        cross_pages=cross,
        types=step.types[start:stop],
        state_rows=step.state_rows[sequences],
    )


def _pages(view: PageView, first: int, lengths: np.ndarray, page_size: int) -> PageView:
    """Return the pages of the first `lengths` tokens of the sequences from `first` on."""
    counts = -(-lengths // page_size)
    starts = view.kv_indptr[first : first + len(lengths)]
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    indices = [view.kv_indices[s : s + n] for s, n in zip(starts, counts, strict=True)]
    return PageView(
        indptr,
        np.concatenate(indices).astype(np.int32, copy=False),
        (lengths - (counts - 1) * page_size).astype(np.int32, copy=False),
        lengths.astype(np.int32, copy=False),
    )
