"""Progress record of this rank: current exchange or weight, for reports of failures and hangs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from nbflow_kernels.errors import UsageError

IDLE, WORKING, WAITING, LOADING = 0, 1, 2, 3
FAILED = 4
"""Added to the state of a rank that has left its step, or the loading, with an error."""
HANG_S = 300.0
"""Default of ``NBFLOW_HANG_S``."""


def hang_seconds() -> float:
    """Return how long a rank may compute between two exchanges.

    Raises
    ------
    UsageError
        If ``NBFLOW_HANG_S`` is not a positive number.
    """
    text = os.environ.get("NBFLOW_HANG_S", str(HANG_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"NBFLOW_HANG_S must be a positive number of seconds, got {text!r}")
    return seconds


class Place(NamedTuple):
    """Position of a rank in its step, or in loading."""

    state: int
    """IDLE between steps, WORKING behind an exchange, WAITING in one, LOADING; or one + FAILED."""
    kind: str
    """Kind of the last exchange, e.g. "all_reduce", or what is loaded; empty before the first."""
    layer: int
    """Its layer; -1 outside of layers."""
    since: float
    """When it got there, in seconds of the monotonic clock."""

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
        """True within a step and while loading: the rank must make progress."""
        return self.state in (WORKING, WAITING, LOADING)


class Status:
    """Progress record of one rank; the watchdog thread reads it (`nbflow.distributed.failure`)."""

    def __init__(self) -> None:
        self.is_needed = True
        """False where the other ranks continue without this one: they are other replicas."""
        self._place = Place(IDLE, "", -1, time.monotonic())
        self._alive = self._place.since

    def set(self, state: int, kind: str = "", layer: int | None = None) -> None:
        """Enter a state."""
        now = time.monotonic()
        self._alive = now
        self._place = Place(state, kind, -1 if layer is None else layer, now)

    def beat(self) -> None:
        """Give a sign of life while waiting."""
        self._alive = time.monotonic()

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Load something; each `progress` within is a sign of life."""
        before = self._place
        self.set(LOADING, what)
        try:
            yield
        except BaseException:
            self.failed()
            raise
        self.set(before.state, before.kind, before.layer)

    def progress(self, what: str) -> None:
        """Name what is loaded now, if something is."""
        if self._place.state == LOADING:
            self.set(LOADING, what)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Run a step; the place of an error is kept."""
        self.set(WORKING, "the start of the step")
        try:
            yield
        except BaseException:
            self.failed()
            raise
        self.idle()

    def idle(self) -> None:
        """Leave the step."""
        self.set(IDLE, self._place.kind, self._place.layer)

    def failed(self) -> None:
        """Leave the step with an error; its place is kept."""
        place = self._place
        if place.is_busy:
            self.set(place.state + FAILED, place.kind, place.layer)

    def place(self) -> Place:
        """Return the position of the rank."""
        return self._place

    def overdue(self, limit: float) -> str:
        """Return a finding if the rank hangs, else an empty text.

        Parameters
        ----------
        limit : float
            Longest time without a sign of life, in seconds; a rank that waits for others may take
            three times as long.
        """
        now = time.monotonic()
        place, alive = self._place, self._alive
        stands_still = now > alive + limit
        if not place.is_busy or not (stands_still or now > place.since + 3 * limit):
            return ""
        return (
            f"{'stood still' if stands_still else 'waited'} for {now - place.since:.0f} s {place}"
        )


status = Status()
"""Record of the rank that this process is."""
