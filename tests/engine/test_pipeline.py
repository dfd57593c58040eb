"""Stages work at the same time, and nobody sees a difference in the results."""

from __future__ import annotations

import numpy as np
import pytest
from specs import write_llama

import nbflow
from nbflow.engine.rank import RankEngine
from nbflow.parallel import Alone


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, n_layers=3, n_heads=8, n_kv_heads=2, intermediate_size=320, max_context=256)
    return folder


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(0, 101, n).tolist() for n in (3, 70, 1, 12, 40, 9, 100)]


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    with nbflow.load(checkpoint, comm=Alone(), kv="f32") as model:
        return generated(model, prompts)


def generated(model, prompts):
    results = model.generate_batch(
        prompts, max_tokens=9, decoding="sample", temperature=0.8, seed=3, ignore_eos=True
    )
    return [r.ids for r in results]


@pytest.mark.parametrize("partition", ["0;1", "0;1;2", "0:2;1"])
@pytest.mark.parametrize("budget", [8, 512])
def test_batches_through_stages_give_what_one_rank_gives(
    checkpoint, prompts, expected, partition, budget
):
    with nbflow.load(
        checkpoint, partition=partition, kv="f32", max_step_tokens=budget, threads=1
    ) as model:
        model.reset_traffic()
        assert generated(model, prompts) == expected
        traffic = model.traffic()
        assert traffic["measured_bytes"] == traffic["predicted_bytes"]
        for _ in model.stream(prompts[0], max_tokens=20, ignore_eos=True):
            break  # leaves in the middle of steps that are on their way
        assert generated(model, prompts[:3]) == expected[:3]


def test_a_cache_without_free_pages_takes_turns(checkpoint, prompts, expected):
    with nbflow.load(checkpoint, partition="0;1;2", kv="f32", threads=1) as model:
        for engine in model.engines:  # 6 pages of 64 tokens for 7 sequences that need 9
            engine.configure(max_pages=6)
        requests = [
            model.make_request(p, 9, "sample", 3 + i, True, temperature=0.8)
            for i, p in enumerate(prompts)
        ]
        for request in requests:
            model.call("submit", per_engine=model.copies(request))
        while any(r.finish_reason is None for r in requests):
            model.call("advance", 0.0)
        assert [r.ids for r in requests] == expected


@pytest.mark.parametrize(("n", "begun"), [(4, 2), (1, 1)])
def test_a_step_begins_before_the_last_one_has_ended(checkpoint, monkeypatch, n, begun):
    events = []

    def noted(name):
        original = getattr(RankEngine, name)

        def call(rank, *arguments):
            if rank.mine.first:
                events.append(name)
            return original(rank, *arguments)

        return call

    for name in ("begin_step", "end_step"):
        monkeypatch.setattr(RankEngine, name, noted(name))
    with nbflow.load(checkpoint, partition="0;1", threads=1) as model:
        model.generate_batch([[1, 2]] * n, max_tokens=6, ignore_eos=True)
    ahead = np.cumsum([1 if name == "begin_step" else -1 for name in events])
    assert ahead.max() == begun
    assert ahead[-1] == 0
