"""Look after an MPI rank from a process of its own, so that its end is reported, however it ends.

A launcher like mpirun ends all ranks when one dies, and drops what they would still have to say.
So each rank runs in a child of the process that the launcher has started: when the child is killed
(out of memory, by hand) or stands still, the parent, which is well, says which rank it was and in
which exchange of which layer, and only then ends, which makes the launcher end the others.

A rank stands still when it gives no sign of life within a step, or while it loads its part, for
``NBFLOW_HANG_S`` seconds (300); every exchange is one, every tensor that has been read, and every
look of a rank that waits whether the others are there.  Ranks that only wait are stopped after
three times as long.  One that has nothing to do, because there are no requests or because others
still load, may wait as long as it likes: the one it waits for is watched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection

from nbflow.status import Status
from nbflow_kernels.errors import UsageError

FAILURES = "NBFLOW_FRONT_FAILURES"
"""Environment variable: the socket at which `nbflow.front` is told which rank has failed."""
HANG_S = 300.0
"""Default of ``NBFLOW_HANG_S``."""
FORWARD_S = 2.0
"""Pause after a report: launchers drop what still lies in their pipes when a rank ends badly."""
POLL_S = 0.05
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LAUNCHERS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
"""What MPICH and Intel MPI, Open MPI, and Slurm with PMIx say about a rank."""


def launched_as() -> tuple[int, int] | None:
    """Return rank and number of ranks that a launcher's variables state, or None."""
    for rank, size in LAUNCHERS:
        try:
            return int(os.environ[rank]), int(os.environ[size])
        except (KeyError, ValueError):
            continue
    return None


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


def supervised(status: Status) -> None:
    """Go on in a child process if this process is one of several ranks; the parent looks after it.

    Call it before there are threads.  The parent never returns from it: it ends as the child does.
    Outside of a launcher, or where a child cannot be told to end with its parent (other systems
    than Linux), nothing happens.
    """
    launched = launched_as()
    if launched is None or launched[1] == 1 or not sys.platform.startswith("linux"):
        return
    limit = hang_seconds()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # Ctrl-C comes once: from the parent
        _end_with_parent(parent)
        return
    told = set[int]()

    def forward(number: int, _: object) -> None:
        told.add(number)
        _send(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    rank = f"rank {launched[0]} of {launched[1]}"

    def report(text: str) -> None:
        if status.is_needed:
            _tell_front(rank)
        _report(f"nbflow: {rank} on {platform.node()} {text}", status)

    os._exit(_watch(child, status, limit, report, told))


def _end_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent ends: launchers know only the parent."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)


def _send(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _watch(
    child: int,
    status: Status,
    limit: float,
    report: Callable[[str], None],
    told: Collection[int] = (),
) -> int:
    """Wait for the child's end, or make one; return the exit code.

    An end by a signal that the launcher has `told` it is no failure: another rank's has come first.
    """
    while True:
        pid, ended = os.waitpid(child, os.WNOHANG)
        place = status.place()
        if pid:
            if not os.WIFSIGNALED(ended):
                return os.waitstatus_to_exitcode(ended)
            number = os.WTERMSIG(ended)
            if number in told:
                return 128 + number
            why = ", perhaps because memory ran out," if number == signal.SIGKILL else ""
            report(f"was killed by {signal.Signals(number).name}{why} {place}")
            _abort(status, 128 + number)
            return 128 + number
        late = _too_late(status, limit)
        if late and _too_late(status, limit):  # twice: it may have moved while it was read
            report(f"has {late} {place} (NBFLOW_HANG_S={limit:g})")
            _send(child, signal.SIGKILL)
            os.waitpid(child, 0)
            _abort(status, 1)
            return 1
        time.sleep(POLL_S)


def _too_late(status: Status, limit: float) -> str:
    """Return what a rank has done for too long; empty where all is well."""
    now = time.monotonic()  # before the place is read: this process may be stopped in between
    place = status.place()
    stands_still = now > place.alive + limit
    if not place.is_busy or not (stands_still or now > place.since + 3 * limit):
        return ""
    return f"{'stood still' if stands_still else 'waited'} for {now - place.since:.0f} s"


def _abort(status: Status, code: int) -> None:
    """Have MPICH's launcher end all ranks: that a rank on another host has ended is not enough.

    This is the line by which MPI_Abort tells it (version 1 of the process management interface), in
    the name of the child that cannot any more.  A replica that the others do not need only ends.
    """
    if not status.is_needed:
        return
    with contextlib.suppress(KeyError, ValueError, OSError):
        os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())


def _tell_front(rank: str) -> None:
    """Tell who keeps the server's address; on another host, or without one, nobody listens."""
    with (
        contextlib.suppress(KeyError, OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as front,
    ):
        front.setblocking(False)
        front.sendto(rank.encode(), os.environ[FAILURES])


def _report(text: str, status: Status) -> None:
    what = "stopping all ranks" if status.is_needed else "the other replicas go on"
    sys.stderr.write(f"{text}; {what}\n")
    sys.stderr.flush()
    time.sleep(FORWARD_S)
