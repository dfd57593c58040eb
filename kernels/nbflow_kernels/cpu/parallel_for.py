"""A team of threads that shares the rows of one kernel call.

Kernels are serial functions over a range of rows and release the GIL, so the threads of a team
(`nbflow_kernels.cpu.thread_pool`) can share a call.  The number of threads belongs to the calling
thread: `set_num_threads` in one thread does not change another.

A team is taken for one call, or one list of calls, and given back.  Threads that call kernels in
turn thus share a team; for those that call at the same time it depends:

- A thread that has set its number (each rank of a model that is divided among threads does) always
  gets so many threads: another team is made if those of this size are in use.
- A thread that has not set it shares a team of all processors with all others like it.  While that
  team is in use the thread computes alone, so that 32 threads of a pool that call kernels on 64
  processors are at most 32 + 63 threads, and not 32 teams of 64.

Results are the same to the bit either way.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nbflow_kernels.cpu.fork import in_child
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode
from nbflow_kernels.cpu.thread_pool import ThreadPool, available_cores
from nbflow_kernels.errors import UsageError

# Handing work to another Python thread and waiting for it costs 35 to 50 microseconds; a kernel
# does 20 (one row of activations) to 50 (many) multiply-adds per nanosecond, so below this many
# for each thread the call is faster in one.
MIN_WORK_PER_THREAD = 3_000_000


Shared = tuple[Callable[..., None], int, float, tuple[Any, ...]]
"""A call to be shared: kernel, number of rows, work, arguments."""

SHARES = 1 << 20  # ranges of work are whole numbers of this part of it


class _Local(threading.local):
    """What belongs to the calling thread."""

    n_threads: int | None = None
    """As set by `set_num_threads`."""
    n_default: int | None = None
    """All processors, once looked up."""
    team: ThreadPool | None = None
    """The one used last, which is tried first."""
    profile: list[float] | None = None
    capture: Capture | None = None
    together: list[Shared] | None = None


_local = _Local()
_teams: weakref.WeakSet[ThreadPool] = (
    weakref.WeakSet()
)  # a team lives while a thread has it as its last
_teams_lock = threading.Lock()


@in_child
def _forget_teams() -> None:
    """Let teams be made when they are needed: the threads of those there were are not here."""
    global _teams, _teams_lock
    _teams, _teams_lock = weakref.WeakSet(), threading.Lock()
    _local.team = None


@dataclass
class Capture:
    """What a launcher would have run."""

    calls: list[GraphNode] = field(default_factory=list)
    """The compiled calls, in order; they hold on to the launcher's arrays."""
    complete: bool = True
    """Whether the calls are all that the launcher does."""
    held: list[Any] = field(default_factory=list)
    """Arrays of which a launcher passes addresses; the calls hold on to this list."""


@contextlib.contextmanager
def capture() -> Iterator[Capture]:
    """Collect the compiled calls of launchers in the present thread instead of making them.

    A launcher (a function of a family's `cpu` module) only chooses a kernel and its arguments;
    called again and again with the same arrays, it need not choose again.
    """
    _local.capture = captured = Capture()
    try:
        yield captured
    finally:
        _local.capture = None


def not_capturable() -> None:
    """Say, in a launcher, that it does more than its compiled calls."""
    if _local.capture is not None:
        _local.capture.complete = False


def hold(*arrays: Any) -> None:
    """Keep arrays alive with the captured call, in a launcher that passes addresses of them."""
    if _local.capture is not None:
        _local.capture.held.append(arrays)


def count_kernel_seconds(seconds: float) -> None:
    """Add the duration of a captured call to `kernel_seconds`."""
    if _local.profile is not None:
        _local.profile.append(seconds)


@contextlib.contextmanager
def kernel_seconds() -> Iterator[list[float]]:
    """Collect the duration of every compiled call of the present thread, in seconds."""
    seconds: list[float] = []
    _local.profile = seconds
    try:
        yield seconds
    finally:
        _local.profile = None


def set_num_threads(n: int) -> None:
    """Use `n` threads for the kernels called from the present thread.

    Raises
    ------
    UsageError
        If `n` is not between 1 and 1024.
    """
    if not 1 <= n <= 1024:
        raise UsageError(f"number of threads must be 1..1024, got {n}")
    _local.n_threads = n
    if _local.team is not None and _local.team.n != n:
        _local.team = None  # it ends with the last thread that has it


def get_num_threads() -> int:
    """Return how many threads kernels called from the present thread use."""
    if _local.n_threads is not None:
        return _local.n_threads
    if _local.n_default is None:
        _local.n_default = available_cores()
    return _local.n_default


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Collect the compiled calls of launchers and share them all in one go at the end.

    Calls that do not depend on each other (the experts of a layer) then cost one hand-over between
    threads, and a thread makes few of them.  What the calls write is there after the block.  Within
    `capture` they stay single calls.
    """
    if _local.together is not None or _local.capture is not None:
        yield
        return
    _local.together = calls = list[Shared]()
    try:
        yield
    finally:
        _local.together = None
    if calls:
        work = sum(max(call[2], 1.0) for call in calls)
        split_rows(_run_part, SHARES, work, calls, work / SHARES)


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Make the compiled calls inside one after the other, within `together` too: at once.

    For a launcher whose calls depend on each other; within `capture` calls are in order anyway.
    """
    before, _local.together = _local.together, None
    try:
        yield
    finally:
        _local.together = before


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Make the compiled calls inside when they come, within `together` and `capture` too.

    For what a launcher needs before its call, like the layout of a weight.
    """
    before = _local.together, _local.capture
    _local.together = _local.capture = None
    try:
        yield
    finally:
        _local.together, _local.capture = before


def _run_part(calls: list[Shared], share: float, start: int, stop: int) -> None:
    """Make the calls, or the rows of them, that lie in a range of the whole work."""
    before = 0.0
    for kernel, n_rows, work, args in calls:
        work = max(work, 1.0)
        first, end = (
            min(max(round((share * edge - before) / work * n_rows), 0), n_rows)
            for edge in (start, stop)
        )
        if first < end:
            kernel(*args, first, end)
        before += work


def _take_team(n: int, needed: bool) -> ThreadPool | None:
    """Return a team of `n` threads, taken; None if there are some, in use, and it is not needed."""
    team = _local.team
    if team is not None and team.n == n and team.take():
        return team
    with _teams_lock:
        same = [team for team in _teams if team.n == n]
        team = next((team for team in same if team.take()), None)
        if team is None:
            if same and not needed:
                return None
            team = ThreadPool(n)
            team.take()
            _teams.add(team)
    _local.team = team
    return team


def run_list(calls: CpuGraph, **options: Any) -> None:
    """Make the calls of a list by a team of as many threads as it was made for.

    Parameters
    ----------
    calls : CpuGraph
        The calls.
    **options : object
        As of `nbflow_kernels.cpu.thread_pool.ThreadPool.run_list`.
    """
    team = _local.team
    if team is None or team.n != calls.n_threads or not team.take():
        team = _take_team(calls.n_threads, True)
        assert team is not None
    try:
        team.run_list(calls, **options)
    finally:
        team.give_back()


def split_rows(kernel: Callable[..., None], n_rows: int, work: float, *args: Any) -> None:
    """Call ``kernel(*args, start, stop)`` over [0, n_rows), shared by the team if it pays.

    Parameters
    ----------
    kernel : callable
        A compiled kernel whose last two arguments are a range of rows; ranges must be independent.
    n_rows : int
        Number of rows.
    work : float
        Multiply-adds (or operations of like cost) of the whole call.
    *args : object
        The kernel's other arguments.
    """
    if _local.together is not None:
        _local.together.append((kernel, n_rows, work, args))
        return
    if _local.capture is not None:
        _local.capture.calls.append(GraphNode(kernel, args, n_rows, work, _local.capture.held))
        return
    n = get_num_threads()
    parts = min(n, n_rows, int(work // MIN_WORK_PER_THREAD))
    started = time.perf_counter() if _local.profile is not None else 0.0
    team = _take_team(n, _local.n_threads is not None) if parts > 1 else None
    if team is None:
        kernel(*args, 0, n_rows)
    else:
        try:
            team.run(kernel, 0, n_rows, parts, *args)
        finally:
            team.give_back()
    if _local.profile is not None:
        _local.profile.append(time.perf_counter() - started)
