"""Unit tests of block table and scheduler."""

from __future__ import annotations

import random

import numpy as np
import pytest

from nbflow.engine.request import Request
from nbflow.executor.step import make_step
from nbflow.kv_cache import BlockTable, KVStorage
from nbflow.sampling import Greedy
from nbflow.spec.layer_specs import HeadShape


def test_no_page_is_leaked_or_shared_over_random_operations():
    rng = random.Random(7)
    table = BlockTable(page_size=4)
    lengths: dict[int, int] = {}
    for sequence in range(3000):
        if lengths and rng.random() < 0.45:
            table.drop(lengths.popitem()[0])
        table.add(sequence)
        lengths[sequence] = 0
        for _ in range(rng.randrange(4)):
            chosen, n = rng.choice(list(lengths)), rng.randrange(1, 9)
            table.extend(chosen, n)
            lengths[chosen] += n
        alive = [s for s in lengths if lengths[s]]
        view = table.view(alive)
        assert len(set(view.kv_indices.tolist())) == len(view.kv_indices)
        assert view.kv_indices.size == 0 or view.kv_indices.max() < table.n_pages
        counts = np.diff(view.kv_indptr)
        np.testing.assert_array_equal(
            (counts - 1) * 4 + view.kv_last_page_len, [lengths[s] for s in alive]
        )
    for sequence in lengths:
        table.drop(sequence)
    assert sorted(table._free) == list(range(table.n_pages))


def test_storage_keeps_its_pages_when_it_grows():
    storage = KVStorage([2, 5], 4, HeadShape(3, 8, 8), "f16")
    storage.ensure(2)
    storage.layers[5][1][1] = 7
    storage.ensure(5)
    assert storage.layers[5][1].shape == (5, 3, 4, 8)
    assert (storage.layers[5][1][1] == 7).all()
    assert (storage.layers[5][1][2:] == 0).all()
    assert storage.n_bytes == 2 * 2 * 5 * 4 * 3 * 8 * 2


def request(n_prompt: int, n_computed: int = 0, n_new: int = 0) -> Request:
    return Request(list(range(n_prompt)), 10, Greedy(), ids=[9] * n_new, n_computed=n_computed)


def test_pending_tokens_of_a_request():
    r = request(4, 2)
    assert r.pending == [2, 3]
    r.n_computed = 4
    r.accept(42, -0.5)
    assert r.pending == [42]


def test_steps_of_several_sequences():
    table = BlockTable(4)
    table.add(0)
    table.add(1)
    make_step(table, [0], [[5, 6, 7]], [])
    step = make_step(table, [1, 0], [[1, 2], [8, 9]], [1, 3])
    np.testing.assert_array_equal(step.ids, [1, 2, 8, 9])
    np.testing.assert_array_equal(step.positions, [0, 1, 3, 4])
    np.testing.assert_array_equal(step.batch_indices, [0, 0, 1, 1])
    np.testing.assert_array_equal(step.qo_indptr, [0, 2, 4])
    np.testing.assert_array_equal(step.pages.kv_last_page_len, [2, 1])
    np.testing.assert_array_equal(np.diff(step.pages.kv_indptr), [1, 2])


def test_a_sequence_is_added_once():
    table = BlockTable()
    table.add(1)
    with pytest.raises(ValueError, match="already"):
        table.add(1)
