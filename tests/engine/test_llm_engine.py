"""LLMEngine: requests from several threads, events, finish reasons, failures."""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import nbflow
from nbflow.engine.errors import EngineClosed, QueueFull
from nbflow.engine.outputs import TokenOutput
from nbflow_kernels.errors import UsageError

IDS = (np.arange(400) * 7 % 101).tolist()


def make(model, prompt, n=12, **fields):
    request = model.make_request(prompt, n, fields.pop("decoding", "greedy"), 3, True)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


@pytest.fixture
def engine(model):
    with nbflow.LLMEngine(model, max_sequences=8, kv_bytes=1 << 22) as engine:
        yield engine


def all_free(engine):
    stats = engine.stats()
    return stats.running == stats.waiting == stats.pages_used == 0


def test_results_are_those_of_the_model_alone(checkpoint, model):
    prompts = [IDS[i : i + 5 + 11 * i] for i in range(12)]
    with nbflow.load(checkpoint, threads=1) as alone:
        expected = [alone.generate(p, 12, "top_p", 3, True) for p in prompts]
    with nbflow.LLMEngine(model, max_sequences=5, kv_bytes=1 << 22) as engine:
        handles = [engine.submit(make(model, p, decoding="top_p")) for p in prompts]
        assert [h.result(300) for h in handles] == expected
        assert all_free(engine)
        stats = engine.stats()
        assert stats.finished == {"length": 12}
        assert stats.generated_tokens == 144
        assert stats.prompt_tokens == sum(map(len, prompts))


def test_events_one_by_one_and_to_a_listener(engine, model):
    seen: list[TokenOutput] = []
    first = engine.submit(make(model, IDS[:9], n_top_logprobs=2))
    second = engine.submit(make(model, IDS[:9]), lambda handle, events: seen.extend(events))
    events = list(first)
    assert second.result(300).ids == [e.token for e in events] == [e.token for e in seen]
    assert [e.finish_reason for e in events] == [None] * 11 + ["length"]
    assert all(len(e.top_logprobs) == 2 for e in events)
    assert [e.top_logprobs[0] for e in events] == [(e.token, e.logprob) for e in events]
    assert seen[0].top_logprobs is None
    with pytest.raises(UsageError, match="go to on_events"):
        next(iter(second))
    times = first.timings
    assert times.submitted <= times.started <= times.first_token <= times.last_token <= times.ended


def test_a_listener_that_raises_does_not_stop_anybody(engine, model, caplog):
    def listen(handle, events):
        raise RuntimeError("planted")

    handle = engine.submit(make(model, IDS[:9]), listen)
    assert len(handle.result(300).ids) == 12
    assert "planted" in caplog.text
    assert len(engine.submit(make(model, IDS[:9])).result(300).ids) == 12


def test_an_end_token_ends_without_a_token(engine, model):
    free = engine.submit(make(model, IDS[:5])).result(300).ids
    stop = free[6]
    handle = engine.submit(make(model, IDS[:5], stop_ids=frozenset({stop})))
    events = list(handle)
    assert events[-1] == TokenOutput(None, events[-1].logprob, None, "stop")
    assert [e.token for e in events[:-1]] == free[: free.index(stop)]


def test_cancelling_and_deadlines(engine, model):
    long = [engine.submit(make(model, IDS[:5], 400)) for _ in range(3)]
    late = engine.submit(make(model, IDS[:5], 400, deadline=1e-9))
    long[0].cancel()
    long[1].cancel("stop")
    assert late.result(300).finish_reason == "deadline"
    assert long[0].result(300).finish_reason == "abort"
    assert long[1].result(300).finish_reason == "stop"
    assert len(long[2].result(300).ids) == 400
    long[2].cancel()  # too late: nothing happens
    assert long[2].finish_reason == "length"
    assert all_free(engine)


def test_a_full_queue_and_a_closed_engine(model):
    engine = nbflow.LLMEngine(model, max_sequences=1, max_waiting=2, kv_bytes=1 << 22)
    with pytest.raises(EngineClosed, match="it is new"):
        engine.submit(make(model, IDS[:5]))
    engine.start()
    hold = threading.Event()
    blocked = engine.submit(make(model, IDS[:5]), lambda *_: hold.wait(30))
    while not engine.stats().running:
        time.sleep(0.001)
    others = [engine.submit(make(model, IDS[:5])) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait already"):
        engine.submit(make(model, IDS[:5]))
    with pytest.raises(UsageError, match="an engine runs llama"):
        model.generate(IDS[:5])
    with pytest.raises(UsageError, match="another engine runs"):
        nbflow.LLMEngine(model).start()
    hold.set()
    engine.close(drain=True)
    assert all(len(h.result(0).ids) == 12 for h in (blocked, *others))
    with pytest.raises(EngineClosed, match="it is closed"):
        engine.submit(make(model, IDS[:5]))
    assert model.engine is None
    assert len(model.generate(IDS[:5], 3, ignore_eos=True).ids) == 3


def test_closing_without_waiting_ends_everybody(model):
    with nbflow.LLMEngine(model, kv_bytes=1 << 22) as engine:
        handles = [engine.submit(make(model, IDS[:50], 400)) for _ in range(6)]
        engine.close(drain=True, timeout=0.0)
    assert {h.finish_reason for h in handles} <= {"abort", "length"}
    assert handles[-1].finish_reason == "abort"
    engine.close()


def test_what_does_not_fit_is_refused_or_shortened(model):
    page = model.workers[0].storage.page_bytes
    with nbflow.LLMEngine(model, kv_bytes=2 * page) as engine:
        assert engine.limits.max_tokens == 128
        with pytest.raises(UsageError, match="has 129 tokens, but the key/value cache holds 128"):
            engine.submit(make(model, IDS[:129]))
        # the last token needs no slot: its key is never read
        assert len(engine.submit(make(model, IDS[:120], 400)).result(300).ids) == 9
        again = make(model, IDS[:5])
        engine.submit(again).result(300)
        with pytest.raises(UsageError, match="was submitted before"):
            engine.submit(again)
    assert model.workers[0].storage.n_bytes == 0  # given back
    with pytest.raises(UsageError, match="kv_bytes must be at least"):
        nbflow.LLMEngine(model, kv_bytes=page - 1)
    with pytest.raises(UsageError, match=r"max_sequences must be in 1\.\."):
        nbflow.LLMEngine(model, max_sequences=0)


def test_a_step_that_fails_ends_its_requests_only(engine, model, monkeypatch):
    rank = model.workers[0]
    real = rank.executor.run

    def fail(step):
        if 100 in step.ids:
            raise MemoryError("planted")
        real(step)

    monkeypatch.setattr(rank.executor, "run", fail)
    bad = engine.submit(make(model, [1, 100, 3]))
    with pytest.raises(MemoryError, match="planted"):
        bad.result(300)
    assert bad.finish_reason == "error"
    assert [e.finish_reason for e in bad] == ["error"]
    assert len(engine.submit(make(model, [1, 2, 3])).result(300).ids) == 12
    assert all_free(engine)
    assert engine.stats().finished == {"error": 1, "length": 1}


def test_a_call_that_fails_is_told_to_who_made_it(engine, model, monkeypatch):
    def fail(step):
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(model.workers[0].executor, "run", fail)
        with pytest.raises(MemoryError, match="planted"):
            engine.embed([[1, 2, 3]])
    with pytest.raises(UsageError, match="token id 101 is outside"):
        engine.embed([[101]])
    assert engine.embed([[1, 2, 3]])[0].shape == (64,)
    assert all_free(engine)


def test_a_new_request_ends_a_multi_step_decode(model, monkeypatch):
    prompts = [[1, 2, 3], [4, 5, 6]]
    expected = [model.generate(p, 20, "greedy", 3, True).ids for p in prompts]
    executor, started, n_steps = model.workers[0].executor, threading.Event(), []
    real = executor.run_repeated

    def run(step, decode, calls, n, stop):
        started.set()
        while not n_steps and not stop[0]:  # until the second request comes
            time.sleep(0.001)
        real(step, decode, calls, n, stop)
        n_steps.append(int(decode.n_steps[0]))

    monkeypatch.setattr(executor, "run_repeated", run)
    with nbflow.LLMEngine(model, burst_s=60.0) as engine:
        first = engine.submit(make(model, prompts[0], 20))
        assert started.wait(60)
        second = engine.submit(make(model, prompts[1], 20))
        assert [handle.result(60).ids for handle in (first, second)] == expected
    assert n_steps[0] == 1 < max(n_steps)


def test_streams_that_are_read_in_turn(model):
    expected = model.generate(IDS[:9], 12, ignore_eos=True).ids
    first, second = (model.stream(IDS[:9], 12, ignore_eos=True) for _ in range(2))
    found = [next(first)]
    assert list(second) == expected
    assert found + list(first) == expected
    third = model.stream(IDS[:9], 12, ignore_eos=True)
    next(third)
    with nbflow.LLMEngine(model, kv_bytes=1 << 22) as engine:  # takes over
        assert engine.submit(make(model, IDS[:9])).result(300).ids == expected
    assert len(list(third)) <= 11
    assert not model.workers[0].scheduler.requests


def test_a_proposer_that_raises_is_left_out(engine, model, caplog):
    def propose(ids, n):
        raise RuntimeError("planted")

    plain = engine.submit(make(model, [1, 2, 3])).result(300)
    left_out = engine.submit(make(model, [1, 2, 3], proposer=propose, n_proposed=3)).result(300)
    assert left_out.cached_tokens == 2
    assert replace(left_out, cached_tokens=0) == plain
    assert "planted" in caplog.text


def test_numbers_that_are_none_do_not_stay_in_the_pages(engine, model, monkeypatch):
    """Non-finite keys of a request do not affect later requests in its pages."""
    plain = engine.submit(make(model, IDS[:5])).result(300).logprobs
    engine.flush()
    rank = model.workers[0]
    real = rank.executor.run

    def poison(step):
        real(step)
        for keys, values in rank.storage.layers.values():
            for array in (keys, values):
                array[step.pages.kv_indices] = np.nan
        rank.executor.buffer("logits", len(step.logit_rows))[:] = np.nan

    with monkeypatch.context() as patch:
        patch.setattr(rank.executor, "run", poison)
        bad = engine.submit(make(model, IDS[50:70]))
        with pytest.raises(UsageError, match="have a NaN"):
            bad.result(300)
    engine.flush()
    next_page = rank.table._free[-1]
    assert np.isnan(rank.storage.layers[0][0][next_page].astype(np.float32)).any()
    for _ in range(3):
        assert engine.submit(make(model, IDS[:5])).result(300).logprobs == plain
        engine.flush()
    assert all_free(engine)


def test_prompt_logprobs(engine, model):
    prompt = IDS[:150]  # more than two steps
    handle = engine.submit(make(model, prompt, 1, prompt_logprobs=2))
    handle.result(300)
    scores_only = engine.submit(make(model, prompt, 1, prompt_logprobs=0, max_tokens=0))
    assert scores_only.result(300).ids == []
    assert scores_only.finish_reason == "length"
    engine.close()
    logits = model.logits(prompt).astype(np.float64)[:-1]
    log_softmax = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    wanted = log_softmax[np.arange(149), prompt[1:]]
    # float32 logits of magnitude 4 carry rounding of 4 * 2**-24, the sum of exponentials as well
    np.testing.assert_allclose([p for p, _ in handle.prompt_logprobs], wanted, atol=5e-6)
    best = [top[0][0] for _, top in handle.prompt_logprobs]
    assert best == logits.argmax(axis=1).tolist()
    assert [p for p, _ in scores_only.prompt_logprobs] == [p for p, _ in handle.prompt_logprobs]
    assert scores_only.prompt_logprobs[0][1] == []


def test_many_threads_that_come_and_go(engine, model):
    """Random requests, some cancelled, from several threads; afterwards every page is free."""
    failures = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(8):
            n = rng.randrange(1, 120)
            handle = engine.submit(make(model, IDS[:n], rng.randrange(1, 30)))
            if rng.random() < 0.3:
                handle.cancel()
            try:
                result = handle.result(300)
                assert result.finish_reason in ("length", "abort")
                assert not any(map(math.isnan, result.logprobs))
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all_free(engine)


@pytest.mark.parametrize("partition", ["0;1", "0&1"])
def test_ranks_that_are_threads(checkpoint, partition):
    prompts = [IDS[i : i + 5 + 11 * i] for i in range(5)]
    with nbflow.load(checkpoint, kv="f32", threads=1, partition=partition) as model:
        expected = [model.generate(p, 8, ignore_eos=True).ids for p in prompts]
        with nbflow.LLMEngine(model, max_sequences=3, kv_bytes=1 << 22) as engine:
            handles = [engine.submit(make(model, p, 8)) for p in prompts]
            assert [h.result(300).ids for h in handles] == expected
            assert all_free(engine)
