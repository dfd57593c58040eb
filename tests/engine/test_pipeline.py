"""Pipeline parallelism: stages overlap and results are unchanged."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from small_models import write_llama

import nbflow
from nbflow.distributed import SelfComm
from nbflow.engine.request import Request
from nbflow.engine.scheduler import ScheduledRequest, Scheduler
from nbflow.engine.worker import Worker
from nbflow.kv_cache import BlockTable
from nbflow.sampling import Greedy


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
    with nbflow.load(checkpoint, comm=SelfComm(), kv="f32") as model:
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


def test_a_tied_head_gives_the_bits_of_one_rank():
    """The last stage multiplies the embedding without looking it up."""
    found = []
    for partition in ("0", "0;1"):
        with nbflow.load("tiny_python", partition=partition, threads=1) as model:
            found.append(model.logits([5, 9, 2, 300]))
    assert np.array_equal(*found)


def test_a_cache_without_free_pages_takes_turns(checkpoint, prompts, expected):
    with nbflow.load(checkpoint, partition="0;1;2", kv="f32", threads=1) as model:
        model.call("configure", None, None, 6)  # pages of 64 tokens, for 7 sequences that need 9
        requests = [
            model.make_request(p, 9, "sample", 3 + i, True, temperature=0.8)
            for i, p in enumerate(prompts)
        ]
        for request in requests:
            model.call("submit", request)
        while any(r.finish_reason is None for r in requests):
            model.call("step", 0.0)
        assert [r.ids for r in requests] == expected


def test_a_request_ended_on_its_way_gives_nothing_more(checkpoint, prompts, expected):
    with nbflow.load(checkpoint, partition="0;1", kv="f32", threads=1) as model:
        requests = [
            model.make_request(p, 9, "sample", 3 + i, True, temperature=0.8)
            for i, p in enumerate(prompts[:4])
        ]
        for request in requests:
            model.call("submit", request)
        model.call("step", 0.0)  # leaves steps on their way
        model.call("end", requests[3].id, "abort")
        while any(r.finish_reason is None for r in requests):
            assert requests[3] not in [o.request for o in model.call("step", 0.0)[0]]
        assert [r.ids for r in requests[:3]] == expected[:3]
        assert len(requests[3].ids) < 9
        assert model.workers[1].table.n_used_pages == 0


@pytest.mark.parametrize(("n", "begun"), [(4, 2), (1, 1)])
def test_a_step_begins_before_the_last_one_has_ended(checkpoint, monkeypatch, n, begun):
    events = []

    def noted(name):
        original = getattr(Worker, name)

        def call(rank, *arguments):
            if rank.mine.first:
                events.append(name)
            return original(rank, *arguments)

        return call

    for name in ("dispatch_step", "collect_step"):
        monkeypatch.setattr(Worker, name, noted(name))
    with nbflow.load(checkpoint, partition="0;1", threads=1) as model:
        model.generate_batch([[1, 2]] * n, max_tokens=6, ignore_eos=True)
    ahead = np.cumsum([1 if name == "dispatch_step" else -1 for name in events])
    assert ahead.max() == begun
    assert ahead[-1] == 0


@pytest.mark.parametrize("seed", range(12))
def test_scheduling_around_busy_requests(seed):
    """Requests in flight are not scheduled, pages suffice, every request finishes."""
    rng = random.Random(seed)
    depth, table = rng.randrange(2, 5), BlockTable(4, rng.randrange(24, 40))
    scheduler = Scheduler(table, 16, prefix_cache=rng.random() < 0.5)
    requests = [
        Request([rng.randrange(3)] * rng.randrange(1, 40), rng.randrange(1, 30), Greedy(),
                priority=rng.randrange(3))
        for _ in range(12)
    ]  # fmt: skip
    flying: deque[list[ScheduledRequest]] = deque()
    coming = list(requests)

    def land() -> None:
        for entry in flying.popleft():
            request, emits_token = entry.request, entry.emits_token
            request.n_computed += entry.n_tokens
            if emits_token:
                request.accept(7)
            table.commit(request.id, request.prompt + request.ids)
            if request.finish_reason is not None:
                scheduler.remove(request)

    for _ in range(5000):
        if coming and rng.random() < 0.3:
            scheduler.add(coming.pop())
        if flying and (len(flying) == depth or table.n_available < len(scheduler.running)):
            land()
            continue
        busy = {entry.request.id for scheduled in flying for entry in scheduled}
        held = {i: table.length(i) for i in busy}
        most = -(-max(1, len(scheduler.requests)) // depth)
        scheduled = scheduler.next_step(busy, most)
        assert len(scheduled) <= most
        assert not busy & {entry.request.id for entry in scheduled}
        assert held == {i: table.length(i) for i in busy}  # still there, nothing taken away
        for entry in scheduled:
            table.extend(entry.request.id, entry.n_tokens)
        if scheduled:
            flying.append(scheduled)
        elif flying:
            land()
        elif not coming and not scheduler.requests:
            break
    assert all(len(r.ids) == r.max_tokens for r in requests)
    assert table.n_used_pages == 0
