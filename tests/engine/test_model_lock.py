"""Model lock: concurrent calls get the results of separate ones, without deadlock."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import nbflow
from nbflow.engine.search.beam import BeamSearch
from nbflow_kernels.errors import UsageError

IDS = (np.arange(400) * 7 % 101).tolist()


@pytest.fixture(scope="module", params=["0", "0&1", "0;1"])
def ranks(checkpoint, request):
    with nbflow.load(checkpoint, kv="f32", threads=1, partition=request.param) as model:
        yield model


@pytest.fixture(scope="module")
def tiny():
    with nbflow.load("tiny_python", threads=1) as model:
        yield model


def calls(model):
    """Calls of every kind, of different lengths."""
    some = [IDS[i : i + 5 + 9 * i] for i in range(4)]
    made = [lambda p=p: model.generate(p, 12, "top_p", 3, True).ids for p in some]
    made += [lambda p=p: list(model.stream(p, 9, "sample", 5, True)) for p in some[:2]]
    made += [lambda p=p: model.logits(p).tobytes() for p in some[:2]]
    made += [lambda p=p: model.embed(p).tobytes() for p in some[:2]]
    made += [
        lambda p=p: [g.ids for g in model.generate_batch([p], 7, "sample", n=3, ignore_eos=True)]
        for p in some[:2]
    ]
    return [*made, *(lambda p=p: in_a_session(model, p) for p in some[:2])]


def in_a_session(model, prompt):
    with model.session() as session:
        a = session.begin()
        session.run({a: prompt})
        b = session.fork(a)
        rows = session.run({a: [1], b: [2, 3]})
        return rows[a].logits.tobytes(), rows[b].logits.tobytes()


def test_threads_get_what_they_would_get_alone(ranks):
    made = calls(ranks)
    alone = [call() for call in made]
    together = threading.Barrier(4)

    def work(first):
        together.wait(60)
        order = made[first:] + made[:first]
        return [call() for call in order]

    with ThreadPoolExecutor(4) as pool:
        for first, found in enumerate(pool.map(work, range(4))):
            assert found == alone[first:] + alone[:first]
    assert not ranks.workers[0].scheduler.requests
    assert ranks.workers[0].table.n_used_pages == 0


def test_a_stop_text_is_found_whoever_makes_the_step(tiny):
    """A slow stream: other calls run its steps, also multi-step decodes."""
    whole = tiny.generate("def __init__(self", 40, ignore_eos=True)
    stop = whole.text[20:24]
    cut = tiny.generate("def __init__(self", 40, ignore_eos=True, stop=[stop])
    stream = tiny.stream("def __init__(self", 40, ignore_eos=True, stop=[stop])
    first = next(stream)
    assert tiny.generate("def __init__(self", 40, ignore_eos=True) == whole
    assert [first, *stream] == cut.ids


def test_a_stream_survives_a_batch_that_shares_prompts(tiny):
    """Such a batch needs other cache settings and runs without them."""
    whole = tiny.generate("def f(", 20, ignore_eos=True).ids
    stream = tiny.stream("def f(", 20, ignore_eos=True)
    first = next(stream)
    batch = tiny.generate_batch(["class A"], 5, "sample", n=2, ignore_eos=True)
    assert [first, *stream] == whole
    assert tiny.generate_batch(["class A"], 5, "sample", n=2, ignore_eos=True) == batch


def test_within_the_loop_over_a_stream(ranks):
    whole = ranks.generate(IDS[:9], 12, ignore_eos=True).ids
    expected = ranks.logits(IDS[:5])
    found = []
    for token in ranks.stream(IDS[:9], 12, ignore_eos=True):
        found.append(token)
        assert (ranks.logits(IDS[:5]) == expected).all()
        if len(found) == 3:
            with ThreadPoolExecutor(1) as pool:  # another thread does not wait for the loop
                assert pool.submit(ranks.generate, IDS[:9], 12, "greedy", 0, True).result(60)
    assert found == whole


def test_a_step_that_asks_the_model_itself_is_refused(ranks, caplog):
    """It runs on a thread within the step, where waiting would deadlock."""

    def propose(ids, n):
        return ranks.generate(ids, n, ignore_eos=True).ids

    whole = ranks.generate(IDS[:9], 12, ignore_eos=True).ids
    assert ranks.generate(IDS[:9], 12, ignore_eos=True, draft=propose).ids == whole
    assert "from within its own step" in caplog.text


def test_a_stream_that_is_dropped_during_a_step_does_not_hold_it_up(ranks):
    """The garbage collector may run on the thread of a rank while the lock is held."""
    streams = [ranks.stream(IDS[:9], 300, ignore_eos=True)]
    next(streams[0])

    def propose(ids, n):
        streams.clear()
        gc.collect()
        return []

    assert len(ranks.generate(IDS[:5], 5, ignore_eos=True, draft=propose).ids) == 5
    assert ranks.generate(IDS[:5], 5, ignore_eos=True)
    assert not ranks.workers[0].scheduler.requests


def test_an_engine_keeps_its_requests_when_an_old_stream_is_dropped(model):
    """The engine numbers its requests from 0, like that of the stream."""
    stream = model.stream(IDS[:9], 300, ignore_eos=True)
    next(stream)
    with nbflow.LLMEngine(model, kv_bytes=1 << 22) as engine:
        begun, dropped = threading.Event(), threading.Event()

        def on_events(*_):
            begun.set()
            dropped.wait(60)

        handle = engine.submit(model.make_request(IDS[:9], 12, ignore_eos=True), on_events)
        assert begun.wait(60)
        stream.close()
        dropped.set()
        assert len(handle.result(60).ids) == 12
        with pytest.raises(UsageError, match="an engine runs"):
            model.generate(IDS[:5])


def test_a_batch_of_which_one_is_refused_leaves_nothing_behind(model):
    requests = [model.make_request(IDS[:9], 5, ignore_eos=True) for _ in range(2)]
    requests[1].search = BeamSearch(num_beams=100)  # max_step_tokens is 64
    with pytest.raises(UsageError, match="needs 100 sequences, but at most 64"):
        list(model.run_requests(requests))
    assert not model.workers[0].scheduler.requests


def test_the_listener_of_an_engine_is_not_left_waiting_for_itself(model):
    found = []

    def on_events(*_):
        try:
            engine.embed([[1, 2, 3]])
        except UsageError as error:
            found.append(str(error))

    with nbflow.LLMEngine(model, kv_bytes=1 << 22) as engine:
        handle = engine.submit(model.make_request(IDS[:9], 1, ignore_eos=True), on_events)
        assert len(handle.result(60).ids) == 1
    assert ["engine's own thread" in text for text in found] == [True]


def test_what_ends_while_another_call_waits_is_given_out(checkpoint):
    """Another call arrives while the last token of a request is in flight."""
    with nbflow.load(checkpoint, partition="0;1", threads=1) as model:
        found = {0: [], 1: []}
        requests = [model.make_request(IDS[i : i + 9], 2, ignore_eos=True) for i in found]
        for events in model.run_requests(requests):
            for i, output in events:
                found[i].append(output.token)
            model.logits(IDS[:5])
        assert found == {i: request.ids for i, request in enumerate(requests)}
        assert not model.workers[0].scheduler.requests
