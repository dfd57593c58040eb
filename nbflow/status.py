"""What a rank is doing: kept up to date while it runs, for the report when it fails.

The record lies in memory that the rank shares with the process that looks after it
(`nbflow.supervise`), so that it can be read when the rank is gone.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

IDLE, WORKING, WAITING = 0, 1, 2
FAILED = 4
"""Added to the state of a rank that has left its step with an error."""
_RECORD = struct.Struct("=dBqd24s")
"""Last sign of life, state, layer (-1 for none), time of it, kind of exchange."""
_BEAT = struct.Struct("=d")


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    state: int
    """IDLE between steps, WORKING behind an exchange, WAITING in one; or one of them + FAILED."""
    kind: str
    """Kind of the last exchange, e.g. "all_reduce"; empty before the first."""
    layer: int
    """Its layer; -1 outside of layers."""
    since: float
    """When it got there, in seconds of the monotonic clock."""
    alive: float
    """Its last sign of life: a rank that waits gives one now and then."""

    def __str__(self) -> str:
        where = f"{self.kind or 'the start'}{f' of layer {self.layer}' if self.layer >= 0 else ''}"
        if self.state in (IDLE, IDLE + FAILED):
            return "between two steps" if self.kind else "before the first step"
        return f"{'in' if self.state in (WAITING, WAITING + FAILED) else 'behind'} {where}"

    @property
    def is_in_step(self) -> bool:
        """Whether the rank is in a step, and has to go on."""
        return self.state in (WORKING, WAITING)


class Status:
    """The record of one rank."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _RECORD.size)  # stays shared with a process forked later
        self.set(IDLE)

    def set(self, state: int, kind: str = "", layer: int | None = None) -> None:
        """Say what the rank does from now on."""
        number, now = -1 if layer is None else layer, time.monotonic()
        _RECORD.pack_into(self._memory, 0, now, state, number, now, kind.encode()[:24])

    def beat(self) -> None:
        """Give a sign of life while waiting."""
        _BEAT.pack_into(self._memory, 0, time.monotonic())

    def idle(self) -> None:
        """Say that the step is over."""
        place = self.place()
        self.set(IDLE, place.kind, place.layer)

    def failed(self) -> None:
        """Say that the step has been left with an error; where is kept."""
        place = self.place()
        if place.is_in_step:
            self.set(place.state + FAILED, place.kind, place.layer)

    def place(self) -> Place:
        """Return what the rank does."""
        alive, state, layer, since, kind = _RECORD.unpack_from(self._memory, 0)
        return Place(state, kind.rstrip(b"\0").decode(), layer, since, alive)


status = Status()
"""That of the rank that this process is."""
