"""Scheduler invariants over random requests, without a model."""

from __future__ import annotations

import random

import numpy as np
import pytest

from nbflow.engine.pooling import POOLINGS, Pooling
from nbflow.engine.request import Request
from nbflow.engine.scheduler import ScheduledRequest, Scheduler
from nbflow.engine.search import BeamSearch, ContrastiveSearch
from nbflow.engine.search.runtime import advance, empty_rows, fork_sequences
from nbflow.kv_cache import BlockTable
from nbflow.sampling import Greedy
from nbflow_kernels.errors import UsageError

PAGE = 4


def request(n_prompt: int, max_tokens: int = 10, first: int = 0, **fields) -> Request:
    ids = list(range(first, first + n_prompt))
    stop_ids = frozenset(fields.pop("stop_ids", {-1}))
    return Request(ids, max_tokens, Greedy(), stop_ids=stop_ids, **fields)


def scheduler(budget=16, max_pages=None, **options) -> Scheduler:
    return Scheduler(BlockTable(PAGE, max_pages), budget, **options)


def run(s: Scheduler, draw=lambda request: 7, scheduled=None) -> list[tuple[int, int]]:
    """Run a step like the engine; return (request, tokens) of its entries."""
    scheduled = s.next_step() if scheduled is None else scheduled
    for entry in scheduled:
        r, emits_token = entry.request, entry.emits_token
        for sequence, ids in entry.parts:
            s.table.extend(sequence, len(ids))
        if r.search is not None:
            search(s, entry, draw)
            continue
        n_prompt_rows = min(r.n_computed + entry.n_tokens, len(r.prompt) - 1) - len(
            r.prompt_results
        )
        if r.needs_prompt_logits:
            r.prompt_results += [(0.0, [])] * n_prompt_rows
        r.n_computed += entry.n_tokens
        if emits_token:
            r.accept(draw(r))
            for token in entry.drafts:
                if r.finish_reason is None and token == r.ids[-1]:  # proposed rightly
                    r.accept(draw(r))
                    r.n_computed += 1
            s.table.truncate(r.id, min(r.n_computed, s.table.length(r.id)))
        elif r.max_tokens == 0 and r.n_pending == 0:
            r.finish_reason = "length"
        s.table.commit(r.id, r.prompt + r.ids)
    for entry in scheduled:
        if entry.request.finish_reason is not None:
            s.remove(entry.request)
    return [(entry.request.id, entry.n_tokens) for entry in scheduled]


def search(s: Scheduler, entry: ScheduledRequest, draw) -> None:
    """Advance a search with random log-probabilities."""
    r, rows = entry.request, empty_rows([entry], 12)
    if not r.branches:
        r.n_computed += entry.n_tokens
    for row in rows:
        n = (row.shape[1] - 1) // 2
        row[:, 0] = 0.5
        row[:, 1 : 1 + n] = np.arange(n) + draw(r)
        row[:, 1 + n :] = -np.sort(np.arange(n) % 5 + 0.1 * draw(r))
        advance(r, row)
        if r.finish_reason is None:
            fork_sequences(r, s.table, s.numbers)


def random_search(rng: random.Random) -> Request:
    kind = rng.choice((BeamSearch(2), BeamSearch(3, n=2), ContrastiveSearch(3)))
    return request(rng.randrange(1, 10), rng.randrange(1, 9), search=kind, stop_ids={8})


def text(n: int, method: str = "mean", whole: bool = False, **fields) -> Request:
    """Return an embedding request."""
    return request(n, 0, pooling=Pooling(method, True, whole), **fields)


def random_request(rng: random.Random) -> Request:
    if rng.random() < 0.2:
        return text(rng.randrange(1, 60), rng.choice(POOLINGS), priority=rng.choice((0, 1)))
    return request(
        rng.randrange(1, 60),
        rng.randrange(1, 40),
        first=rng.choice((0, 0, 100)),
        priority=rng.choice((0, 0, 0, 1, -1)),
        prompt_logprobs=rng.choice((None, None, None, 0)),
        proposer=rng.choice((None, lambda ids, n: [7] * n)),
        n_proposed=3,
    )


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_and_no_limit_is_exceeded(seed):
    rng = random.Random(seed)
    budget, most = rng.randrange(2, 40), rng.randrange(1, 12)
    s = scheduler(budget, 30, max_sequences=most, max_logit_rows=8, prefix_cache=seed % 2 == 0)
    requests, ended = [], 0
    for i in range(4000):
        if i < 3000 and rng.random() < 0.15:
            searches = s.max_sequences >= 3 and rng.random() < 0.2
            requests.append(random_search(rng) if searches else random_request(rng))
            s.add(requests[-1])
        if s.requests and rng.random() < 0.02:
            s.remove(rng.choice(s.requests))
        generating = [r for r in s.running if r.is_generating]
        reading = next((r for r in s.running if not r.is_generating), None)
        before = {id(r): len(r.ids) for r in generating}
        scheduled = s.next_step()
        chosen = [w.request for w in scheduled]
        assert sum(w.n_tokens + len(w.drafts) for w in scheduled) <= budget
        assert sum(w.n_logits for w in scheduled if w.n_logits > 1) <= 8 + most
        assert len(scheduled) <= len(s.running) <= s.n_sequences <= s.max_sequences
        assert all(w.n_tokens > 0 for w in scheduled)
        kinds = [w.request.pooling is not None for w in scheduled]
        assert kinds == sorted(kinds)  # behind those that have logits
        # decoding requests run in every step unless preempted
        assert all(r in chosen or r in s.waiting for r in generating)
        # a prompt goes on whatever the others do
        assert reading is None or reading in chosen or reading in s.waiting
        run(s, lambda r: rng.choice((7, 7, 7, 8, -1)), scheduled)
        for r in generating:
            went_on = r.search is not None or len(r.ids) > before[id(r)]
            assert r in s.waiting or r.finish_reason or went_on
        ended = sum(r.finish_reason is not None for r in requests)
    assert s.requests == []
    assert ended > 300
    assert s.n_preemptions > 0
    assert s.table.n_used_pages == 0
    assert s._chains == {}


def test_texts_that_must_not_be_divided():
    s = scheduler(16, prefix_cache=True)
    for n in (9, 6, 20, 5, 17):  # two are longer than a step
        s.add(text(n, "last", whole=True))
    steps = []
    while s.requests:
        steps.append(run(s))
    assert steps == [[(0, 9), (1, 6)], [(2, 20)], [(3, 5)], [(4, 17)]]
    assert s.table.asked_tokens == 0  # their keys depend on the tokens behind them


def test_generating_requests_go_first_and_prompts_share_the_rest():
    s = scheduler(12)
    a, b = request(10), request(5)
    for r in (a, b):
        s.add(r)
    assert run(s) == [(0, 10), (1, 2)]
    assert run(s) == [(0, 1), (1, 3)]
    s.add(request(30))
    s.add(request(3))
    # a quarter of what is left (10) for those behind a prompt that does not fit
    assert run(s) == [(0, 1), (1, 1), (2, 8), (3, 2)]
    assert run(s) == [(0, 1), (1, 1), (2, 9), (3, 1)]
    assert run(s) == [(0, 1), (1, 1), (3, 1), (2, 9)]


def test_a_place_for_each_and_no_more():
    s = scheduler(16, max_sequences=2)
    for _ in range(3):
        s.add(request(2, max_tokens=2))
    assert [i for i, _ in run(s)] == [0, 1]
    assert [i for i, _ in run(s)] == [0, 1]
    assert [i for i, _ in run(s)] == [2]


def test_the_last_in_order_gives_its_pages_back():
    s = scheduler(16, max_pages=5)
    first, last = request(7, max_tokens=9), request(7, max_tokens=9)
    s.add(last)
    s.add(first)
    first.priority = -1
    s.waiting.sort(key=lambda r: (r.priority, r.id))
    run(s)
    assert {r.n_computed for r in (first, last)} == {7}
    run(s)
    run(s)  # a ninth token: each needs a third page
    assert (first.n_preempted, last.n_preempted) == (0, 1)
    assert last.n_computed == 0
    assert s.waiting == [last]
    while first in s.running:
        run(s)
    while last.finish_reason is None:
        run(s)
    assert len(last.ids) == len(first.ids) == 9
    assert s.n_preemptions == 1


def test_a_more_important_request_takes_a_place():
    s = scheduler(16, max_sequences=1)
    s.add(request(3))
    run(s)
    s.add(request(3, priority=-1))
    s.add(request(3, priority=-1))
    assert [i for i, _ in run(s)] == [1]
    assert [r.id for r in s.waiting] == [2, 0]


def test_who_begins_alike_waits_for_the_pages():
    s = scheduler(16, prefix_cache=True)
    for n, first in ((30, 0), (31, 0), (5, 50)):
        s.add(request(n, first=first))
    assert run(s) == [(0, 12), (2, 3)]  # the third may pass by
    while not s.running[0].ids:
        run(s)
    run(s)
    assert [r.cached_tokens for r in s.running if r.id == 1] == [28]


def test_prompts_whose_logits_are_wanted_run_in_pieces():
    s = scheduler(16, max_logit_rows=5, prefix_cache=True)
    s.add(request(12, prompt_logprobs=0, max_tokens=0))
    s.add(request(12))
    assert run(s) == [(0, 5), (1, 11)]
    assert run(s) == [(0, 5), (1, 1)]
    assert run(s) == [(1, 1), (0, 2)]
    assert s.running[0].id == 1


def test_what_can_never_run_is_refused():
    s = scheduler(16, max_pages=2)
    s.add(request(8, max_tokens=1))
    with pytest.raises(UsageError, match=r"may come to 9 tokens \(8 of the prompt, max_tokens 2"):
        s.add(request(8, max_tokens=2))


def test_pending_tokens_of_a_request():
    r = request(4)
    r.n_computed = 2
    assert r.pending == [2, 3]
    assert r.n_pending == 2
    r.n_computed = 4
    r.accept(42, -0.5)
    assert r.pending == [42]
    assert r.is_generating
    copy = r.copy()
    copy.accept(43, -0.5)
    assert r.ids == [42]
