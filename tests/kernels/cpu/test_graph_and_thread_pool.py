"""CPU graphs and the thread pool that runs them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.cpu import graph as calls_module
from nbflow_kernels.cpu import jit, parallel_for, simd
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode
from nbflow_kernels.cpu.thread_pool import ThreadPool


@jit.kernel
def _shift(x, out, step, start, stop):  # type: ignore[no-untyped-def]
    """Write out[i] = x[i - 1 (cyclic)] + step: every row needs a row of another thread."""
    for i in range(start, stop):
        out[i] = x[i - 1] + step


@jit.kernel
def _count(cell, limit, flag, start, stop):  # type: ignore[no-untyped-def]
    cell[0] += 1
    if cell[0] >= limit:
        flag[0] = 1


@jit.kernel
def _mixed(x, numbers, yes, half, out, start, stop):  # type: ignore[no-untyped-def]
    a, b = numbers
    for i in range(start, stop):
        out[i] = x[i] * a + b + half + (100 if yes else 0)


@jit.kernel
def _add_rows(w, cell, out, start, stop):  # type: ignore[no-untyped-def]
    """Write out[i] = the sum of row i of w times the cell."""
    for i in range(start, stop):
        out[i] = w[i].sum() * cell[0]


@jit.kernel
def _fails(x, start, stop):  # type: ignore[no-untyped-def]
    if stop > 0:
        raise MemoryError("too little")


@pytest.fixture
def shared_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MIN_WORK_PER_PART", 1)


def _ring(n: int, length: int) -> tuple[np.ndarray, np.ndarray, list[GraphNode]]:
    a, b = np.arange(n, dtype=np.int64), np.zeros(n, np.int64)
    both = ((a, b), (b, a))
    return a, b, [GraphNode(_shift, (*both[i % 2], 1), n, 1e6) for i in range(length)]


@pytest.mark.parametrize("n_threads", [2, 3])
def test_idle_threads_ask_for_what_they_read_next(n_threads: int) -> None:
    """Prefetching is a hint in the table of shared calls; results do not change."""
    w, cell, flag = np.ones((50, 3000), np.float32), np.zeros(1, np.int64), np.zeros(1, np.int64)
    out = np.full((20, 50), np.nan, np.float32)
    alone = GraphNode(_count, (cell, 10**9, flag), 1, 1.0)
    listed = [c for row in out for c in (alone, GraphNode(_add_rows, (w, cell, row), 50, 1e9))]
    calls = CpuGraph(listed, n_threads)
    assert calls.table[0, calls_module.READS] == 0
    assert calls.table[1, calls_module.READS] == w.ctypes.data
    assert calls.table[1, calls_module.ROW_BYTES] == 3000 * 4
    ThreadPool(n_threads).run_graph(calls)
    assert np.array_equal(out, 3000.0 * np.arange(1, 21)[:, None] * np.ones(50))


@pytest.mark.usefixtures("shared_always")
@pytest.mark.parametrize("n_threads", [1, 2, 3, 5])
def test_every_call_sees_the_results_of_the_one_before(n_threads: int) -> None:
    a, _, calls = _ring(64, 20)
    pool = ThreadPool(n_threads)
    pool.run_graph(CpuGraph(calls, n_threads), repeat=50)
    assert a.tolist() == [(i - 1000) % 64 + 1000 for i in range(64)]


@pytest.mark.usefixtures("shared_always")
def test_tickets_give_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "DYNAMIC_WORK", 1)
    a, _, calls = _ring(200, 10)
    made = CpuGraph(calls, 3)
    assert (made.table[:, calls_module.GRAIN] > 0).all()
    ThreadPool(3).run_graph(made, repeat=30)
    assert a.tolist() == [(i - 300) % 200 + 300 for i in range(200)]


@pytest.mark.usefixtures("shared_always")
def test_list_after_sleep_and_between_single_calls() -> None:
    a, b, calls = _ring(30, 2)
    pool = ThreadPool(3)
    made = CpuGraph(calls, 3)
    for i in range(40):
        if i % 10 == 9:
            time.sleep(0.02)  # the other threads go to sleep
        pool.run_graph(made)
        pool.run(_shift, 0, 30, 2 + i % 2, a, b, 0)
        pool.run(_shift, 0, 30, 3, b, a, 0)
    assert sorted(a.tolist()) == [i + 80 for i in range(30)]
    assert a.tolist() == [(i - 160) % 30 + 80 for i in range(30)]


def test_all_kinds_of_arguments() -> None:
    x, out = np.arange(6, dtype=np.float64)[::2], np.zeros(3)
    call = GraphNode(_mixed, (x, (2, 0.5), True, np.float32(0.25), out), 3, 1.0)
    ThreadPool(1).run_graph(CpuGraph([call], 1))
    expected = np.zeros(3)
    _mixed(x, (2, 0.5), True, np.float32(0.25), expected, 0, 3)
    assert out.tolist() == expected.tolist() == [100.75, 104.75, 108.75]


@pytest.mark.usefixtures("shared_always")
@pytest.mark.parametrize("n_threads", [1, 2])
def test_number_of_rows_in_a_cell_and_stop(n_threads: int) -> None:
    a, b = np.zeros(10, np.int64), np.ones(10, np.int64)
    rows, counted, flag = (np.array([n], np.int64) for n in (4, 0, 0))
    calls = [GraphNode(_shift, (b, a, 1), rows, 1e6), GraphNode(_count, (counted, 7, flag), 1, 1.0)]
    made, pool = CpuGraph(calls, n_threads), ThreadPool(n_threads)
    pool.run_graph(made, repeat=100, stop=flag)
    assert a.tolist() == [2] * 4 + [0] * 6
    assert counted[0] == 7
    rows[0] = 10
    pool.run_graph(made)
    assert a.tolist() == [2] * 10


def test_cycles_of_each_call_are_counted() -> None:
    _, _, calls = _ring(5000, 3)
    cycles = np.zeros(3, np.int64)
    ThreadPool(1).run_graph(CpuGraph(calls, 1), repeat=10, cycles=cycles)
    assert (cycles > 0).all()


@pytest.mark.usefixtures("shared_always")
@pytest.mark.parametrize("n_threads", [1, 2])
def test_kernel_that_fails_is_reported(n_threads: int) -> None:
    pool, x = ThreadPool(n_threads), np.zeros(4)
    made = CpuGraph([GraphNode(_fails, (x,), 4, 1e6)], n_threads)
    for _ in range(2):
        with pytest.raises(MemoryError, match="too little"):
            pool.run_graph(made)


def test_captured_launchers_give_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    x, w, weight = (
        rng.standard_normal(shape, dtype=np.float32) for shape in ((1, 256), (512, 256), (256,))
    )
    hidden, out = np.empty_like(x), np.empty((1, 512), np.float32)
    nk.rmsnorm(x, weight, eps=1e-5, out=hidden)
    expected = nk.matmul(hidden, w)
    hidden[:] = np.nan
    with parallel_for.capture() as seen:
        nk.rmsnorm(x, weight, eps=1e-5, out=hidden)
        nk.matmul(hidden, w, out=out)
    assert seen.complete
    assert len(seen.calls) == 2
    for n in (1, 2):
        out[:] = np.nan
        ThreadPool(n).run_graph(CpuGraph(seen.calls, n))
        assert np.array_equal(out, expected)


def test_unusable_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot hold an argument of type"):
        calls_module._add_words([], "text", simd.f32x16)


def test_closed_team_ends_its_threads() -> None:
    before = set(threading.enumerate())
    pool = ThreadPool(3)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    pool.close()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()
