"""Thread pool that runs single kernel calls or whole graphs of calls.

The threads are Python threads in compiled code that holds no GIL.  Numba's parallel loops are not
used: Numba has one pool per process, which two threads must not enter at once, while ranks inside
one process need a pool each; and without an OpenMP library (a bare Linux) a parallel region costs
75 microseconds.

Threads wait in three stages, so that a busy pool responds in 0.1 microseconds and an idle one costs
nothing: a thread spins for some 400 microseconds, then yields its core between polls, and after
less than a millisecond without work it sleeps in Python until it is woken.  On cores shared with
other programs each early yield costs a time slice of milliseconds: with four busy processes on two
cores, generation was five times slower with a yield after 20 microseconds.

With compiling off (`nbflow_kernels.cpu.interpreter`) a pool has no threads: the caller computes
all shares one after the other, so that a debugger sees one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
from numba import int64

from nbflow_kernels.cpu import atomics, interpreter, jit, pinning
from nbflow_kernels.cpu.compile_processes import Task
from nbflow_kernels.cpu.cpu_quota import available_cores
from nbflow_kernels.cpu.fork import in_child
from nbflow_kernels.cpu.graph import (
    ARGUMENTS,
    BARRIER,
    COLUMNS,
    FUNCTION,
    GRAIN,
    PARTS,
    READS,
    ROW_BYTES,
    ROWS,
    TILE,
    CpuGraph,
    error_of,
    missing_kernel,
)
from nbflow_kernels.cpu.simd_memory import prefetch, read_i64
from nbflow_kernels.cpu.splits import part

# Indices of int64 cells in a pool's shared memory; groups are a cache line apart.
_JOB = 0  # number of the current job; the last bit is its kind
_ARRIVED = 8  # threads that have arrived at the current barrier
_BARRIER = 16  # barriers passed, times two; the last bit is set when the graph is done
_FAILED, _FAILED_CALL = (
    24,
    25,
)  # first exception of a kernel, and the index of its call
_TABLE, _N_CALLS, _REPEAT, _STOP, _TIMES, _YIELD, _SPIN = 32, 33, 34, 35, 36, 37, 38
_TICKETS = 40  # address of the next row of each call
_THREADS = 48  # from here on, for each thread: sleeping, last job seen
_PYTHON, _LIST = 0, 1  # kinds of job: read the inbox, or run the graph
_SPINS = 20_000  # polls with a pause between them: some 400 microseconds
_FEW_SPINS = 50  # the same with more threads than cores
_AHEAD_BYTES = 512 << 10  # prefetched while another thread works alone: half of a core's own cache
_LOOK_AHEAD = 6  # calls
_YIELDS = 500  # polls with a yield between them, before a thread sleeps


@jit.device_function
def _wait_for_change(cell, seen, shared, patience):
    """Return a cell's value once it is not `seen`; `seen` after `patience` yields (< 0: never)."""
    for _ in range(read_i64(shared + 8 * _SPIN)):
        now = atomics.load(cell)
        if now != seen:
            return now
        atomics.pause()
    yields = 0
    give_way = read_i64(shared + 8 * _YIELD)
    while yields != patience:
        now = atomics.load(cell)
        if now != seen:
            return now
        if give_way != 0:
            atomics.call_int(give_way, 0)
        else:
            atomics.pause()
        yields += 1
    return seen


@jit.device_function
def _is_over(shared, stop):
    """Return whether repetitions end: `stop` is set, or a kernel has raised."""
    return (stop != 0 and atomics.load(stop) != 0) or atomics.load(shared + 8 * _FAILED) != 0


@jit.device_function
def _barrier(shared, n_threads, is_last, stop):
    """Wait for all threads of the pool; return whether the graph is done.

    The last thread to arrive decides and publishes that with the barrier: a thread that read
    `stop` after the barrier could see the value of the next job.
    """
    passed = atomics.load(shared + 8 * _BARRIER)
    if atomics.add(shared + 8 * _ARRIVED, 1) + 1 == n_threads:
        atomics.store(shared + 8 * _ARRIVED, 0)
        now = (passed | 1) + 1
        if is_last and _is_over(shared, stop):
            now += 1
        atomics.exchange(shared + 8 * _BARRIER, now)
    else:
        now = _wait_for_change(shared + 8 * _BARRIER, passed, shared, np.int64(-1))
    return now & 1 != 0


@jit.device_function
def _share_of_call(row, i, ticket, thread, shared):
    """Run this thread's rows of call `i`."""
    function, arguments = read_i64(row + 8 * FUNCTION), read_i64(row + 8 * ARGUMENTS)
    n_rows, parts = read_i64(read_i64(row + 8 * ROWS)), read_i64(row + 8 * PARTS)
    grain = read_i64(row + 8 * GRAIN)
    failure = 0
    if grain > 0:
        start = atomics.add(ticket, grain)
        while start < n_rows:
            end = min(start + grain, n_rows)
            failure = max(failure, atomics.call_row_range(function, arguments, start, end))
            start = atomics.add(ticket, grain)
    else:
        tile = read_i64(row + 8 * TILE)
        n_tiles = (n_rows + tile - 1) // tile
        parts = min(parts, n_tiles)
        if thread < parts:
            start = tile * (n_tiles * thread // parts)
            stop = min(tile * (n_tiles * (thread + 1) // parts), n_rows)
            failure = atomics.call_row_range(function, arguments, start, stop)
    if failure != 0 and atomics.load(shared + 8 * _FAILED) == 0:
        atomics.store(shared + 8 * _FAILED_CALL, i)
        atomics.store(shared + 8 * _FAILED, failure)


@jit.device_function
def _prefetch_next(table, i, n_calls, thread, shared):
    """Prefetch the weights that this thread reads next while another thread runs call `i` alone.

    A model's step is memory-bound, and memory would idle during calls too small to divide, such as
    norms and the quantization of one row.
    """
    for j in range(i + 1, min(i + 1 + _LOOK_AHEAD, n_calls)):
        row = table + 8 * COLUMNS * j
        at, row_bytes = read_i64(row + 8 * READS), read_i64(row + 8 * ROW_BYTES)
        if at != 0 and thread < read_i64(row + 8 * PARTS):
            n_rows, parts = read_i64(read_i64(row + 8 * ROWS)), read_i64(row + 8 * PARTS)
            share = n_rows // parts * row_bytes
            at += n_rows * thread // parts * row_bytes
            end = at + min(share, _AHEAD_BYTES)
            while at < end and atomics.load(shared + 8 * _ARRIVED) == 0:
                for line in range(0, 1024, 64):
                    prefetch(at + line)
                at += 1024
            return


@jit.kernel
def _run_job(shared, thread, n_threads):
    """Run this thread's share of the job described in shared memory.

    The last call of a graph ends with a barrier.  After it the other threads read nothing of the
    job: thread 0 may have returned and published the next one.
    """
    table, n_calls = read_i64(shared + 8 * _TABLE), read_i64(shared + 8 * _N_CALLS)
    stop, times = read_i64(shared + 8 * _STOP), read_i64(shared + 8 * _TIMES)
    tickets = read_i64(shared + 8 * _TICKETS)
    for _ in range(read_i64(shared + 8 * _REPEAT)):
        before = atomics.cycles() if times != 0 else 0
        fetched = over = False
        for i in range(n_calls):
            row = table + 8 * COLUMNS * i
            parts = read_i64(row + 8 * PARTS)
            if thread < parts:
                _share_of_call(row, i, tickets + 64 * i, thread, shared)
                fetched = False
            elif not fetched:
                _prefetch_next(table, i, n_calls, thread, shared)
                fetched = True
            if n_threads > 1 and read_i64(row + 8 * BARRIER) != 0:
                over = _barrier(shared, n_threads, i + 1 == n_calls, stop)
            if thread == 0 and parts > 1:  # all threads have passed this call
                atomics.store(tickets + 64 * i, 0)
            if times != 0 and thread == 0:
                now = atomics.cycles()
                atomics.store(times + 8 * i, read_i64(times + 8 * i) + now - before)
                before = now
        if over or (n_threads == 1 and _is_over(shared, stop)):
            break


@jit.kernel(unroll=False)
def _serve(shared, thread, n_threads):
    """Run jobs until one is for Python or none arrives for a while."""
    mine = shared + 8 * (_THREADS + 8 * thread)
    while True:
        seen = read_i64(mine + 8)
        job = _wait_for_change(shared + 8 * _JOB, seen, shared, np.int64(_YIELDS))
        atomics.store(mine + 8, job)
        if job != seen and job % 2 == _LIST:
            _run_job(shared, thread, n_threads)
            continue
        # Store "sleeping", then read the job; `_announce` does the reverse (Dekker's algorithm), so
        # one of the two sees the other.
        atomics.exchange(mine, 1)
        if atomics.load_in_order(shared + 8 * _JOB) == job:
            return
        atomics.exchange(mine, 0)


@jit.kernel(unroll=False)
def _announce(shared, kind, n_threads):
    """Publish the job; return whether some thread sleeps."""
    # number and kind are one word: a reader cannot mix those of two jobs
    atomics.exchange(shared + 8 * _JOB, read_i64(shared + 8 * _JOB) // 2 * 2 + 2 + kind)
    sleeping = 0
    for thread in range(1, n_threads):
        sleeping |= atomics.load_in_order(shared + 8 * (_THREADS + 8 * thread))
    return sleeping


def pool_tasks() -> list[Task]:
    """Return the compilations of a pool's kernels that the cache lacks."""
    made = (missing_kernel(kernel, (int64, int64, int64), True) for kernel in (_serve, _announce))
    return [task for task in made if task is not None]


def _yield_address() -> int:
    """Return the address of `sched_yield`, or 0 where the system has none."""
    try:
        function = ctypes.CDLL(None).sched_yield
    except (AttributeError, OSError, TypeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_forks = 0  # forks between the first process and this one


@in_child
def _count_fork() -> None:
    global _forks
    _forks += 1


class ThreadPool:
    """`n` threads including the caller; a forked child starts its own.

    Parameters
    ----------
    n : int
        Number of threads.
    cores : tuple of int
        Processors to which threads 0, 1, ... are pinned, in turn; empty: none are.  The caller is
        pinned while it computes.
    crowded : bool
        Other pools compute at the same time, on fewer cores than threads: a spinning thread keeps
        those from their core that it waits for.
    """

    def __init__(self, n: int, cores: tuple[int, ...] = (), crowded: bool = False) -> None:
        self.n, self.cores, self.crowded = n, cores, crowded
        self._begin()

    def _begin(self) -> None:
        """Make shared memory and threads; again in a forked child, which has no threads."""
        n, self._forks = self.n, _forks
        memory = np.zeros(_THREADS + 8 * n + 8, np.int64)
        self._memory = memory
        skip = -memory.ctypes.data % 64 // 8
        self._shared = memory[skip:]  # starts with a cache line
        self._at = self._shared.ctypes.data
        self._shared[_YIELD] = _yield_address()
        crowded = self.crowded or n > available_cores()
        self._shared[_SPIN] = _FEW_SPINS if crowded else _SPINS
        self._make_tickets(1)
        self._inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(n - 1)]
        self._done: SimpleQueue[None] = SimpleQueue()
        in_use = threading.Lock()
        self.acquire: Callable[[], bool] = functools.partial(in_use.acquire, False)
        """Reserve the pool for the calling thread until `release`; False if it is in use."""
        self.release: Callable[[], None] = in_use.release
        """Let other threads acquire the pool."""
        if interpreter.is_on():
            return
        for i, inbox in enumerate(self._inboxes):
            core = self.cores[(i + 1) % len(self.cores)] if self.cores else None
            arguments = (memory, self._at, i + 1, n, inbox, self._done, core)
            threading.Thread(target=_work, args=arguments, daemon=True, name="nbflow-pool").start()

    def _make_tickets(self, n_calls: int) -> None:
        """Allocate the next-row counters of `n_calls` calls, a cache line apart."""
        self._tickets = np.zeros(8 * n_calls + 8, np.int64)
        self._shared[_TICKETS] = (self._tickets.ctypes.data + 63) // 64 * 64

    def run(
        self,
        kernel: Callable[..., None],
        start: int,
        stop: int,
        parts: int,
        *args: Any,
        tile: int = 1,
    ) -> None:
        """Call ``kernel(*args, a, b)`` for `parts` ranges [a, b) of [start, stop), whole tiles."""
        if self._forks != _forks:
            self._begin()
        edges = [start + part(stop - start, i, parts, tile)[0] for i in range(parts)] + [stop]
        if interpreter.is_on():
            for first, last in itertools.pairwise(edges):
                kernel(*args, first, last)
            return
        answers: list[BaseException | None] = []
        for i in range(1, parts):
            self._inboxes[i - 1].put((kernel, args, edges[i], edges[i + 1], answers))
        _announce(self._at, _PYTHON, self.n)
        failure: BaseException | None = None
        try:
            with self._pinned():
                kernel(*args, edges[0], edges[1])
        except BaseException as error:
            failure = error
        while len(answers) < parts - 1:
            try:
                self._done.get()
            except BaseException as error:  # Ctrl-C; other threads still write to the arrays
                failure = failure or error
        failure = next((error for error in answers if error is not None), failure)
        if failure is not None:
            raise failure

    def run_graph(
        self,
        graph: CpuGraph,
        *,
        repeat: int = 1,
        stop: np.ndarray | None = None,
        cycles: np.ndarray | None = None,
    ) -> None:
        """Run the calls of a graph one after the other, each divided among the threads.

        Parameters
        ----------
        graph : CpuGraph
            Captured calls, made for this pool's number of threads.
        repeat : int
            Number of repetitions.
        stop : array of int64, shape (1,), optional
            Ends the repetitions once it is not 0; a call of the graph may set it.
        cycles : array of int64, shape (number of calls,), optional
            Counters to which each call's processor cycles are added, barriers included.

        Raises
        ------
        Exception
            The exception of the first kernel that failed.  The calls after it still run, but the
            graph is not repeated.
        """
        if self._forks != _forks:
            self._begin()
        n_calls = len(graph.calls)
        if n_calls == 0 or repeat < 1:
            return
        if interpreter.is_on():
            _run_graph_in_python(graph, repeat, stop, cycles)
            return
        if len(self._tickets) < 8 * n_calls + 8:
            self._make_tickets(n_calls)
        shared = self._shared
        shared[_TABLE : _TIMES + 1] = (
            graph.table_at,
            n_calls,
            repeat,
            0 if stop is None else stop.ctypes.data,
            0 if cycles is None else cycles.ctypes.data,
        )
        if graph.is_shared:
            with self._pinned():
                try:
                    if _announce(self._at, _LIST, self.n):
                        self._wake()
                finally:  # the other threads wait for this one
                    _run_job(self._at, 0, self.n)
        else:
            _run_job(self._at, 0, 1)
        if shared[_FAILED]:
            raised, shared[_FAILED] = int(shared[_FAILED]), 0
            raise error_of(raised, graph.calls[shared[_FAILED_CALL]].kernel)

    def _pinned(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the caller computes."""
        return pinning.pinned(self.cores[0]) if self.cores else contextlib.nullcontext()

    def _wake(self) -> None:
        for i, inbox in enumerate(self._inboxes):
            if self._shared[_THREADS + 8 * (i + 1)]:
                inbox.put(None)

    def close(self) -> None:
        """End the other threads."""
        if self._forks != _forks:
            return  # the threads are another process's
        for inbox in self._inboxes:
            inbox.put("end")
        # not a compiled function: this may run while the interpreter shuts down
        self._shared[_JOB] = self._shared[_JOB] // 2 * 2 + 2 + _PYTHON

    def __del__(self) -> None:
        self.close()


def _run_graph_in_python(
    graph: CpuGraph, repeat: int, stop: np.ndarray | None, cycles: np.ndarray | None
) -> None:
    """Run a graph as `_run_job` does, with compiling off; a kernel's error propagates."""
    for _ in range(repeat):
        for i, call in enumerate(graph.calls):
            before = atomics.cycles()
            call()
            if cycles is not None:
                cycles[i] += atomics.cycles() - before
        if stop is not None and stop[0] != 0:
            return


def _work(
    memory: np.ndarray, at: int, thread: int, n: int, inbox: SimpleQueue[Any], done: Any,
    core: int | None,
) -> None:  # fmt: skip
    """Worker thread's main loop; `memory` keeps the shared buffer alive."""
    if core is not None:
        pinning.pin(core)
    sleeping = (at - memory.ctypes.data) // 8 + _THREADS + 8 * thread
    while True:
        _serve(at, thread, n)
        item = inbox.get()
        memory[sleeping] = 0
        if item is None:
            continue
        if item == "end":
            return
        kernel, args, start, stop, answers = item
        try:
            kernel(*args, start, stop)
        except BaseException as error:
            answers.append(error)
        else:
            answers.append(None)
        done.put(None)
