"""What a rank is doing: kept up to date while it runs, for the report when it fails.

The record lies in memory that the rank shares with the process that looks after it
(`nbflow.supervise`), so that it can be read when the rank is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

IDLE, WORKING, WAITING, LOADING = 0, 1, 2, 3
FAILED = 4
"""Added to the state of a rank that has left its step, or the loading, with an error."""
NAME_BYTES = 64
_RECORD = struct.Struct(f"=dBqd{NAME_BYTES}s")
"""Last sign of life, state, layer (-1 for none), time of it, kind of exchange."""
_ALONE = struct.Struct("=?")
"""Whether the others go on without this rank; behind the record."""
_BEAT = struct.Struct("=d")


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    state: int
    """IDLE between steps, WORKING behind an exchange, WAITING in one, LOADING; or one + FAILED."""
    kind: str
    """Kind of the last exchange, e.g. "all_reduce", or what is loaded; empty before the first."""
    layer: int
    """Its layer; -1 outside of layers."""
    since: float
    """When it got there, in seconds of the monotonic clock."""
    alive: float
    """Its last sign of life: a rank that waits gives one now and then."""

    def __str__(self) -> str:
        where = f"{self.kind or 'the start'}{f' of layer {self.layer}' if self.layer >= 0 else ''}"
        state = self.state & ~FAILED
        if state == IDLE:
            return "between two steps" if self.kind else "before the first step"
        if state == LOADING:
            return f"while loading {self.kind}"
        return f"{'in' if state == WAITING else 'behind'} {where}"

    @property
    def is_busy(self) -> bool:
        """Whether the rank is in a step, or loads its part, and has to go on."""
        return self.state in (WORKING, WAITING, LOADING)


class Status:
    """The record of one rank."""

    def __init__(self) -> None:
        # stays shared with a process forked later
        self._memory = mmap.mmap(-1, _RECORD.size + _ALONE.size)
        self.set(IDLE)

    def set(self, state: int, kind: str = "", layer: int | None = None) -> None:
        """Say what the rank does from now on."""
        number, now = -1 if layer is None else layer, time.monotonic()
        name = kind.encode()[:NAME_BYTES]
        _RECORD.pack_into(self._memory, 0, now, state, number, now, name)

    def not_needed(self) -> None:
        """Say that the other ranks go on when this one fails: they are other replicas."""
        _ALONE.pack_into(self._memory, _RECORD.size, True)

    @property
    def is_needed(self) -> bool:
        """Whether the other ranks have to stop when this one fails."""
        return not _ALONE.unpack_from(self._memory, _RECORD.size)[0]

    def beat(self) -> None:
        """Give a sign of life while waiting."""
        _BEAT.pack_into(self._memory, 0, time.monotonic())

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Load something; `progress` says how far it is, and is the sign of life."""
        before = self.place()
        self.set(LOADING, what)
        try:
            yield
        except BaseException:
            self.failed()
            raise
        self.set(before.state, before.kind, before.layer)

    def progress(self, what: str) -> None:
        """Say what is loaded now, if something is."""
        if self.place().state == LOADING:
            self.set(LOADING, what)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Run a step; where an error came up is kept."""
        self.set(WORKING, "the start of the step")
        try:
            yield
        except BaseException:
            self.failed()
            raise
        self.idle()

    def idle(self) -> None:
        """Say that the step is over."""
        place = self.place()
        self.set(IDLE, place.kind, place.layer)

    def failed(self) -> None:
        """Say that the step has been left with an error; where is kept."""
        place = self.place()
        if place.is_busy:
            self.set(place.state + FAILED, place.kind, place.layer)

    def place(self) -> Place:
        """Return what the rank does."""
        alive, state, layer, since, kind = _RECORD.unpack_from(self._memory, 0)
        return Place(state, kind.rstrip(b"\0").decode(errors="replace"), layer, since, alive)


status = Status()
"""That of the rank that this process is."""
