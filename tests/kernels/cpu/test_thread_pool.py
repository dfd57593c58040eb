"""Thread pools: end of a graph, sharing of pools between threads, forks."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import pytest
from forked_child import in_forked_child

from nbflow_kernels.cpu import atomics, jit, parallel_for, thread_pool
from nbflow_kernels.cpu import graph as calls_module
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode
from nbflow_kernels.cpu.simd_memory import write_i64
from nbflow_kernels.cpu.thread_pool import ThreadPool

WAIT_S = 60.0


@jit.kernel
def _add_one(counts, start, stop):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        counts[i] += 1


@jit.kernel
def _stop_late(arrived, at_last, is_held, flag, start, stop):  # type: ignore[no-untyped-def]
    """Set the flag when another thread is held at the list's last barrier."""
    while atomics.load(arrived) == 0:
        atomics.pause()
    atomics.store(at_last, 1)
    while atomics.load(is_held) == 0:
        atomics.pause()
    flag[0] = 1


class _Held:
    """Holds another thread at the last barrier of a list, from one look to the next, until `go`.

    It takes the place of the system's yield, as if that took long.
    """

    def __init__(self) -> None:
        self.at_last, self.is_held = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.go = threading.Event()
        self._owner = threading.get_ident()
        self._yield = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(self._wait)

    def _wait(self, _: int) -> int:
        if self.at_last[0] and threading.get_ident() != self._owner:
            self.is_held[0] = 1
            self.go.wait(WAIT_S)
        return 0

    def install(self, made: ThreadPool) -> None:
        made._shared[thread_pool._SPIN] = 0
        made._shared[thread_pool._YIELD] = ctypes.cast(self._yield, ctypes.c_void_p).value
        _kept.append(self)  # the threads may call it as long as they live


_kept: list[_Held] = []


@pytest.fixture
def shared_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MIN_WORK_PER_PART", 1)


@pytest.fixture
def number_not_set() -> Iterator[None]:
    """Let the present thread be one that has not set its number of threads."""
    before, parallel_for._local.n_threads = parallel_for._local.n_threads, None
    yield
    parallel_for._local.n_threads = before


@pytest.mark.usefixtures("shared_always")
def test_thread_that_is_late_at_the_last_barrier_does_not_read_the_next_jobs_flag() -> None:
    """A stale flag would make it run the old list again while the others run the new one."""
    made, held = ThreadPool(2), _Held()
    held.install(made)
    first, second, flag = np.zeros(8, np.int64), np.zeros(8, np.int64), np.zeros(1, np.int64)
    cells = (
        made._at + 8 * thread_pool._ARRIVED,
        held.at_last.ctypes.data,
        held.is_held.ctypes.data,
    )
    late = GraphNode(_stop_late, (*cells, flag), 1, 1.0)
    old = CpuGraph([GraphNode(_add_one, (first,), 8, 1e6), late], 2)
    new = CpuGraph([GraphNode(_add_one, (second,), 8, 1e6)], 2)
    made.run_graph(old, repeat=100, stop=flag)
    assert held.is_held[0] == 1
    flag[0] = 0  # as for the next run with this flag
    held.go.set()
    made.run_graph(new)
    assert first.tolist() == [1] * 8
    assert second.tolist() == [1] * 8


@jit.kernel
def _fails_at(counted, limit, start, stop):  # type: ignore[no-untyped-def]
    counted[0] += 1
    if counted[0] == limit:
        raise ValueError("three is too many")


@jit.kernel
def _fails_with(x, start, stop):  # type: ignore[no-untyped-def]
    raise ValueError(x[0])


@pytest.mark.usefixtures("shared_always")
@pytest.mark.parametrize("n_threads", [1, 2])
def test_error_of_a_kernel_is_its_own_and_ends_the_list(n_threads: int) -> None:
    counts, counted = np.zeros(8, np.int64), np.zeros(1, np.int64)
    calls = [GraphNode(_fails_at, (counted, 3), 1, 1.0), GraphNode(_add_one, (counts,), 8, 1e6)]
    made, used = CpuGraph(calls, n_threads), ThreadPool(n_threads)
    with pytest.raises(ValueError, match="three is too many") as caught:
        used.run_graph(made, repeat=10)
    assert caught.value.__notes__ == ["raised by kernel _fails_at in a CPU graph"]
    assert counts.tolist() == [3] * 8
    used.run_graph(made, repeat=10)  # the pool still works
    assert counts.tolist() == [13] * 8


def test_error_with_values_that_are_not_in_the_machine_code_names_the_kernel() -> None:
    failing = CpuGraph([GraphNode(_fails_with, (np.ones(1),), 1, 1.0)], 1)
    with pytest.raises(ValueError, match="by kernel _fails_with") as caught:
        ThreadPool(1).run_graph(failing)
    assert caught.value.__notes__ == ["raised by kernel _fails_with in a CPU graph"]


def test_error_that_is_not_known_names_the_kernel() -> None:
    unknown = calls_module.error_of(calls_module._UNKNOWN, _add_one)
    assert str(unknown) == "kernel _add_one failed in a CPU graph with an unknown error"


@jit.kernel
def _write_sums(out, pair, _nothing, start, stop):  # type: ignore[no-untyped-def]
    if pair[0] < 0:
        raise ValueError("negative")
    for i in range(start, stop):
        write_i64(out + 8 * i, pair[0] + pair[1] + i)


def test_kernels_of_integers_are_called_without_an_entry_point() -> None:
    out = np.zeros(3, np.int64)
    call = calls_module.call_with_integers
    assert call(_write_sums, (out.ctypes.data, (2**62, 1), None), 3)
    assert out.tolist() == [2**62 + 1 + i for i in range(3)]
    assert not _write_sums._entries
    with pytest.raises(ValueError, match="negative") as caught:
        call(_write_sums, (0, (-1, 0), None), 0)
    assert caught.value.__notes__ == ["raised by kernel _write_sums in a CPU graph"]
    for other in ((out, (0, 1), None), (1.0, (0, 1), None), (0, (0, np.int64(1)), None)):
        assert not call(_write_sums, other, 3)
    assert not call(_write_sums.py_func, (out.ctypes.data, (5, 1), None), 3)


# ---- sharing of pools ---------------------------------------------------------------------


def _team_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "nbflow-pool"}


class _Meeting:
    """A kernel that a pool's threads are in at the same time."""

    def __init__(self, n: int) -> None:
        self._all_here = threading.Barrier(n)
        self._main = threading.local()
        self.most = 0

    def call(self, n_rows: int) -> list[tuple[int, int]]:
        """Share rows; return the ranges that were made."""
        self._main.is_here, ranges = True, list[tuple[int, int]]()
        parallel_for.parallel_for(self._kernel, n_rows, 1e12, ranges)
        return sorted(ranges)

    def _kernel(self, ranges: list[tuple[int, int]], start: int, stop: int) -> None:
        ranges.append((start, stop))
        if getattr(self._main, "is_here", False):
            self._all_here.wait(WAIT_S)
            self.most = max(self.most, len(_team_threads()))
            self._all_here.wait(WAIT_S)


@pytest.mark.usefixtures("number_not_set")
def test_threads_of_a_pool_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that find the pool in use compute alone: 8 callers on 5 processors share one pool."""
    monkeypatch.setattr(parallel_for, "available_cores", lambda: 5)
    before, meeting = len(_team_threads()), _Meeting(8)
    with ThreadPoolExecutor(8) as pool:
        ranges = list(pool.map(meeting.call, [1000] * 8))
    shared = [(i, i + 200) for i in range(0, 1000, 200)]
    assert sorted(ranges) == [*[[(0, 1000)]] * 7, shared] or sorted(ranges) == [
        shared, *[[(0, 1000)]] * 7
    ]  # fmt: skip
    assert meeting.most - before <= 4


def test_threads_that_set_their_number_get_it_at_the_same_time() -> None:
    """Ranks of a tensor-parallel model that are threads of one process do so."""
    meeting = _Meeting(2)

    def call(n: int) -> list[tuple[int, int]]:
        parallel_for.set_num_threads(n)
        return meeting.call(12)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(call, [3, 3])) == [[(0, 4), (4, 8), (8, 12)]] * 2


def test_threads_that_take_turns_share_a_pool() -> None:
    before = _team_threads()
    done: list[Any] = []

    def call() -> None:
        parallel_for.set_num_threads(4)
        parallel_for.parallel_for(lambda start, stop: done.append((start, stop)), 8, 1e12)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for pool in (one, other, one, other):
            pool.submit(call).result(WAIT_S)
        assert len(_team_threads() - before) <= 3
    assert len(done) == 16


def test_a_call_within_a_shared_call_does_not_wait_for_its_own_pool() -> None:
    inner: list[int] = []

    def kernel(start: int, stop: int) -> None:
        parallel_for.parallel_for(lambda a, b: inner.append(b - a), 6, 1e12)

    parallel_for.set_num_threads(2)
    parallel_for.parallel_for(kernel, 2, 1e12)
    assert sum(inner) == 12


# ---- forks ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("shared_always")
def test_forked_child_has_threads_of_its_own() -> None:
    counts = np.zeros(64, np.int64)
    calls = CpuGraph([GraphNode(_add_one, (counts,), 64, 1e9)] * 2, 2)

    def work(held: ThreadPool) -> tuple[int, ...]:
        held.run_graph(calls)
        parallel_for.run_graph(calls)
        parallel_for.parallel_for(_add_one, 64, 1e12, counts)
        held.run(_add_one, 0, 64, 2, counts)
        return tuple(set(counts.tolist()))

    parallel_for.set_num_threads(2)
    made = ThreadPool(2)
    assert work(made) == (6,)
    assert in_forked_child(lambda: work(made)) == (12,)
    assert work(made) == (12,)  # and the parent continues


def test_fork_waits_for_a_compilation_of_another_thread() -> None:
    """So that the lock of Numba's compiler is free in the child."""
    begun, end = threading.Event(), threading.Event()

    def compile_slowly() -> None:
        with calls_module.global_compiler_lock:
            begun.set()
            end.wait(WAIT_S)

    def compile_here() -> int:
        @jit.kernel
        def double(x):  # type: ignore[no-untyped-def]
            return 2 * x

        return int(double(21))

    other = threading.Thread(target=compile_slowly)
    other.start()
    begun.wait(WAIT_S)
    threading.Timer(0.2, end.set).start()  # a fork that does not wait is over by then
    assert in_forked_child(compile_here) == 42
    other.join()


def test_sleepers_are_looked_for_after_the_job_is_given_out() -> None:
    """Arm may do an acquire load before the exchange, and miss a thread that falls asleep."""
    announce = numba.njit(thread_pool._announce.py_func)  # what comes from the disk has no text
    announce.compile((numba.int64, numba.int64, numba.int64))
    (text,) = announce.inspect_llvm().values()
    loads = [line for line in text.splitlines() if "load atomic" in line]
    assert loads
    assert all("seq_cst" in line for line in loads)


def test_chunks_cover_the_rows_once_and_nest() -> None:
    counts = np.zeros(1000, np.int64)

    def add(start: int, stop: int) -> None:
        parallel_for.parallel_for(_add_one, stop - start, 1e9, counts[start:stop])
        parallel_for.parallel_chunks(lambda a, b: None, 10, 3)

    parallel_for.parallel_chunks(add, len(counts), 7)
    assert (counts == 1).all()


def test_an_error_in_a_chunk_ends_the_others() -> None:
    seen: list[int] = []

    def fail(start: int, stop: int) -> None:
        seen.append(start)
        raise ValueError(f"chunk {start}")

    with pytest.raises(ValueError, match="chunk"):
        parallel_for.parallel_chunks(fail, 1 << 20, 1)
    assert len(seen) <= parallel_for.get_num_threads()
    parallel_for.parallel_chunks(lambda start, stop: None, 64, 1)  # the pool is free again
