"""Pinned pools, and the division of processors among ranks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from nbflow_kernels.cpu import jit, parallel_for, pinning
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode
from nbflow_kernels.cpu.thread_pool import ThreadPool

ONE_NODE = {core: (0, core, 0) for core in range(64)}
# two nodes of four cores with two hardware threads, numbered as Linux does on many servers
SERVER = {core: (core % 8 // 4, core % 8, core // 8) for core in range(16)}


def _ranks(*cores: set[int], host: str = "a") -> list[tuple[str, frozenset[int]]]:
    return [(host, frozenset(some)) for some in cores]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 8])
def test_ranks_of_a_host_get_disjoint_processors(n_ranks):
    dealt = pinning.deal(_ranks(*[set(range(16))] * n_ranks), SERVER)
    assert sorted(core for cores in dealt for core in cores) == list(range(16))
    sizes = [len(cores) for cores in dealt]
    assert max(sizes) - min(sizes) <= 1
    if n_ranks in (2, 4, 8):  # no rank on two nodes, no physical core of two ranks
        assert all(len({SERVER[core][0] for core in cores}) == 1 for cores in dealt)
        physical = [SERVER[core][1] for cores in dealt for core in {SERVER[c][1] for c in cores}]
        assert len(physical) == len(set(physical)) == 8


def test_threads_take_physical_cores_before_their_second_hardware_threads():
    (cores,) = pinning.deal(_ranks(set(range(16))), SERVER)
    assert [SERVER[core][1] for core in cores[:8]] == list(range(8))
    assert [SERVER[core][2] for core in cores] == [0] * 8 + [1] * 8


def test_bound_ranks_and_other_hosts_keep_their_own():
    ranks = _ranks({0, 1}, {2, 3}) + _ranks({0, 1}, host="b")
    assert pinning.deal(ranks, ONE_NODE) == [[0, 1], [2, 3], [0, 1]]
    assert pinning.deal(_ranks({0, 1}, {0, 1, 2, 3}), ONE_NODE) == [[0], [1, 2, 3]]
    assert pinning.deal(_ranks({5}, {5}), ONE_NODE) == [[5], []]


def test_places_come_from_the_systems_description(tmp_path: Path):
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for core in range(8):
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    found = pinning.places(frozenset(range(8)), tmp_path)
    assert found == {core: (core % 4 // 2, core % 4, core // 4) for core in range(8)}
    assert pinning.places(frozenset({3}), tmp_path / "nothing") == {3: (0, 3, 0)}


@jit.kernel
def _fill(out, start, stop):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        out[i] = i


needs_linux = pytest.mark.skipif(not pinning.can_pin(), reason="only Linux pins threads")


@needs_linux
@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_threads_of_a_pool_run_where_they_are_pinned(n):
    before = os.sched_getaffinity(0)
    cores = tuple(sorted(before))
    pool, seen = ThreadPool(n, cores), dict[int, set[int]]()

    def note(start: int, stop: int) -> None:
        seen[start] = os.sched_getaffinity(0)

    pool.run(note, 0, n, n)
    assert seen == {i: {cores[i % len(cores)]} for i in range(n)}
    out = np.full(64, -1)
    pool.run_graph(CpuGraph([GraphNode(_fill, (out,), 64, 1e9)], n))
    assert out.tolist() == list(range(64))
    assert os.sched_getaffinity(0) == before, "the caller keeps its affinity"
    pool.close()


@needs_linux
def test_a_failed_kernel_gives_the_affinity_back():
    before = os.sched_getaffinity(0)
    pool = ThreadPool(2, tuple(sorted(before)))

    def fail(start: int, stop: int) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        pool.run(fail, 0, 2, 2)
    assert os.sched_getaffinity(0) == before
    pool.close()


@needs_linux
def test_a_processor_that_may_not_be_used_leaves_the_thread_unpinned():
    before = os.sched_getaffinity(0)
    assert not pinning.pin(100_000)
    with pinning.pinned(100_000):
        assert os.sched_getaffinity(0) == before


@needs_linux
def test_callers_with_other_processors_have_other_pools():
    core = min(os.sched_getaffinity(0))
    pools: list[ThreadPool | None] = []

    def call(cores: tuple[int, ...]) -> None:
        parallel_for.set_num_threads(3, cores)
        parallel_for.parallel_for(lambda a, b: None, 3, 1e9)
        pools.append(parallel_for._local.pool)

    for cores in ((), (core,), (), (core,)):
        caller = threading.Thread(target=call, args=(cores,))
        caller.start()
        caller.join()
    assert [pool and pool.cores for pool in pools] == [(), (core,), (), (core,)]


def test_the_environment_asks_for_pinning(monkeypatch):
    for value, wanted in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(pinning.VARIABLE, value)
        assert pinning.is_requested() is wanted
    monkeypatch.delenv(pinning.VARIABLE)
    assert not pinning.is_requested()
