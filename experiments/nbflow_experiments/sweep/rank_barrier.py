"""Collective steps: a step succeeds on all ranks or fails on all."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from nbflow_experiments.backend import Comm

T = TypeVar("T")

GRACE_S = 300.0
"""Grace period of a failed rank for the others to finish the step."""


@dataclass(frozen=True)
class Failure:
    """An exception of one rank."""

    rank: int
    type: str
    message: str
    traceback: str


class StepFailed(Exception):
    """A step failed on at least one rank; raised on all of them."""

    def __init__(self, failures: list[Failure]) -> None:
        first = failures[0]
        super().__init__(f"rank {first.rank}: {first.type}: {first.message}")
        self.failures = failures


class Interrupted(Exception):
    """Stop request on some rank; raised on all ranks between two steps."""


class StopRequest:
    """Request to stop this process, by Ctrl-C or SIGTERM.

    Launchers send signals to all ranks; only those with `announces` print what happens.
    """

    def __init__(self, *, announces: bool = True) -> None:
        self.asked = False
        self._announces = announces

    @contextlib.contextmanager
    def listen(self) -> Iterator[StopRequest]:
        """Handle signals: the first requests a stop, the second ends the process."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread receives signals
            return
        before = {s: signal.signal(s, self._heard) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(130)  # files are written atomically
        self.asked = True
        if self._announces:
            text = "stopping after the present step; once more to stop now"
            print(text, file=sys.stderr, flush=True)


def in_step(comm: Comm, stop: StopRequest, work: Callable[[], T]) -> T:
    """Run `work` on this rank and continue only if it succeeded on every rank.

    Parameters
    ----------
    comm : Comm
        All ranks; each must call this.
    stop : StopRequest
        Checked when the step ends.
    work : callable
        Work of this rank; idle ranks pass a no-op.

    Returns
    -------
    object
        This rank's result.

    Raises
    ------
    StepFailed
        If `work` raised on some rank.
    Interrupted
        If a stop was requested on some rank.
    """
    failure: Failure | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        failure = Failure(comm.rank, type(error).__name__, str(error), text)
    with _end_all_if_late(comm, failure):
        reports = comm.gather_object((failure, stop.asked))
        verdict = None
        if reports is not None:
            verdict = [f for f, _ in reports if f], any(asked for _, asked in reports)
        failures, asked = comm.bcast_object(verdict)
    if failures:
        stop.asked = stop.asked or asked
        raise StepFailed(failures)
    if asked:
        raise Interrupted
    return result  # type: ignore[return-value]


@contextlib.contextmanager
def _end_all_if_late(comm: Comm, failure: Failure | None) -> Iterator[None]:
    """After a failure, end all ranks unless they reach the barrier: they may be deadlocked."""
    abort = getattr(comm, "abort", None)
    if failure is None or comm.size == 1 or abort is None:
        yield
        return

    def end() -> None:
        print(
            f"rank {failure.rank} failed and the others did not finish the step within "
            f"{GRACE_S:.0f} s; ending all ranks.\n{failure.traceback}",
            file=sys.stderr,
            flush=True,
        )
        abort()

    timer = threading.Timer(GRACE_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
