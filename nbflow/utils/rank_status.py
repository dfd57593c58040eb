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
    """Return how long a rank may compute between two exchanges."""
    text = os.environ.get("NBFLOW_HANG_S", str(HANG_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"NBFLOW_HANG_S must be a positive number of seconds, got {text!r}")
    return seconds


class Activity(NamedTuple):
    """Current phase of a rank within a step, or within loading."""

    state: int
    """IDLE, WORKING (after an exchange), WAITING (in one), LOADING; plus FAILED after an error."""
    kind: str
    """Last exchange, e.g. "all_reduce", or the tensor being loaded; empty before the first."""
    layer: int
    """Layer of the exchange; -1 outside of layers."""
    since: float
    """Start of the phase, in seconds of the monotonic clock."""

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
        """True within a step and while loading, where the rank must make progress."""
        return self.state in (WORKING, WAITING, LOADING)


class RankStatus:
    """Progress record of one rank; the watchdog thread reads it (`nbflow.distributed.failure`)."""

    def __init__(self) -> None:
        self.is_needed = True
        """False if the other ranks are other replicas, which continue without this one."""
        self.activity = Activity(IDLE, "", -1, time.monotonic())
        """Current phase."""
        self._alive = self.activity.since

    def set(self, state: int, kind: str = "", layer: int | None = None) -> None:
        """Enter a state."""
        now = time.monotonic()
        self._alive = now
        self.activity = Activity(state, kind, -1 if layer is None else layer, now)

    def heartbeat(self) -> None:
        """Report progress while waiting."""
        self._alive = time.monotonic()

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Mark a loading phase; each `progress` within counts as a heartbeat."""
        before = self.activity
        self.set(LOADING, what)
        try:
            yield
        except BaseException:
            self.failed()
            raise
        self.set(before.state, before.kind, before.layer)

    def progress(self, what: str) -> None:
        """Name the tensor being loaded; without effect outside of loading."""
        if self.activity.state == LOADING:
            self.set(LOADING, what)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Mark a step; after an error the activity at that point is kept."""
        self.set(WORKING, "the start of the step")
        try:
            yield
        except BaseException:
            self.failed()
            raise
        self.idle()

    def idle(self) -> None:
        """Leave the step."""
        self.set(IDLE, self.activity.kind, self.activity.layer)

    def failed(self) -> None:
        """Leave the step with an error; the activity is kept."""
        now = self.activity
        if now.is_busy:
            self.set(now.state + FAILED, now.kind, now.layer)

    def overdue(self, limit: float) -> str:
        """Describe the hang if the rank hangs, else return an empty text.

        `limit` is the longest time without a heartbeat, in seconds; a rank that waits for others
        may take three times as long.
        """
        now = time.monotonic()
        activity, alive = self.activity, self._alive
        stands_still = now > alive + limit
        if not activity.is_busy or not (stands_still or now > activity.since + 3 * limit):
            return ""
        verb = "stood still" if stands_still else "waited"
        return f"{verb} for {now - activity.since:.0f} s {activity}"


status = RankStatus()
"""Record of the rank of this process."""
