"""Large steps in two halves, so that ranks of a stage add one up while they compute the other.

Between two exchanges a rank has nothing to do but wait for the sum.  A step of many tokens is
divided; while the first half's partial sums are on their way, in a thread of their own, the second
half is computed, and the other way round.  Weights are read twice, which costs nothing where there
are enough rows to be bound by computing; a step that generates stays whole.

Rows do not depend on what else is in their step, so results are the same to the bit.  A half may
end within a sequence: its keys and values are written before the second half's attention reads
them, layer by layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from nbflow.distributed.comm import Comm
from nbflow.distributed.links import Links
from nbflow.executor.bind import PythonOp
from nbflow.executor.cpu import CpuExecutor, Segment
from nbflow.executor.step import Step
from nbflow.kv_cache.block_table import PageView

LEAST_TOKENS = 128
"""Fewest tokens of a step that is divided: halves of so many rows are bound by computing."""
OVERLAPPED = ("all_reduce",)
"""Kinds of exchange that run beside the other half."""
RESULTS = ("logits", "y")
"""Buffers that are read after a step."""
Piece = tuple[list[Segment | PythonOp], PythonOp | None]
"""What is computed up to an exchange, and the exchange; None behind the last one."""


class OverlappingExecutor(CpuExecutor):
    """A `CpuExecutor` that runs large steps in two halves where ranks are far apart."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._second = CpuExecutor(*args, **options)
        self._background: ThreadPoolExecutor | None = None

    def set_groups(self, groups: dict[tuple[int, ...], Comm], links: Links | None = None) -> None:
        """Give the communicators; with ranks that are far apart, large steps are divided."""
        super().set_groups(groups, links)
        self._second.set_groups(groups, links)
        if self.links.far:
            self._background = ThreadPoolExecutor(1, "nbflow-exchange")

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of the buffers."""
        return super().workspace_bytes + self._second.workspace_bytes

    def reserve(self, n_tokens: int, n_logits: int) -> None:
        """Make the buffers large enough for such steps now."""
        super().reserve(n_tokens, n_logits)
        if self._background is not None and n_tokens >= LEAST_TOKENS:
            self._second.reserve(n_tokens - n_tokens // 2, n_logits)

    def sizes(self, step: Step) -> list[tuple[int, int]]:
        """Return the tokens and logit rows of the parts in which a step is run."""
        return [(len(part.ids), part.n_logits) for part in self._parts(step)]

    def _parts(self, step: Step) -> list[Step]:
        plain = self.seconds is None and self.observe is None
        if self._background is None or len(step.ids) < LEAST_TOKENS or not plain:
            return [step]
        middle = len(step.ids) // 2
        page_size = self.storage.page_size
        return [
            part_of(step, 0, middle, page_size),
            part_of(step, middle, len(step.ids), page_size),
        ]

    def run(self, step: Step) -> None:
        """Run the program once; results are in its buffers."""
        parts = self._parts(step)
        if len(parts) == 1:
            super().run(step)
            return
        if self._reserve(*step.size):  # the results of both
            self._bound.clear()
        halves = (self._prepared(parts[0]).segments, self._second._prepared(parts[1]).segments)
        self._run_both(*map(_pieces, halves))
        self._join(parts[0].size, parts[1].size)

    def _run_both(self, *halves: Iterator[Piece]) -> None:
        """Run the pieces of both halves in turn, sums in the background."""
        assert self._background is not None
        waiting: list[Future[None] | None] = [None, None]
        for pieces in zip(*halves, strict=True):
            for half, (computed, exchange) in enumerate(pieces):
                _result(waiting, half)
                for segment in computed:
                    self._run_segment(segment)
                if exchange is None:
                    continue
                if exchange.kind in OVERLAPPED:
                    waiting[half] = self._background.submit(exchange.call)
                else:
                    for other in (0, 1):  # ranks meet in the same order everywhere
                        _result(waiting, other)
                    exchange.call()
        for half in (0, 1):
            _result(waiting, half)

    def _join(self, first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
        """Put the second half's results behind the first's."""
        both = first[0] + second[0], first[1] + second[1], first[2] + second[2]
        for name in RESULTS:
            if name in self.program.buffers:
                result = self._second.view(name, *second)
                self.view(name, *both)[len(self.view(name, *first)) :] = result


def _pieces(segments: list[Segment | PythonOp]) -> Iterator[Piece]:
    """Cut the calls of a step behind each exchange."""
    computed: list[Segment | PythonOp] = []
    for segment in segments:
        if isinstance(segment, PythonOp) and segment.is_exchange:
            yield computed, segment
            computed = []
        else:
            computed.append(segment)
    yield computed, None


def _result(waiting: list[Future[None] | None], half: int) -> None:
    """Wait for the exchange of a half, if one is on its way."""
    future, waiting[half] = waiting[half], None
    if future is not None:
        future.result()


def part_of(step: Step, start: int, stop: int, page_size: int) -> Step:
    """Return the tokens `start` to `stop` of a step as a step.

    Sequences have the length that they have after the last of these tokens.
    """
    first, last = int(step.batch_indices[start]), int(step.batch_indices[stop - 1])
    some = slice(first, last + 1)
    lengths = step.pages.kv_lens[some].copy()
    lengths[-1] -= step.qo_indptr[last + 1] - stop
    inside = (step.logit_rows >= start) & (step.logit_rows < stop)
    memory = step.memory
    if memory is not None:
        memory = _pages(memory, first, memory.kv_lens[some], page_size)
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
        memory=memory,
        types=step.types[start:stop],
    )


def _pages(view: PageView, first: int, lengths: np.ndarray, page_size: int) -> PageView:
    """Return the pages of the sequences from `first` on that hold so many tokens of each."""
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
