"""Overlapped steps in two halves: the same bits, the same bytes sent."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from small_models import write_llama

import nbflow
from nbflow.executor import make_step, overlap
from nbflow.executor.bind import PythonOp
from nbflow.executor.overlap import slice_step
from nbflow.kv_cache import BlockTable, StateTable
from nbflow_kernels.errors import UsageError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, n_layers=2, n_heads=8, n_kv_heads=2, intermediate_size=320, max_context=256)
    return folder


@pytest.mark.parametrize("page_size", [4, 64])
@pytest.mark.parametrize("lengths", [[9], [3, 1, 5], [1, 1, 1, 1], [8, 8]])
def test_halves_are_the_steps_that_would_be_run_one_after_the_other(lengths, page_size):
    def table() -> BlockTable:
        made = BlockTable(page_size, states=StateTable())
        for sequence in range(len(lengths)):
            made.add(sequence)
            make_step(made, [sequence], [[7] * (3 + sequence)], [])  # earlier context
        return made

    tokens = [[10 * b + i for i in range(n)] for b, n in enumerate(lengths)]
    n = sum(lengths)
    rows = [0, n // 2, n - 1]
    step = make_step(table(), range(len(lengths)), tokens, rows)
    for cut in range(1, n):
        one_by_one, first = table(), 0
        for start, stop in ((0, cut), (cut, n)):
            some = {}
            first = 0
            for b, ids in enumerate(tokens):
                inside = ids[max(0, start - first) : max(0, stop - first)]
                if inside:
                    some[b] = inside
                first += len(ids)
            here = [r - start for r in rows if start <= r < stop]
            wanted = make_step(one_by_one, list(some), list(some.values()), here)
            found = slice_step(step, start, stop, page_size)
            names = "ids", "positions", "batch_indices", "qo_indptr", "logit_rows", "types"
            for name in (*names, "state_rows", "start_positions"):
                np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name)
            for name in ("kv_indptr", "kv_last_page_len", "kv_lens"):
                a, b = getattr(found.pages, name), getattr(wanted.pages, name)
                np.testing.assert_array_equal(a, b, name)
            assert found.pages.kv_indices.shape == wanted.pages.kv_indices.shape


@pytest.mark.parametrize("partition", ["0&1", "0&1;2"])
@pytest.mark.parametrize("all_reduce", ["f32", "q8"])
def test_the_same_bits_as_without(checkpoint, monkeypatch, partition, all_reduce):
    ids = np.random.default_rng(3).integers(0, 101, 90)
    prompts = [ids[:n].tolist() for n in (3, 40, 17, 30)]
    monkeypatch.setattr(overlap, "MIN_TOKENS", 16)
    seen = []
    for wish in "01":
        monkeypatch.setenv("NBFLOW_OVERLAP", wish)
        options = {"partition": partition, "all_reduce": all_reduce, "kv": "f32", "threads": 1}
        with nbflow.load(checkpoint, **options) as model:
            model.reset_traffic()
            logits = model.logits(ids[:60])
            texts = [r.ids for r in model.generate_batch(prompts, 4, ignore_eos=True)]
            hidden = model.hidden(ids)
            traffic = model.traffic()
            assert traffic["measured_bytes"] == traffic["predicted_bytes"]
            seen.append((logits.tobytes(), hidden.tobytes(), texts, traffic["measured_bytes"]))
    assert seen[0] == seen[1]


def test_sums_are_on_their_way_while_the_other_half_is_computed():
    """Each all-reduce finishes only after the other half has been computed."""
    computed = [threading.Event() for _ in range(4)]
    order = []

    def piece(number: int, waits_for: int | None) -> overlap.Piece:
        def compute() -> None:
            order.append(number)
            computed[number].set()

        def exchange() -> None:
            assert waits_for is None or computed[waits_for].wait(30)

        return [PythonOp("gate", compute)], PythonOp("all_reduce", exchange)

    executor = overlap.OverlappingExecutor.__new__(overlap.OverlappingExecutor)
    executor.seconds = None
    executor._background = ThreadPoolExecutor(1)
    first = [piece(0, waits_for=1), piece(2, waits_for=3), ([], None)]
    second = [piece(1, waits_for=2), piece(3, waits_for=None), ([], None)]
    executor._run_both(iter(first), iter(second))
    executor._background.shutdown()
    assert order == [0, 1, 2, 3]


def test_the_variable_is_checked(checkpoint, monkeypatch):
    monkeypatch.setenv("NBFLOW_OVERLAP", "yes")
    with pytest.raises(UsageError, match="NBFLOW_OVERLAP must be 0 or 1, got 'yes'"):
        nbflow.load(checkpoint, partition="0&1")
