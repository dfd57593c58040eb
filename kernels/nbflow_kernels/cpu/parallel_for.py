"""`parallel_for`: divide the rows of a kernel call among the threads of a pool.

Kernels are serial functions over a range of rows and release the GIL, so the threads of a pool
(`nbflow_kernels.cpu.thread_pool`) can share a call.  The number of threads belongs to the calling
thread: `set_num_threads` in one thread does not change another.

A caller acquires a pool for one call or one graph and releases it.  Threads that call kernels in
turn thus share a pool.  Threads that call at the same time:

- A thread that has set its number (as each rank of a model divided among threads does) always gets
  that many threads: another pool is made if all of this size are in use.
- Threads that have not set it share one pool of all processors.  While it is in use, a thread
  computes alone: 32 Python threads that call kernels on 64 processors are at most 32 + 63 threads,
  not 32 pools of 64.

Both give the same bits.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbflow_kernels.cpu.cpu_quota import available_cores
from nbflow_kernels.cpu.fork import in_child
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode, call_with_integers
from nbflow_kernels.cpu.splits import count_parts, part
from nbflow_kernels.cpu.thread_pool import ThreadPool
from nbflow_kernels.errors import UsageError

# Waking another Python thread and waiting for it costs 35 to 50 microseconds; a kernel does 20 (one
# row of activations) to 50 (many) multiply-adds per nanosecond: less work is faster in one thread.
MIN_WORK_PER_THREAD = 3_000_000

Deferred = tuple[Callable[..., None], int, float, tuple[Any, ...]]
"""A call collected by `together`: kernel, number of rows, work, arguments."""

SHARES = 1 << 20  # granularity at which `together` divides the total work


class _Local(threading.local):
    """State of the calling thread."""

    n_threads: int | None = None
    """Set by `set_num_threads`."""
    cores: tuple[int, ...] = ()
    """Processors of the threads, set by `set_num_threads`; empty: not pinned."""
    crowded: bool = False
    """Set by `set_num_threads`."""
    n_default: int | None = None
    """Cached `available_cores()`."""
    pool: ThreadPool | None = None
    """The pool used last, which is tried first."""
    profile: list[float] | None = None
    capture: Capture | None = None
    together: list[Deferred] | None = None
    in_chunk: bool = False
    """True within a chunk of `parallel_chunks`: the other threads of the pool are busy."""


_local = _Local()
# A pool lives while some thread used it last.
_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()
_teams_lock = threading.Lock()


@in_child
def _forget_pools() -> None:
    """Drop the parent's pools, whose threads the child does not have."""
    global _pools, _teams_lock
    _pools, _teams_lock = weakref.WeakSet(), threading.Lock()
    _local.pool = None


@dataclass
class Capture:
    """Calls that a launcher would have made."""

    calls: list[GraphNode] = field(default_factory=list)
    """The compiled calls, in order; they keep the launcher's arrays alive."""
    complete: bool = True
    """False if a launcher also did work in Python."""
    held: list[Any] = field(default_factory=list)
    """Arrays whose addresses a launcher passes; the calls keep this list alive."""


@contextlib.contextmanager
def capture() -> Iterator[Capture]:
    """Collect the compiled calls of launchers in the present thread instead of making them.

    A launcher (a function of a family's `cpu` module) only chooses a kernel and its arguments;
    called again and again with the same arrays, it need not choose again.  Captures nest: the
    innermost collects the calls.
    """
    before = _local.capture
    _local.capture = captured = Capture()
    try:
        yield captured
    finally:
        _local.capture = before


def not_capturable() -> None:
    """Mark a capture as incomplete: the launcher does more than its compiled calls."""
    if _local.capture is not None:
        _local.capture.complete = False


def hold(*arrays: Any) -> None:
    """Keep arrays alive with the captured call; for launchers that pass their addresses."""
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


def set_num_threads(n: int, cores: Sequence[int] = (), crowded: bool = False) -> None:
    """Use `n` threads for the kernels called from the present thread.

    Parameters
    ----------
    n : int
        Number of threads, the calling one among them.
    cores : sequence of int
        Processors to which the threads are pinned (`nbflow_kernels.cpu.pinning`); none by default.
    crowded : bool
        Other threads call kernels at the same time, all together with more threads than there are
        cores: threads that wait yield their core at once instead of spinning.

    Raises
    ------
    UsageError
        If `n` is not between 1 and 1024.
    """
    if not 1 <= n <= 1024:
        raise UsageError(f"number of threads must be 1..1024, got {n}")
    _local.n_threads, _local.cores, _local.crowded = n, tuple(cores), crowded
    if _local.pool is not None and not _fits(_local.pool, n):
        _local.pool = None  # the pool ends with the last thread that refers to it


def get_num_threads() -> int:
    """Return how many threads kernels called from the present thread use."""
    if _local.n_threads is not None:
        return _local.n_threads
    if _local.n_default is None:
        _local.n_default = available_cores()
    return _local.n_default


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Collect independent compiled calls of launchers and divide them all at the end of the block.

    Independent calls (the experts of a layer) then cost one synchronization of the threads, and a
    thread makes few of them.  Results are written when the block ends.  Within `capture` they stay
    single calls.
    """
    if _local.together is not None or _local.capture is not None:
        yield
        return
    _local.together = calls = list[Deferred]()
    try:
        yield
    finally:
        _local.together = None
    if calls:
        work = sum(max(call[2], 1.0) for call in calls)
        parallel_for(_run_shares, SHARES, work, calls, work / SHARES)


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Suspend `together`: make the compiled calls of the block at once, one after the other.

    For a launcher whose calls depend on each other; `capture` keeps their order anyway.
    """
    before, _local.together = _local.together, None
    try:
        yield
    finally:
        _local.together = before


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Suspend `together` and `capture`: make the compiled calls of the block at once.

    For preparations of a launcher, such as packing a weight.
    """
    before = _local.together, _local.capture
    _local.together = _local.capture = None
    try:
        yield
    finally:
        _local.together, _local.capture = before


def _run_shares(calls: list[Deferred], share: float, start: int, stop: int) -> None:
    """Make the calls, or the rows of calls, in a range of the total work."""
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


def _fits(pool: ThreadPool, n: int) -> bool:
    """Return whether a pool has `n` threads where the calling thread wants them."""
    return pool.n == n and pool.cores == _local.cores and pool.crowded == _local.crowded


def _acquire_pool(n: int, needed: bool) -> ThreadPool | None:
    """Return an acquired pool of `n` threads; None if all are in use and another is not needed."""
    pool = _local.pool
    if pool is not None and _fits(pool, n) and pool.acquire():
        return pool
    with _teams_lock:
        same = [pool for pool in _pools if _fits(pool, n)]
        pool = next((pool for pool in same if pool.acquire()), None)
        if pool is None:
            if same and not needed:
                return None
            pool = ThreadPool(n, _local.cores, _local.crowded)
            pool.acquire()
            _pools.add(pool)
    _local.pool = pool
    return pool


def run_graph(graph: CpuGraph, **options: Any) -> None:
    """Run a graph on a pool of the number of threads that the graph was made for.

    Parameters
    ----------
    graph : CpuGraph
        The captured calls.
    **options : object
        Of `ThreadPool.run_graph`.
    """
    pool = _local.pool
    if pool is None or not _fits(pool, graph.n_threads) or not pool.acquire():
        pool = _acquire_pool(graph.n_threads, True)
        assert pool is not None
    try:
        pool.run_graph(graph, **options)
    finally:
        pool.release()


def parallel_for(
    kernel: Callable[..., None], n_rows: int, work: float, *args: Any, tile: int = 1
) -> None:
    """Call ``kernel(*args, start, stop)`` over [0, n_rows), on several threads if it pays.

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
    tile : int
        Rows that the kernel computes together; ranges start at multiples of it.
    """
    if _local.together is not None:
        _local.together.append((kernel, n_rows, work, args))
        return
    if _local.capture is not None:
        _local.capture.calls.append(
            GraphNode(kernel, args, n_rows, work, _local.capture.held, tile)
        )
        return
    n = get_num_threads()
    parts = 1 if _local.in_chunk else count_parts(n_rows, work, n, MIN_WORK_PER_THREAD, tile)
    started = time.perf_counter() if _local.profile is not None else 0.0
    pool = _acquire_pool(n, _local.n_threads is not None) if parts > 1 else None
    if pool is None:
        # kernels of packing are called in chunks only
        if not (_local.in_chunk and call_with_integers(kernel, args, n_rows)):
            kernel(*args, 0, n_rows)
    else:
        try:
            pool.run(kernel, 0, n_rows, parts, *args, tile=tile)
        finally:
            pool.release()
    if _local.profile is not None:
        _local.profile.append(time.perf_counter() - started)


def parallel_chunks(
    function: Callable[[int, int], None], n_rows: int, chunk: int, align: int = 1
) -> None:
    """Call ``function(start, stop)`` for chunks of [0, n_rows), several at a time.

    For work in Python that releases the GIL most of the time: reading a file and packing what was
    read.  Each thread takes the chunks of its part of the rows, which it later multiplies, then
    those that the other threads have left.  Kernels called within a chunk run on its thread.  After
    an error no further chunk begins.

    Parameters
    ----------
    function : callable
        The work; chunks must be independent.
    n_rows : int
        Number of rows.
    chunk : int
        Most rows per chunk; the last one may be smaller.  Where threads are more than such chunks,
        chunks have fewer rows, down to a sixteenth.
    align : int
        Chunks start at multiples of it; `chunk` is one.

    Examples
    --------
    >>> seen = []
    >>> parallel_chunks(lambda start, stop: seen.append((start, stop)), 10, 4)
    >>> sorted(seen)
    [(0, 4), (4, 8), (8, 10)]
    """
    n = get_num_threads()
    share = align * -(-n_rows // (n * align))
    chunk = min(chunk, max(share, align * -(-chunk // (16 * align))))
    n_chunks = -(-n_rows // chunk)
    parts = 1 if _local.in_chunk else min(n, n_chunks)
    pool = _acquire_pool(n, _local.n_threads is not None) if parts > 1 else None
    if pool is None:
        for start in range(0, n_rows, chunk):
            function(start, min(start + chunk, n_rows))
        return
    left = [iter(range(*part(n_chunks, i, parts))) for i in range(parts)]  # `next` is atomic
    failed: list[bool] = []

    def take(thread: int, _after: int) -> None:
        _local.in_chunk = True
        try:
            for i in itertools.chain(*left[thread:], *left[:thread]):
                if failed:
                    return
                function(i * chunk, min(i * chunk + chunk, n_rows))
        except BaseException:
            failed.append(True)
            raise
        finally:
            _local.in_chunk = False

    try:
        pool.run(take, 0, parts, parts)
    finally:
        pool.release()
