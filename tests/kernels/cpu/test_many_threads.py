"""More threads than processors: 8, 16 and 64 threads give the bits of one.

Most threads of a large pool wait for a processor while others run, so barriers, tickets and the
split of rows and of keys into shares meet orders of events that two threads on two cores do not.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from small_models import write_llama

import nbflow
from nbflow_kernels import op_registry
from nbflow_kernels.cpu import graph as calls_module
from nbflow_kernels.cpu import jit, parallel_for
from nbflow_kernels.cpu.graph import CpuGraph, GraphNode
from nbflow_kernels.cpu.thread_pool import ThreadPool
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.testing import checks

N_THREADS = (8, 16, 64)
FAMILIES = ("attention", "quantized_matmul", "matmul", "moe", "sampling", "norm", "kv_cache")
VOCABULARY = 211


def _some_cases() -> list[OpCase]:
    """Return the first case of every op of the families that split their work."""
    first = {}
    for family in FAMILIES:
        for case in op_registry.load(family, "cases").CASES:
            if not case.timed:
                first.setdefault(case.op, case)
    return list(first.values())


@jit.kernel
def _count_rows(counts, start, stop):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        counts[i] += 1


@jit.kernel
def _shift(x, out, start, stop):  # type: ignore[no-untyped-def]
    """Write out[i] = x[i - 1 (cyclic)] + 1: every share needs a row of another thread."""
    for i in range(start, stop):
        out[i] = x[i - 1] + 1


def _bits(case: OpCase) -> list[bytes]:
    done = checks.run(case)
    changed = [done["arguments"][name] for name in case.mutates]
    return [np.asarray(leaf).tobytes() for leaf in checks.leaves([done["result"], changed])]


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("case", _some_cases(), ids=lambda case: case.id)
def test_op_is_bitwise_the_same(case: OpCase) -> None:
    parallel_for.set_num_threads(1)
    alone = _bits(case)
    for n in N_THREADS:
        parallel_for.set_num_threads(n)
        assert _bits(case) == alone


@pytest.mark.parametrize("n_threads", N_THREADS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["shares", "tickets"])
def test_graph_gives_every_row_once_and_in_order(
    n_threads: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "MIN_WORK_PER_PART", 1)
    monkeypatch.setattr(calls_module, "DYNAMIC_WORK", 1 if dynamic else 10**9)
    n_rows, n_calls, repeat = 333, 4, 5  # rows that 8, 16 and 64 do not divide
    a, b = np.arange(n_rows, dtype=np.int64), np.zeros(n_rows, np.int64)
    both = ((a, b), (b, a))
    calls = [GraphNode(_shift, both[i % 2], n_rows, 1e6) for i in range(n_calls)]
    pool, graph = ThreadPool(n_threads), CpuGraph(calls, n_threads)
    assert (graph.table[:, calls_module.GRAIN] > 0).any() == dynamic
    pool.run_graph(graph, repeat=repeat)
    moved = n_calls * repeat
    assert a.tolist() == [(i - moved) % n_rows + moved for i in range(n_rows)]
    pool.close()


@pytest.mark.parametrize("n_rows", [1, 7, 64, 65])
def test_fewer_rows_than_threads(n_rows: int) -> None:
    counts, pool = np.zeros(n_rows, np.int64), ThreadPool(64)
    for parts in range(1, min(64, n_rows) + 1):
        pool.run(_count_rows, 0, n_rows, parts, counts)
    assert counts.tolist() == [min(64, n_rows)] * n_rows
    pool.close()


def test_pools_of_many_threads_at_once() -> None:
    """Four callers with pools of 16: 64 threads that share nothing."""
    results: list[np.ndarray] = []

    def call() -> None:
        counts, pool = np.zeros(160, np.int64), ThreadPool(16)
        for _ in range(10):
            pool.run(_count_rows, 0, 160, 16, counts)
        pool.close()
        results.append(counts)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert [counts.tolist() for counts in results] == [[10] * 160] * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose matrices have more rows than 64 groups, and a partial one."""
    folder = tmp_path_factory.mktemp("wide")
    write_llama(
        folder, n_layers=1, hidden_size=320, intermediate_size=1056, n_heads=4, n_kv_heads=2,
        head_dim=64, vocab_size=VOCABULARY, max_context=448,
    )  # fmt: skip
    return folder


@pytest.mark.usefixtures("split_everything")
def test_generation_is_bitwise_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, decode steps and the log-probabilities, with captured graphs."""
    monkeypatch.setattr(calls_module, "MIN_WORK_PER_PART", 1)
    ids = (np.arange(150) * 37 % VOCABULARY).tolist()
    results = []
    for n in (1, *N_THREADS):
        with nbflow.load(
            checkpoint, weights="q4", kv="q8_0", activations="int8", threads=n
        ) as model:
            request = model.make_request(ids, 12, "top_p", 3, True, temperature=0.3)
            for _ in model.run_requests([request], burst_s=0.0):
                pass
            generation = model.generation(request)
            results.append((generation.ids, generation.logprobs))
    assert results[1:] == results[:1] * len(N_THREADS)
