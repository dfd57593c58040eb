"""LongRoPE: short factors up to the original context, long factors beyond.

The golden model has an original context of 16 tokens and a context of 64; `crossing` is what
transformers generates behind 10 tokens, beyond the 16: other tokens than with the short or with the
long divisors alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import nbflow

MODEL = Path(__file__).parents[1] / "golden" / "families" / "phi3_long"
ORIGINAL, N_SHORT = 16, 10
TOLERANCE = 2e-6
"""Share of the largest logit, as in tests/models/test_families.py."""

with np.load(MODEL / "golden.npz") as _file:
    GOLDEN = dict(_file)
IDS, SHORT = GOLDEN["ids"], GOLDEN["ids"][:N_SHORT]
CONTINUATION, CROSSING = GOLDEN["continuation"].tolist(), GOLDEN["crossing"].tolist()
BEGIN = GOLDEN["crossing_ids"]


def load(**options):
    return nbflow.load(MODEL, **{"kv": "f32", "threads": 1, "max_step_tokens": 17, **options})


def error(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.fixture(scope="module")
def model():
    with load() as loaded:
        yield loaded


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_logits_by_the_length_of_the_text(model):
    assert error(model.logits(SHORT), GOLDEN["short_logits"]) < TOLERANCE
    assert error(model.logits(IDS), GOLDEN["logits"]) < TOLERANCE


def test_the_context_of_the_load_decides_nothing(model):
    with load(max_context=ORIGINAL) as short:
        np.testing.assert_array_equal(short.logits(SHORT), model.logits(SHORT))
    with load(max_context=50) as medium:
        np.testing.assert_array_equal(medium.logits(IDS), model.logits(IDS))
        assert medium.generate(BEGIN, len(CROSSING)).ids == CROSSING


def test_short_and_long_in_one_step(model):
    """`embed_batch` pools hidden states of steps with all of these texts."""
    texts = [IDS[:n] for n in (5, 16, 17, 10, 40)]
    together = model.embed_batch(texts)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_array_equal(vector, model.embed(text))


@pytest.mark.parametrize("partition", ["0", "0&1", "0;1"])
def test_generation_in_a_batch(partition):
    """In one batch, and with any `max_tokens`."""
    with load(partition=partition) as model:
        prompts = [BEGIN, IDS, SHORT[:4]]
        batch = model.generate_batch(prompts, len(CROSSING))
        assert batch[0].ids == CROSSING
        assert batch[1].ids[: len(CONTINUATION)] == CONTINUATION
        for prompt, result in zip(prompts, batch, strict=True):
            alone = model.generate(prompt, len(CROSSING))
            assert (alone.ids, alone.logprobs) == (result.ids, result.logprobs)
        for n in (1, 6, 7, 8, 40):
            assert model.generate(BEGIN, n).ids[:12] == CROSSING[:n]


def test_log_probabilities_of_prompts(model):
    for ids, logits in ((SHORT, GOLDEN["short_logits"]), (IDS, GOLDEN["logits"])):
        found = model.generate(ids, 1, prompt_logprobs=0).prompt_logprobs
        expected = log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
        assert error(np.array([logprob for logprob, _ in found]), expected) < 1e-5


@pytest.mark.parametrize("partition", ["0", "0;1"])
def test_drafts_stop_at_the_original_context(model, partition):
    with load(partition=partition) as target:
        for draft in (model, "ngram"):
            result = target.generate_batch([BEGIN, IDS], len(CROSSING), draft=draft, n_draft=5)
            assert result[0].ids == CROSSING
            assert result[1].ids[: len(CONTINUATION)] == CONTINUATION
        assert target.generate(BEGIN, 12, draft=model).n_accepted > 5


def test_searches_that_outgrow_the_original_context(model):
    """Beam search restarts with the long factors; contrastive search continues.

    With the candidates behind it, a text of 16 tokens is beyond the original context.
    """
    beam = model.generate(BEGIN, 12, "beam", num_beams=3)
    text = [*BEGIN, *beam.ids]
    expected = log_softmax(model.logits(text))[np.arange(N_SHORT - 1, len(text) - 1), beam.ids]
    assert error(np.array(beam.logprobs), expected) < 1e-5
    found = model.generate(BEGIN, 12, "contrastive", penalty_alpha=0.0, top_k=2).ids
    rows = model.logits([*BEGIN, *found])[ORIGINAL - 1 : -1]
    assert found == [*CROSSING[: ORIGINAL - N_SHORT], *rows.argmax(axis=1).tolist()]
    short = model.generate(SHORT[:4], 12, "beam", num_beams=3)
    text = [*SHORT[:4], *short.ids]
    expected = log_softmax(model.logits(text))[np.arange(3, len(text) - 1), short.ids]
    assert error(np.array(short.logprobs), expected) < 1e-5


def test_sessions_are_computed_once_more_when_they_outgrow_it(model):
    with model.session() as session:
        a = session.begin()
        first = session.run({a: SHORT.tolist()})[a].logits
        assert error(first, GOLDEN["short_logits"]) < TOLERANCE
        b = session.fork(a)
        rows = session.run({a: IDS[N_SHORT:].tolist(), b: [3, 4]})
        assert error(rows[a].logits, GOLDEN["logits"][N_SHORT:]) < TOLERANCE
        np.testing.assert_array_equal(rows[b].logits, model.logits([*SHORT, 3, 4])[-2:])
        session.truncate(b, N_SHORT)
        rows = session.run({b: IDS[N_SHORT:20].tolist()}, last=True)
        np.testing.assert_array_equal(rows[b].logits, model.logits(IDS[:20])[-1:])


def test_the_prefix_cache_keeps_short_and_long_sequences_apart(model):
    def asked(engine, ids):
        result = engine.submit(model.make_request(ids, 1)).result()
        return result.ids, result.cached_tokens

    expected = {n: model.generate(IDS[:n], 1).ids for n in (12, 14, 16, 17, 39, 40)}
    with nbflow.LLMEngine(model) as engine:
        for n, cached in ((12, 0), (40, 0), (14, 12), (39, 38), (16, 14), (17, 16)):
            assert asked(engine, IDS[:n]) == (expected[n], cached)


def test_preempted_requests_are_computed_with_the_same_angles(model):
    """Before, at and beyond the original context."""
    for at in (1, 6, 7, 9):
        request = model.make_request(BEGIN, len(CROSSING))
        model.call("configure")
        model.call("submit", request)
        scheduler = model.workers[0].scheduler
        while request.finish_reason is None:
            model.call("step", 0.0)
            if len(request.ids) == at and scheduler.running:
                scheduler.preempt(request)
                assert request.long == (N_SHORT + at > ORIGINAL)
                at = -1
        assert (request.ids, at, scheduler.n_preemptions) == (CROSSING, -1, 1)
        model.call("configure", 17)  # another cache, and other counts
