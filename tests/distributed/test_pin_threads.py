"""Pinned threads of models: same tokens, disjoint processors of the ranks of a host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from small_models import write_llama

import nbflow
from nbflow.distributed import cpu_threads as module
from nbflow.distributed.comm import SelfComm
from nbflow.distributed.cpu_threads import CpuThreads, cpu_threads
from nbflow_kernels.cpu import parallel_for, pinning, thread_pool
from nbflow_kernels.errors import UsageError

needs_linux = pytest.mark.skipif(not pinning.can_pin(), reason="only Linux pins threads")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_llama(folder)
    return folder


@needs_linux
def test_ranks_in_one_process_share_its_processors(monkeypatch):
    monkeypatch.setattr(module, "_cores", lambda: frozenset(range(4)))
    monkeypatch.setattr(module, "available_cores", lambda: 4)
    monkeypatch.setattr(pinning, "places", lambda cores: {core: (0, core, 0) for core in cores})
    monkeypatch.delenv(pinning.VARIABLE, raising=False)
    pinned = {3: CpuThreads(2, (0, 1)), 5: CpuThreads(2, (2, 3))}
    assert cpu_threads(SelfComm(), (3, 5), 2, True) == pinned
    assert cpu_threads(SelfComm(), (3, 5), 2, False) == {3: CpuThreads(2), 5: CpuThreads(2)}
    monkeypatch.setenv(pinning.VARIABLE, "1")
    assert cpu_threads(SelfComm(), (3, 5), 2, False) == pinned


def test_more_threads_of_ranks_than_cores_do_not_spin(monkeypatch):
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    monkeypatch.setattr(pinning, "can_pin", lambda: False)
    for numbers, threads, crowded in (((0,), 2, False), ((0, 1), 1, False), ((0, 1), 2, True)):
        found = cpu_threads(SelfComm(), numbers, threads, False)
        assert {each.crowded for each in found.values()} == {crowded}
    before = parallel_for._local.n_threads
    try:
        parallel_for.set_num_threads(2, crowded=True)
        pool = parallel_for._acquire_pool(2, needed=True)
        pool.release()
        assert pool._shared[thread_pool._SPIN] == thread_pool._FEW_SPINS
    finally:
        parallel_for.set_num_threads(before or 2)
    assert parallel_for._local.pool is not pool


def test_a_system_that_cannot_pin_refuses_the_option_and_ignores_the_environment(monkeypatch):
    monkeypatch.setattr(pinning, "can_pin", lambda: False)
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    with pytest.raises(UsageError, match="pin_threads needs Linux"):
        cpu_threads(SelfComm(), (0,), 2, True)
    monkeypatch.setenv(pinning.VARIABLE, "1")
    assert cpu_threads(SelfComm(), (0,), 2, False) == {0: CpuThreads(2)}


@needs_linux
@pytest.mark.parametrize("partition", ["0", "0&1"])
def test_tokens_are_the_same_and_the_caller_keeps_its_affinity(checkpoint, partition):
    before, results = os.sched_getaffinity(0), []
    for pin_threads in (False, True):
        with nbflow.load(
            checkpoint, partition=partition, threads=2, pin_threads=pin_threads, weights="q4"
        ) as model:
            results.append(model.generate([1, 2, 3, 4, 5], max_tokens=6, ignore_eos=True).ids)
            if partition == "0":
                pool = parallel_for._local.pool
                assert pool is None or bool(pool.cores) is pin_threads
        assert os.sched_getaffinity(0) == before
    assert results[0] == results[1]
    parallel_for.set_num_threads(1)
