"""A team of threads that runs kernels: one call at a time, or a whole list of calls.

The threads are plain Python threads in compiled code that holds no GIL.  Numba's own parallel loops
are not used: their pool is one per process and must not be entered from two threads at once, while
ranks inside one process each need a team; and without an OpenMP library (a bare Linux) a parallel
region of theirs costs 75 microseconds.

Waiting is in three stages, so that a busy team answers in a tenth of a microsecond and an idle one
costs nothing: a thread spins for some 400 microseconds, then gives its core to whoever wants it
between two looks, and without work it sleeps in Python after less than a millisecond, until it is
woken.  On cores that other programs use too, offering the core sooner costs a time slice of
milliseconds each time: with four busy processes on two cores generation was five times slower when
it was offered after 20 microseconds.

With compiling off (`nbflow_kernels.cpu.interpreter`) a team has no threads: the caller does the
share of each, one after the other, so that a debugger sees one thread.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

from nbflow_kernels.cpu import atomics, interpreter, jit
from nbflow_kernels.cpu.cpu_quota import cpu_quota
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
    CpuGraph,
    error_of,
)
from nbflow_kernels.cpu.simd_memory import prefetch, read_i64

# Cells of the memory a team shares, a cache line apart; of int64.
_JOB = 0  # number of the present job, the last bit its kind
_ARRIVED = 8  # threads at the present barrier
_BARRIER = 16  # counts the barriers passed, by twos; the last bit says that the list is over
_FAILED, _FAILED_CALL = 24, 25  # what the first kernel that raised has left, and its place
_TABLE, _N_CALLS, _REPEAT, _STOP, _TIMES, _YIELD, _SPIN = 32, 33, 34, 35, 36, 37, 38
_TICKETS = 40  # address of the next row of each call
_THREADS = 48  # from here on, for each thread: sleeping, last job seen
_PYTHON, _LIST = 0, 1  # kinds of job: look into your inbox, or run the list
_SPINS = 20_000  # looks with a pause between them: some 400 microseconds
_FEW_SPINS = 50  # the same in a team of more threads than cores, which wait for each other's cores
_AHEAD_BYTES = 512 << 10  # asked for while another thread works alone: half of a core's own cache
_LOOK_AHEAD = 6  # calls
_YIELDS = 500  # looks between which the core is offered, before a thread goes to sleep


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
    """Return whether the list is not to be repeated: told so, or a kernel has raised."""
    return (stop != 0 and atomics.load(stop) != 0) or atomics.load(shared + 8 * _FAILED) != 0


@jit.device_function
def _barrier(shared, n_threads, is_last, stop):
    """Wait until all threads of the team are here; return whether the list is over.

    The thread that arrives last decides, and the decision is part of what the others wait for: a
    thread that reads `stop` behind the barrier could find what the next job has written there.
    """
    passed = atomics.load(shared + 8 * _BARRIER)
    if atomics.add(shared + 8 * _ARRIVED, 1) + 1 == n_threads:
        atomics.store(shared + 8 * _ARRIVED, 0)
        now = (passed | 1) + 1
        if is_last and _is_over(shared, stop):
            now += 1
        atomics.exchange(shared + 8 * _BARRIER, now)
    else:
        now = _wait_for_change(shared + 8 * _BARRIER, passed, shared, -1)
    return now & 1 != 0


@jit.device_function
def _share_of_call(row, i, ticket, thread, shared):
    """Do this thread's rows of call `i`."""
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
        parts = min(parts, n_rows)
        if thread < parts:
            start, stop = n_rows * thread // parts, n_rows * (thread + 1) // parts
            failure = atomics.call_row_range(function, arguments, start, stop)
    if failure != 0 and atomics.load(shared + 8 * _FAILED) == 0:
        atomics.store(shared + 8 * _FAILED_CALL, i)
        atomics.store(shared + 8 * _FAILED, failure)


@jit.device_function
def _fetch_ahead(table, i, n_calls, thread, shared):
    """Ask for what this thread reads next, as long as the one that works on call `i` is alone.

    A step of a model is bound by the memory, which would rest while one thread does what does not
    pay to share: norms, quantization of one row.
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
    """Do this thread's share of the job described in the shared memory.

    The last call of a list ends with a barrier, behind which the other threads read nothing of the
    job: thread 0 may have returned, and given out the next one.
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
                _fetch_ahead(table, i, n_calls, thread, shared)
                fetched = True
            if n_threads > 1 and read_i64(row + 8 * BARRIER) != 0:
                over = _barrier(shared, n_threads, i + 1 == n_calls, stop)
            if thread == 0 and parts > 1:  # nobody draws tickets of this call any more
                atomics.store(tickets + 64 * i, 0)
            if times != 0 and thread == 0:
                now = atomics.cycles()
                atomics.store(times + 8 * i, read_i64(times + 8 * i) + now - before)
                before = now
        if over or (n_threads == 1 and _is_over(shared, stop)):
            break


@jit.kernel
def _serve(shared, thread, n_threads):
    """Work on jobs until one is for Python, or none comes for a while."""
    mine = shared + 8 * (_THREADS + 8 * thread)
    while True:
        seen = read_i64(mine + 8)
        job = _wait_for_change(shared + 8 * _JOB, seen, shared, _YIELDS)
        atomics.store(mine + 8, job)
        if job != seen and job % 2 == _LIST:
            _run_job(shared, thread, n_threads)
            continue
        # Say so before going back to Python, and look again: whoever gives the next job out does
        # the same in the opposite order, so that one of the two notices the other.
        atomics.exchange(mine, 1)
        if atomics.load_in_order(shared + 8 * _JOB) == job:
            return
        atomics.exchange(mine, 0)


@jit.kernel
def _announce(shared, kind, n_threads):
    """Give the job out; return whether some thread sleeps."""
    # the kind is part of the number: who reads the number cannot take one job for another
    atomics.exchange(shared + 8 * _JOB, read_i64(shared + 8 * _JOB) // 2 * 2 + 2 + kind)
    sleeping = 0
    for thread in range(1, n_threads):
        sleeping |= atomics.load_in_order(shared + 8 * (_THREADS + 8 * thread))
    return sleeping


def _yield_address() -> int:
    """Return the address of the system's function that offers the core to others, or 0."""
    try:
        function = ctypes.CDLL(None).sched_yield
    except (AttributeError, OSError, TypeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def available_cores() -> int:
    """Return how many processors this process may use: its affinity, within its CPU quota."""
    quota = cpu_quota()
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return allowed if quota is None else min(allowed, quota)


_forks = 0  # between the first process and this one


@in_child
def _count_fork() -> None:
    global _forks
    _forks += 1


class ThreadPool:
    """`n` threads, the caller among them; a forked child makes threads of its own.

    Parameters
    ----------
    n : int
        Number of threads.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._begin()

    def _begin(self) -> None:
        """Make the memory and the threads; in a forked child, where the threads are not, again."""
        n, self._forks = self.n, _forks
        memory = np.zeros(_THREADS + 8 * n + 8, np.int64)
        self._memory = memory
        skip = -memory.ctypes.data % 64 // 8
        self._shared = memory[skip:]  # starts with a cache line
        self._at = self._shared.ctypes.data
        self._shared[_YIELD] = _yield_address()
        self._shared[_SPIN] = _SPINS if n <= available_cores() else _FEW_SPINS
        self._make_tickets(1)
        self._inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(n - 1)]
        self._done: SimpleQueue[None] = SimpleQueue()
        in_use = threading.Lock()
        self.take: Callable[[], bool] = functools.partial(in_use.acquire, False)
        """Keep the team for the calling thread until `give_back`; False if another one has it."""
        self.give_back: Callable[[], None] = in_use.release
        """Let other threads take the team."""
        if interpreter.is_on():
            return
        for i, inbox in enumerate(self._inboxes):
            arguments = (memory, self._at, i + 1, n, inbox, self._done)
            threading.Thread(target=_work, args=arguments, daemon=True, name="nbflow-team").start()

    def _make_tickets(self, n_calls: int) -> None:
        """Make room for the next row of each of so many calls, a cache line apart."""
        self._tickets = np.zeros(8 * n_calls + 8, np.int64)
        self._shared[_TICKETS] = (self._tickets.ctypes.data + 63) // 64 * 64

    def run(
        self, kernel: Callable[..., None], start: int, stop: int, parts: int, *args: Any
    ) -> None:
        """Call ``kernel(*args, a, b)`` on `parts` pieces [a, b) of [start, stop)."""
        if self._forks != _forks:
            self._begin()
        edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
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
            kernel(*args, edges[0], edges[1])
        except BaseException as error:
            failure = error
        while len(answers) < parts - 1:
            try:
                self._done.get()
            except BaseException as error:  # Ctrl-C; the others still write into the arrays
                failure = failure or error
        failure = next((error for error in answers if error is not None), failure)
        if failure is not None:
            raise failure

    def run_list(
        self,
        calls: CpuGraph,
        *,
        repeat: int = 1,
        stop: np.ndarray | None = None,
        cycles: np.ndarray | None = None,
    ) -> None:
        """Make the calls of a list, one after the other, each by all threads.

        Parameters
        ----------
        calls : CpuGraph
            Made for as many threads as this team has.
        repeat : int
            How many times to go through the list.
        stop : array of int64, shape (1,), optional
            No further repetition once this is not 0, which a call of the list may see to.
        cycles : array of int64, shape (number of calls,), optional
            The processor cycles of each call, barriers included, are added to it.

        Raises
        ------
        Exception
            What the first kernel that failed raised.  The calls behind it are made, too, but the
            list is not repeated.
        """
        if self._forks != _forks:
            self._begin()
        n_calls = len(calls.calls)
        if n_calls == 0 or repeat < 1:
            return
        if interpreter.is_on():
            _run_list_in_python(calls, repeat, stop, cycles)
            return
        if len(self._tickets) < 8 * n_calls + 8:
            self._make_tickets(n_calls)
        shared = self._shared
        shared[_TABLE : _TIMES + 1] = (
            calls.table_at,
            n_calls,
            repeat,
            0 if stop is None else stop.ctypes.data,
            0 if cycles is None else cycles.ctypes.data,
        )
        if calls.is_shared:
            try:
                if _announce(self._at, _LIST, self.n):
                    self._wake()
            finally:  # the others wait for this thread
                _run_job(self._at, 0, self.n)
        else:
            _run_job(self._at, 0, 1)
        if shared[_FAILED]:
            raised, shared[_FAILED] = int(shared[_FAILED]), 0
            raise error_of(raised, calls.calls[shared[_FAILED_CALL]].kernel)

    def _wake(self) -> None:
        for i, inbox in enumerate(self._inboxes):
            if self._shared[_THREADS + 8 * (i + 1)]:
                inbox.put(None)

    def close(self) -> None:
        """Let the other threads end."""
        if self._forks != _forks:
            return  # they are another process's
        for inbox in self._inboxes:
            inbox.put("end")
        # not through a compiled function: this may run while the interpreter shuts down
        self._shared[_JOB] = self._shared[_JOB] // 2 * 2 + 2 + _PYTHON

    def __del__(self) -> None:
        self.close()


def _run_list_in_python(
    calls: CpuGraph, repeat: int, stop: np.ndarray | None, cycles: np.ndarray | None
) -> None:
    """Do what `_run_job` does; here a kernel's own error comes out."""
    for _ in range(repeat):
        for i, call in enumerate(calls.calls):
            before = atomics.cycles()
            call()
            if cycles is not None:
                cycles[i] += atomics.cycles() - before
        if stop is not None and stop[0] != 0:
            return


def _work(
    memory: np.ndarray, at: int, thread: int, n: int, inbox: SimpleQueue[Any], done: Any
) -> None:
    """Live as one thread of a team; `memory` is only held on to."""
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
