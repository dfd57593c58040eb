"""Streams, events and graphs of `cupy_stand_in`.

Work is done when it is given, so that streams need not wait; which stream is meant matters for
capturing alone.  What a stream is given while it is captured is kept instead, and done whenever the
graph is launched, with the arrays' contents of then.  What CUDA or CuPy refuses meanwhile is
refused here: waiting (which spoils the capture, so that `Stream.end_capture` fails, too), copies
between host and device, work for the null stream.  So is an allocation from anything but a pool
that is the graph's own: on a GPU that memory would be given to others, and the graph write there.

A device reads pinned memory when a copy runs, not when it is enqueued.  So the memory must be
unchanged when the host waits for the copy; that is checked.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from nbflow_ptx.cupy_stand_in.state import State
from nbflow_ptx.errors import LaunchError

Work = Callable[[], None]


def perform(work: Work) -> None:
    """Do the work of the current stream, or keep it for the graph that is being captured."""
    stream = State.here.streams[-1] if State.here.streams else Stream.null
    if State.here.capturing is None:
        work()
    elif stream is State.here.capturing:
        stream.captured.append(work)
    elif stream.ptr == 0 and not State.here.capturing.non_blocking:
        raise LaunchError(
            "work for the null stream while a stream is captured that it waits for "
            "(cudaErrorStreamCaptureImplicit); capture a Stream(non_blocking=True)"
        )
    else:
        work()


def not_while_capturing(what: str, *, spoils: bool = False) -> None:
    """Raise if a stream is being captured; what waits spoils the capture."""
    if State.here.capturing is not None:
        State.here.capturing.spoilt |= spoils
        raise LaunchError(
            f"{what} while a stream is captured (cudaErrorStreamCaptureUnsupported): a graph "
            "holds only what the device does by itself"
        )


class Stream:
    """A stream.

    Parameters
    ----------
    null : bool
        True for the null stream.
    non_blocking : bool
        True for a stream that does not synchronize with the null stream.
    """

    null: Stream
    _n_made = 0

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, **_: Any
    ) -> None:
        self.non_blocking = non_blocking
        self.captured: list[Work] = []
        self.spoilt = False
        self._sent: list[tuple[int, bytes]] = []
        self.n_sent = 0
        self.ptr = 0
        if not null:
            Stream._n_made += 1
            self.ptr = Stream._n_made

    def synchronize(self) -> None:
        """Check what was sent: there is nothing else to wait for."""
        not_while_capturing("waiting for a stream", spoils=True)
        self.check_sent(self.n_sent)

    def note_sent(self, address: int, size: int) -> None:
        """Note a copy from pinned memory, which may be read at any time until the host waits."""
        self._sent.append((address, ctypes.string_at(address, size)))
        self.n_sent += 1

    def check_sent(self, n: int) -> None:
        """Raise if the memory of one of the first `n` copies was written to since."""
        waited = len(self._sent) - (self.n_sent - n)
        if waited <= 0:
            return
        done, self._sent = self._sent[:waited], self._sent[waited:]
        if any(ctypes.string_at(at, len(data)) != data for at, data in done):
            raise LaunchError("pinned memory was written to while a copy from it was on its way")

    def record(self, event: Event | None = None) -> Event:
        """Record an event, a new one by default."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""
        if self is State.here.capturing and not event.captured:
            raise LaunchError("a stream that is captured waits for an event of another one")

    def use(self) -> Stream:
        """Make this the current stream."""
        State.here.streams[-1:] = [self]
        return self

    def __enter__(self) -> Stream:
        State.here.streams.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        State.here.streams.pop()

    # ---- graphs -------------------------------------------------------------------------------

    def begin_capture(self, mode: Any = None) -> None:
        """Keep what this stream is given from now on, instead of doing it."""
        if self.ptr == 0:
            raise LaunchError("the null stream cannot be captured; make a Stream")
        not_while_capturing("capturing")
        State.here.capturing, self.captured, self.spoilt = self, [], False

    def is_capturing(self) -> bool:
        """Return whether this stream is being captured."""
        return State.here.capturing is self

    def end_capture(self) -> Graph:
        """Return the graph of what this stream was given since `begin_capture`."""
        if State.here.capturing is not self:
            raise LaunchError("this stream is not being captured")
        State.here.capturing = None
        if self.spoilt:
            raise LaunchError("something waited meanwhile (cudaErrorStreamCaptureInvalidated)")
        return Graph(self.captured)


Stream.null = Stream(null=True)


class Graph:
    """Captured work of a stream; made by `Stream.end_capture`."""

    def __init__(self, work: list[Work]) -> None:
        self._work = work

    def __len__(self) -> int:
        return len(self._work)

    def launch(self, stream: Stream | None = None) -> None:
        """Do all of it, in order."""
        not_while_capturing("launching a graph")
        for work in self._work:
            work()

    def upload(self, stream: Stream | None = None) -> None:
        """Nothing to do."""
        not_while_capturing("uploading a graph")


class Event:
    """An event: the time on the host's clock, as the emulator measures none."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at_s = 0.0
        self.captured = False
        self._behind: tuple[Stream, int] | None = None

    def record(self, stream: Any = None) -> None:
        """Keep the time."""
        self.at_s = time.perf_counter()
        self.captured = stream is not None and stream is State.here.capturing
        on = stream or current_stream()
        self._behind = on, on.n_sent

    def synchronize(self) -> None:
        """Check what was sent before: there is nothing else to wait for."""
        not_while_capturing("waiting for an event", spoils=True)
        if self._behind is not None:
            stream, n = self._behind
            stream.check_sent(n)


def current_stream() -> Stream:
    """Return the current stream."""
    found: Stream = State.here.streams[-1] if State.here.streams else Stream.null
    return found
