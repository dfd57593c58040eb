"""Division of rows among 1 to 128 threads: balance, whole tiles, least work, first touch."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.cpu import graph as graph_module
from nbflow_kernels.cpu import parallel_for, splits
from nbflow_kernels.cpu.cpu_quota import available_cores
from nbflow_kernels.cpu.graph import CpuGraph
from nbflow_kernels.cpu.thread_pool import ThreadPool
from nbflow_kernels.quantized_matmul import cpu, int8_activations

THREADS = (1, 2, 3, 8, 16, 24, 64, 96, 128)
ROWS = (1, 2, 7, 16, 128, 129, 352, 2000)


@pytest.mark.parametrize("tile", [1, 2])
@pytest.mark.parametrize("n_threads", THREADS)
def test_parts_cover_the_rows_in_whole_tiles_of_about_equal_size(n_threads, tile):
    for n_rows in ROWS:
        parts = splits.count_parts(n_rows, 1e12, n_threads, 1.0, tile)
        shares = [splits.part(n_rows, i, parts, tile) for i in range(parts)]
        assert [a for a, _ in shares[1:]] == [b for _, b in shares[:-1]]
        assert (shares[0][0], shares[-1][1]) == (0, n_rows)
        tiles = [-(-(b - a) // tile) for a, b in shares]
        assert all(a % tile == 0 for a, _ in shares)
        assert min(tiles) >= 1
        assert max(tiles) - min(tiles) <= 1


@pytest.mark.parametrize("n_threads", THREADS)
def test_no_thread_idles_where_it_would_shorten_the_longest_part(n_threads):
    for n_rows, tile in itertools.product(ROWS, (1, 2)):
        parts = splits.count_parts(n_rows, 1e12, n_threads, 1.0, tile)
        n_tiles = -(-n_rows // tile)
        assert parts <= n_threads
        longest = -(-n_tiles // parts)
        assert longest == max(1, -(-n_tiles // min(n_threads, n_tiles)))
        # one thread fewer takes longer: no thread waits at a barrier for nothing
        assert parts == 1 or -(-n_tiles // (parts - 1)) > longest


def test_a_thread_takes_part_from_the_least_work_on():
    for work, n_threads in itertools.product((0.0, 1.0, 5e4, 1e6, 1e9), THREADS):
        parts = splits.count_parts(128, work, n_threads, 2e4)
        assert parts == 1 or work / parts >= 2e4
    counts = [splits.count_parts(128, work, 64, 2e4) for work in np.geomspace(1e3, 1e8, 40)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 64)
    assert splits.count_parts(0, 0.0, 64, 2e4) == 1
    assert splits.part(0, 0, 1) == (0, 0)


def test_the_longest_part_shrinks_as_threads_are_added():
    for n_rows, work in itertools.product(ROWS, (1e3, 1e5, 4e6, 1e9)):
        longest = []
        for n_threads in range(1, 129):
            parts = splits.count_parts(n_rows, work, n_threads, graph_module.MIN_WORK_PER_PART)
            shares = [splits.part(n_rows, i, parts) for i in range(parts)]
            longest.append(max(stop - start for start, stop in shares))
        assert longest == sorted(longest, reverse=True)
        assert longest[0] == n_rows


def test_pool_and_graph_give_threads_whole_tiles(monkeypatch):
    """The int8 GEMM computes two row groups at a time; parts of one would read half of the tile."""
    rng = np.random.default_rng(2)
    w = nk.quantize(rng.standard_normal((7 * 16, 64), dtype=np.float32), "q4_0")
    x = rng.standard_normal((40, 64), dtype=np.float32)
    rows = int8_activations.Int8Rows.empty(40, 64)
    int8_activations.quantize_activations(x, rows)
    with parallel_for.capture() as seen:
        cpu.matmul_int8(rows, w, None, False, np.empty((40, 112), np.float32))
        cpu.matmul_int8(rows.first(1), w, None, False, np.empty((1, 112), np.float32))
    gemm, gemv = seen.calls
    assert (gemm.tile, gemv.tile) == (2, 1)
    monkeypatch.setattr(graph_module, "MIN_WORK_PER_PART", 1)
    assert (gemm.parts(3), gemm.parts(64), gemv.parts(64)) == (2, 4, 7)
    ranges: list[tuple[int, int]] = []
    pool = ThreadPool(4)
    pool.run(lambda a, b: ranges.append((a, b)), 0, 7, 4, tile=2)
    assert sorted(ranges) == [(0, 2), (2, 4), (4, 6), (6, 7)]
    for dynamic in (10**15, 1):
        monkeypatch.setattr(graph_module, "DYNAMIC_WORK", dynamic)
        graph = CpuGraph([gemm, gemv], 4)
        assert graph.table[:, graph_module.TILE].tolist() == [2, 1]
        assert graph.table[0, graph_module.GRAIN] % 2 == 0
        gemm.args[-1][:] = np.nan
        pool.run_graph(graph)
        wanted = gemm.args[-1].copy()
        gemm()
        assert np.array_equal(wanted, gemm.args[-1])
    pool.close()


@pytest.mark.parametrize("n", [2, 5, 16])
def test_a_thread_writes_at_load_the_rows_that_it_multiplies(n):
    """Every thread begins with the chunks of its own part: first touch is by who reads later."""
    n_rows, names = 16 * 4 * n, dict[int, int]()
    own = {thread: splits.part(4 * n, thread, n) for thread in range(n)}
    begin, lock = threading.Barrier(n), threading.Lock()
    met = set[int]()

    def write(start: int, stop: int) -> None:
        mine = threading.get_ident()
        if mine not in met:
            met.add(mine)
            begin.wait(60)
        with lock:
            names[start // 16] = mine

    parallel_for.set_num_threads(n)
    parallel_for.parallel_chunks(write, n_rows, 16, 16)
    assert len(names) == 4 * n
    firsts = [names[first] for first, _ in own.values()]
    assert len(set(firsts)) == n


@pytest.mark.parametrize(
    ("n_rows", "chunk", "n", "wanted"),
    [(640, 320, 2, 2), (640, 320, 16, 14), (640, 640, 64, 14), (33, 64, 3, 3)],
)
def test_chunks_become_smaller_for_many_threads(n_rows, chunk, n, wanted):
    seen: list[tuple[int, int]] = []
    parallel_for.set_num_threads(n)
    parallel_for.parallel_chunks(lambda a, b: seen.append((a, b)), n_rows, chunk, 16)
    seen.sort()
    assert len(seen) == wanted
    assert all(a % 16 == 0 for a, _ in seen)
    assert [b for _, b in seen[:-1]] == [a for a, _ in seen[1:]]
    assert (seen[0][0], seen[-1][1]) == (0, n_rows)


def test_an_error_in_a_chunk_ends_the_others():
    seen: list[int] = []

    def fail(start: int, stop: int) -> None:
        seen.append(start)
        raise ValueError("unreadable")

    parallel_for.set_num_threads(2)
    with pytest.raises(ValueError, match="unreadable"):
        parallel_for.parallel_chunks(fail, 1000, 1)
    assert len(seen) <= 2
    assert available_cores() >= 1
