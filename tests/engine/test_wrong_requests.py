"""Invalid or failing requests end without affecting others."""

from __future__ import annotations

import dataclasses
import pickle
import threading

import numpy as np
import pytest

import nbflow
from nbflow.engine import outputs
from nbflow.engine.errors import ERROR_BYTES, QueueFull, encoded
from nbflow.engine.multi_step import MultiStepDecode
from nbflow.engine.search import BeamSearch, ContrastiveSearch, runtime
from nbflow.engine.search.beam import Beams
from nbflow.sampling import Greedy
from nbflow.sampling.logits_processors import AllBannedError
from nbflow.sampling.structured_output import StructureError
from nbflow_kernels.errors import UsageError

IDS = (np.arange(400) * 7 % 101).tolist()
PARTITIONS = ["0", "0&1", "0;1"]
KV = 1 << 22


@pytest.fixture(scope="module", params=PARTITIONS)
def ranks(checkpoint, request):
    with nbflow.load(checkpoint, kv="f32", threads=1, partition=request.param) as model:
        yield model


def make(model, prompt=IDS[:9], n=12, decoding="greedy", **more):
    return model.make_request(prompt, n, decoding, 3, True, **more)


def alive(engine, model, expected):
    assert engine.submit(make(model)).result(60).ids == expected
    assert engine.stats().pages_used == 0
    return True


def test_a_search_wider_than_the_engine_is_refused_before_it_is_scheduled(ranks):
    expected = ranks.generate(IDS[:9], 12, ignore_eos=True).ids
    with nbflow.LLMEngine(ranks, max_sequences=3, kv_bytes=KV) as engine:
        for _ in range(2):
            with pytest.raises(UsageError, match="needs 4 sequences, but at most 3"):
                engine.submit(make(ranks, decoding=BeamSearch(4)))
        assert alive(engine, ranks, expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_ids", frozenset({2**63})),
        ("stop_ids", frozenset({101})),
        ("prompt", [1, 2**40]),
        ("seed", -1),
        ("seed", 2**64),
        ("priority", "high"),
        ("deadline", "soon"),
        ("n_top_logprobs", 102),
        ("prompt_logprobs", 2**20),
        ("max_tokens", -1),
        ("cache_salt", b"salt"),
    ],
)
def test_a_field_that_a_step_could_fail_on_is_refused_by_name(model, field, value):
    request = make(model)
    setattr(request, field, value)
    encode_errors = "token ids|token id" if field == "prompt" else field
    with nbflow.LLMEngine(model, kv_bytes=KV) as engine:
        with pytest.raises(UsageError, match=encode_errors):
            engine.submit(request)
        assert len(engine.submit(make(model)).result(60).ids) == 12
    with pytest.raises(UsageError, match=encode_errors):
        list(model.run_requests([request]))


def test_a_salt_with_half_a_surrogate_pair(ranks):
    expected = ranks.generate(IDS[:9], 12, ignore_eos=True).ids
    with nbflow.LLMEngine(ranks, kv_bytes=KV) as engine:
        salted = make(ranks)
        salted.cache_salt = "\ud800"
        assert engine.submit(salted).result(60).ids == expected
        assert alive(engine, ranks, expected)


def test_ids_of_a_proposer_that_are_no_tokens_are_left_out(ranks):
    expected = ranks.generate(IDS[:9], 12, ignore_eos=True).ids
    with nbflow.LLMEngine(ranks, kv_bytes=KV) as engine:
        for errors in (2**70, -1, 101):
            request = make(ranks, draft=lambda ids, n, errors=errors: [ids[-1], errors])
            assert engine.submit(request).result(60).ids == expected
        assert alive(engine, ranks, expected)


def test_a_proposer_that_other_ranks_cannot_have(checkpoint):
    class Proposer:
        def __init__(self):
            self.lock = threading.Lock()  # has no copy

        def __call__(self, ids, n):
            return []

    with (
        nbflow.load(checkpoint, threads=1, partition="0&1") as model,
        nbflow.LLMEngine(model, kv_bytes=KV) as engine,
    ):
        with pytest.raises(UsageError, match="each rank needs a copy of the proposer"):
            engine.submit(make(model, draft=Proposer())).result(60)
        assert len(engine.submit(make(model)).result(60).ids) == 12


def test_preparing_a_multi_step_decode_fails_for_one_request(model):
    """The other requests of the step continue with unchanged results."""
    expected = [model.generate(p, 30, ignore_eos=True).ids for p in (IDS[:9], IDS[3:20])]

    class Stops(frozenset):
        def __iter__(self):
            raise OverflowError("planted")

    bad = make(model, IDS[5:30], 30)
    with nbflow.LLMEngine(model, kv_bytes=KV) as engine:
        hold = threading.Event()
        first = engine.submit(make(model, n=1), lambda *_: hold.wait(60))
        good = [engine.submit(make(model, p, 30)) for p in (IDS[:9], IDS[3:20])]
        failing = engine.submit(bad)
        bad.stop_ids = Stops({1})  # behind the check, as something that it does not foresee
        hold.set()
        with pytest.raises(OverflowError, match="planted"):
            failing.result(60)
        assert [h.result(60).ids for h in good] == expected
        assert first.result(60)
        assert alive(engine, model, expected[0][:12])


def plant(monkeypatch, name):
    """Make a function raise in every step with the request of seed 99."""
    real = getattr(outputs, name)

    def function(*args, **more):
        for arg in args:
            some = arg if isinstance(arg, list | tuple) else [arg]
            if any(getattr(r, "seed", None) == 99 for r in some):
                raise ValueError("planted in " + name)
        return real(*args, **more)

    monkeypatch.setattr(outputs, name, function)


@pytest.mark.parametrize("name", ["sample_tokens", "gather_logprobs"])
def test_the_rank_that_draws_fails_for_one_request(ranks, monkeypatch, name):
    """The other ranks receive the error in place of its results."""
    expected = ranks.generate(IDS[:9], 12, "sample", 3, True).ids
    plant(monkeypatch, name)
    with nbflow.LLMEngine(ranks, kv_bytes=KV) as engine:
        good = [engine.submit(make(ranks, decoding="sample")) for _ in range(3)]
        bad = make(ranks, decoding="sample", logprobs=2)
        bad.seed = 99
        handles = [*good, engine.submit(bad), engine.submit(make(ranks, decoding="sample"))]
        with pytest.raises((ValueError, RuntimeError), match=f"planted in {name}"):
            handles[3].result(60)
        assert [h.result(60).ids for h in handles[:3] + handles[4:]] == [expected] * 4
        assert engine.stats().pages_used == 0


def test_the_numbers_of_a_prompt_fail_for_one_request(ranks, monkeypatch):
    expected = ranks.generate(IDS[:90], 12, ignore_eos=True).ids
    real = outputs.log_probabilities

    def fail(logits, ids, out):
        if 77 in ids:
            raise ValueError("planted in a prompt")
        real(logits, ids, out)

    monkeypatch.setattr(outputs, "log_probabilities", fail)
    with nbflow.LLMEngine(ranks, kv_bytes=KV) as engine:
        good = [engine.submit(make(ranks, IDS[:90])) for _ in range(2)]
        bad = engine.submit(make(ranks, [1, 2, 77, 4], prompt_logprobs=1))
        scores = engine.submit(make(ranks, [1, 2, 78, 4], prompt_logprobs=1))
        with pytest.raises((ValueError, RuntimeError), match="planted in a prompt"):
            bad.result(60)
        assert [h.result(60).ids for h in good] == [expected] * 2
        assert len(scores.result(60).prompt_logprobs) == 3


@pytest.mark.parametrize(
    ("search", "where"),
    [
        (BeamSearch(3), "rows"),
        (BeamSearch(3), "state"),
        (ContrastiveSearch(4), "history"),
        (ContrastiveSearch(4), "state"),
    ],
)
def test_a_search_fails_alone(ranks, monkeypatch, search, where):
    """On the sampling rank during prefill, at a token, or on every rank."""
    expected = ranks.generate(IDS[:9], 12, ignore_eos=True).ids
    if where == "rows":
        real = runtime.top_log_probabilities
        monkeypatch.setattr(runtime, "top_log_probabilities", raising(real, lambda *_: True))
    elif where == "history":
        real = runtime._compare
        monkeypatch.setattr(runtime, "_compare", raising(real, lambda r, _: not r.branches))
    else:
        real = outputs.advance
        monkeypatch.setattr(outputs, "advance", raising(real, lambda r, _: len(r.branches) > 1))
    with nbflow.LLMEngine(ranks, kv_bytes=KV, max_step_tokens=16) as engine:
        good = [engine.submit(make(ranks)) for _ in range(2)]
        bad = engine.submit(make(ranks, IDS[:40], decoding=search))
        with pytest.raises((ValueError, RuntimeError), match="planted"):
            bad.result(60)
        assert [h.result(60).ids for h in good] == [expected] * 2
        monkeypatch.undo()
        assert engine.submit(make(ranks, decoding=search)).result(60).ids
        assert alive(engine, ranks, expected)


def raising(real, when):
    def function(*args):
        if when(*args):
            raise ValueError("planted")
        return real(*args)

    return function


@pytest.mark.parametrize("penalty", [100.0, -100.0])
def test_a_length_penalty_beyond_the_numbers(penalty):
    """The power of a length of some thousand tokens overflows a float."""
    search = BeamSearch(2, penalty, False, 1)
    beams = Beams(search, 4000, [])
    rows = np.log(np.array([[0.6, 0.4]]))
    beams.advance(rows)
    long = [
        dataclasses.replace(
            h, ids=(*h.ids,) * 2000, logprobs=(0.0,) * 2000, top_tokens=([],) * 2000
        )
        for h in beams.running
    ]
    beams.running, beams.finished = long, [dataclasses.replace(h, score=-1.0) for h in long]
    assert len(beams.best_so_far()) == 1
    assert isinstance(beams._is_done(), bool)


def test_a_stop_text_that_cannot_be_looked_for(monkeypatch):
    with nbflow.load("tiny_python", threads=1) as model, nbflow.LLMEngine(model) as engine:
        plain = engine.submit(model.make_request("def f(", 8, ignore_eos=True))
        monkeypatch.setattr(
            "nbflow.engine.stop_checker.IncrementalDetokenizer.push", raising(None, lambda *_: True)
        )
        bad = engine.submit(model.make_request("def f(", 8, ignore_eos=True, stop=["x"]))
        with pytest.raises(ValueError, match="planted"):
            bad.result(60)
        assert len(plain.result(60).ids) == 8
        assert engine.submit(model.make_request("def f(", 8, ignore_eos=True)).result(60).ids
        assert engine.stats().pages_used == 0


def test_a_session_in_the_way_of_an_engine_leaves_the_ranks_alive(ranks):
    """All ranks refuse alike, which is a result and not a failure."""
    expected = ranks.generate(IDS[:9], 12, ignore_eos=True).ids
    with ranks.session() as session:
        a = session.begin()
        logits = session.run({a: IDS[:5]})[a].logits
        engine = nbflow.LLMEngine(ranks, kv_bytes=KV).start()
        handle = engine.submit(make(ranks)) if engine.alive else None
        engine.close()
        assert engine.state == "failed"
        assert "close it first" in str(engine.failure)
        assert handle is None or handle.finish_reason == "error"
        assert ranks.generate_batch([IDS[:9]], 12, n=2, ignore_eos=True)[1].ids == expected
        assert (session.run({a: [1]})[a].logits.shape, len(logits)) == ((1, 101), 5)
    with nbflow.LLMEngine(ranks, kv_bytes=KV) as engine:
        assert alive(engine, ranks, expected)


@pytest.mark.parametrize("partition", ["0&1", "0;1"])
def test_one_rank_without_memory_for_an_engine(checkpoint, partition, monkeypatch):
    """All ranks agree on the failure, and the model is unchanged."""
    with nbflow.load(checkpoint, kv="f32", threads=1, partition=partition) as model:
        expected = model.generate(IDS[:9], 12, ignore_eos=True).ids
        storage = model.workers[1].storage
        with monkeypatch.context() as patch:
            patch.setattr(storage, "ensure", refusing)
            engine = nbflow.LLMEngine(model, kv_bytes=KV).start()
            engine.close()
            assert str(engine.failure) == "rank 1: planted: no room"
        assert model.generate(IDS[:9], 12, ignore_eos=True).ids == expected


def refusing(*_):
    raise UsageError("planted: no room")


def test_one_rank_without_memory_within_a_step_ends_them_all_with_the_cause(checkpoint):
    with nbflow.load(checkpoint, threads=1, partition="0&1") as model:
        model.workers[1].storage.ensure = refusing
        with pytest.raises(UsageError, match="rank 1: planted: no room"):
            model.generate(IDS[:9], 3)
        with pytest.raises(RuntimeError, match="load the model again"):
            model.generate(IDS[:9], 3)


def test_end_tokens_that_have_no_logit_are_never_drawn(checkpoint, model):
    """Checkpoints have such ids: of another vocabulary, or as a placeholder."""
    expected = model.generate(IDS[:9], 12, ignore_eos=True).ids
    with nbflow.load(checkpoint, threads=1) as other:
        other.spec = dataclasses.replace(
            other.spec, eos_token_ids=(2**63, -1, 101, 2**31, expected[4])
        )
        first = expected.index(expected[4])
        assert other.generate(IDS[:9], 12).ids == expected[:first]
        assert other.generate(IDS[:9], 12, min_tokens=12).finish_reason == "length"
        with nbflow.LLMEngine(other, kv_bytes=KV) as engine:
            request = other.make_request(IDS[:9], 12)
            assert engine.submit(request).result(60).ids == expected[:first]
        found = nbflow.beam_search(other, IDS[:9], 12)[0]
        assert (
            found.ids == nbflow.beam_search(model, IDS[:9], 12, stop_token_ids=[expected[4]])[0].ids
        )


def test_a_request_with_a_strategy_that_cannot_be_compared(model):
    """A list is unhashable; other requests still run a multi-step decode."""
    expected = model.generate(IDS[:9], 12, ignore_eos=True).ids
    odd = nbflow.sampling.Chain(temperature=0.0, dry_breakers=[(1,)])
    with nbflow.LLMEngine(model, kv_bytes=KV) as engine:
        handles = [engine.submit(make(model, decoding=s)) for s in (odd, Greedy(), odd)]
        assert [h.result(60).ids for h in handles] == [expected] * 3


def test_multi_step_decode_reports_invalid_requests(model):
    burst = MultiStepDecode(Greedy(), 2, 1, False)
    requests = [make(model), make(model)]
    requests[1].seed = -1
    assert list(burst.begin(requests)) == [1]


def test_the_kind_of_an_error_reaches_every_rank(ranks):
    """A server answers 400 to these, from any rank."""
    with nbflow.LLMEngine(ranks, kv_bytes=KV) as engine:
        request = make(ranks, banned_token_ids=list(range(101)))
        with pytest.raises(AllBannedError, match="every token is banned"):
            engine.submit(request).result(60)
        assert len(engine.submit(make(ranks)).result(60).ids) == 12


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (StructureError("regex", "no token can start it"), StructureError),
        (QueueFull("é" * 4000), UsageError),
        (OSError("x" * 4000), RuntimeError),
    ],
)
def test_errors_for_other_ranks_have_bounded_bytes(error, found):
    data = encoded(error)
    assert len(data) <= ERROR_BYTES
    decoded = pickle.loads(data)
    assert type(decoded) is found
    assert str(error)[:400] in str(decoded)
