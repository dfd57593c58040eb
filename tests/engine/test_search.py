"""Searches in the engine: batched, preempted, cancelled, on several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nbflow
from nbflow.engine.scheduler import max_new_tokens_for
from nbflow.engine.search import BeamSearch, ContrastiveSearch
from nbflow_kernels.errors import UsageError

PROMPT = "def f("
LONG = list(range(100, 220))  # they and 24 more are more than two pages of 64 tokens
BEAM = BeamSearch(num_beams=4, n=3)
CONTRAST = ContrastiveSearch(top_k=5)


@pytest.fixture(scope="module")
def model():
    with nbflow.load("tiny_python", threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone(model):
    """Return the result of each search running alone."""
    return {
        (search.name, len(prompt)): run(model, search, prompt)
        for search in (BEAM, CONTRAST)
        for prompt in (PROMPT, LONG)
    }


def make(model, search, prompt=PROMPT, n=24, **more):
    return model.make_request(prompt, n, search, ignore_eos=True, **more)


def run(model, search, prompt=PROMPT, **more):
    request = make(model, search, prompt, **more)
    for _ in model.run_requests([request]):
        pass
    return numbers(model.generations(request))


def numbers(generations):
    return [(g.ids, g.logprobs, g.score) for g in generations]


def idle(engine):
    engine.flush()
    assert engine.stats().pages_used == 0
    return True


@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 24}])
def test_searches_share_steps_with_all_others(model, alone, limits):
    """Bit-identical to separate runs; a search takes a row per beam and blocks no request."""
    plain = model.generate(PROMPT, 30, ignore_eos=True)
    with nbflow.LLMEngine(model, **limits) as engine:
        others = [engine.submit(make(model, "greedy", n=30)) for _ in range(3)]
        searches = {
            (search.name, len(prompt)): engine.submit(make(model, search, prompt))
            for search in (BEAM, CONTRAST)
            for prompt in (PROMPT, LONG)
        }
        assert all(o.result(60).ids == plain.ids for o in others)
        for key, handle in searches.items():
            assert numbers(handle.results(60)) == alone[key]
            assert handle.result().ids == alone[key][0][0]
        # 24 steps after the last prompt is read; a search that were asked after the others'
        # steps, beam by beam, would need hundreds
        assert engine.stats().steps < 24 + 40
        assert idle(engine)


def test_searches_that_lose_their_pages_find_the_same(model, alone):
    page = model.workers[0].storage.page_bytes
    with nbflow.LLMEngine(model, kv_bytes=12 * page) as engine:
        handles = [engine.submit(make(model, s, LONG)) for s in (BEAM, CONTRAST) for _ in range(2)]
        handles += [engine.submit(make(model, "greedy", LONG, 80)) for _ in range(2)]
        for handle in handles[:4]:
            name = handle.request.search.name
            assert numbers(handle.results(120)) == alone[name, len(LONG)]
        assert len({tuple(handle.result(120).ids) for handle in handles[4:]}) == 1
        assert engine.stats().preemptions > 0
        assert idle(engine)


def test_a_cancelled_search_frees_its_pages(model):
    with nbflow.LLMEngine(model) as engine:
        for search in (BEAM, CONTRAST):
            handle = engine.submit(make(model, search, LONG, 200))
            while handle.timings.started is None:
                pass
            handle.cancel()
            assert list(handle)[-1].finish_reason == "abort"
            assert idle(engine)


def test_events_of_searches(model, alone):
    with nbflow.LLMEngine(model) as engine:
        asked = make(model, BEAM, logprobs=2)
        events = list(engine.submit(asked))
        assert [e.token for e in events] == alone["beam", len(PROMPT)][0][0]
        assert [len(e.top_logprobs) for e in events] == [2] * 24
        assert events[-1].finish_reason == "length"
        # the tokens of a contrastive search come one by one
        lists = []
        handle = engine.submit(make(model, CONTRAST), lambda _, events: lists.append(events))
        assert [handle.result(60).ids] == [ids for ids, *_ in alone["contrastive", len(PROMPT)]]
        assert len(lists) == 24
        text = handle.result().text
        cut = engine.submit(make(model, CONTRAST, stop=[text[9:12]])).result(60)
        assert cut.text == text[: text.index(text[9:12])]


def test_prompts_may_be_told_about(model):
    asked = make(model, BEAM, LONG, prompt_logprobs=1)
    plain = make(model, "greedy", LONG, prompt_logprobs=1)
    for request in (asked, plain):
        for _ in model.run_requests([request]):
            pass
    assert asked.prompt_results == plain.prompt_results
    assert len(asked.prompt_results) == len(LONG) - 1


@pytest.mark.parametrize("partition", ["0;1", "0&1"])
def test_searches_on_ranks(model, alone, partition):
    with (
        nbflow.load("tiny_python", partition=partition, threads=1) as parts,
        nbflow.LLMEngine(parts) as engine,
    ):
        handles = [engine.submit(make(parts, s, p)) for s in (BEAM, CONTRAST) for p in (PROMPT,)]
        for handle in handles:
            found = [g.ids for g in handle.results(60)]
            expected = [ids for ids, *_ in alone[handle.request.search.name, len(PROMPT)]]
            assert found == expected
        assert idle(engine)


def test_a_search_with_an_encoder():
    folder = Path(__file__).parents[1] / "golden" / "families"
    names = sorted(
        p.parent.name
        for p in folder.glob("*/config.json")
        if json.loads(p.read_text()).get("is_encoder_decoder")
    )
    with nbflow.load(folder / names[0], threads=1) as model:
        alone = [run(model, s, [5, 6, 7], n=8) for s in (BEAM, CONTRAST)]
        with nbflow.LLMEngine(model) as engine:
            handles = [engine.submit(make(model, s, [5, 6, 7], 8)) for s in (BEAM, CONTRAST)]
            assert [numbers(h.results(60)) for h in handles] == alone
            assert idle(engine)
        assert model.workers[0].cross_attention.table.sequences == []


def test_refused(model):
    for errors, encode_errors in (
        ({"temperature": 0.5}, "no parameter 'temperature'"),
        ({"stop": ["x"]}, "no parameter 'stop'"),
        ({"draft": "ngram"}, "takes no draft"),
        ({"min_tokens": 3}, "no parameter 'min_tokens'"),
    ):
        with pytest.raises(UsageError, match=encode_errors):
            make(model, BEAM, **errors)
    with pytest.raises(UsageError, match=r"n must be in 1\.\.num_beams"):
        BeamSearch(num_beams=2, n=3)
    page = model.workers[0].storage.page_bytes
    with nbflow.LLMEngine(model, max_sequences=3, kv_bytes=9 * page) as engine:
        with pytest.raises(UsageError, match="needs 4 sequences"):
            engine.submit(make(model, BEAM)).result(60)
        with pytest.raises(UsageError, match="too few for 3 continuations"):
            engine.submit(make(model, BeamSearch(num_beams=3), LONG + LONG))
    # 2 pages of the prompt; for each of 2, a copy of the last one and one more
    assert max_new_tokens_for(make(model, BeamSearch(num_beams=2), LONG), 2 + 2 * 2, 64) == 64
