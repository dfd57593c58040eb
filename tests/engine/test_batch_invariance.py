"""Batch invariance: tokens and log-probabilities of a request are bit-identical in any batch.

Alone; in a batch; with chunked prefill; with a prefix from the cache; after a preemption; with
right or wrong draft tokens; with single and multi-step decode.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_models import write_llama

import nbflow
from nbflow.executor import attention_plans

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
VOCABULARY = 211
IDS = (np.arange(400) * 37 % VOCABULARY).tolist()
PROMPTS = [IDS[:180], IDS[:190], IDS[7:62], IDS[3:4], IDS[:125], IDS[200:325]]
ORDER = range(len(PROMPTS))
N = 24

CONFIGURATIONS = [
    {"weights": None, "kv": "f32"},
    {"weights": "q8", "kv": "q8_0", "kv_rotation": "hadamard", "activations": "int8"},
    {"weights": "q4", "kv": "f16/q8_0", "activations": "bf16"},
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Return a model whose matrices have many tiles and a partial one in both dimensions."""
    folder = tmp_path_factory.mktemp("wide")
    write_llama(
        folder, n_layers=1, hidden_size=320, intermediate_size=544, n_heads=4, n_kv_heads=2,
        head_dim=64, vocab_size=VOCABULARY, max_context=448,
    )  # fmt: skip
    return folder


def guess(ids, n):
    """Propose draft tokens by prompt lookup, or random ones."""
    before = [i for i, token in enumerate(ids[:-1]) if token == ids[-1]]
    return ids[before[-1] + 1 :][:n] if before else [5, 6, 7][:n]


def make(model, i, **fields):
    request = model.make_request(PROMPTS[i], N, "top_p", i, True, temperature=0.3)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def everything(results):
    return [(r.ids, r.logprobs) for r in results]


def served(model, limits, order=ORDER, **fields):
    """Return the results and statistics of an engine."""
    with nbflow.LLMEngine(model, **limits) as engine:
        handles = {i: engine.submit(make(model, i, **fields)) for i in order}
        results = [handles[i].result(300) for i in range(len(PROMPTS))]
        again = [engine.submit(make(model, i, **fields)) for i in range(len(PROMPTS))]
        assert everything(h.result(300) for h in again) == everything(results)
        return everything(results), engine.stats(), [h.request for h in again]


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_whatever_goes_on(wide, options):
    with nbflow.load(wide, max_step_tokens=200, threads=1, **options) as model:
        page = model.workers[0].storage.page_bytes
        alone = []
        for i in range(len(PROMPTS)):
            request = make(model, i)
            for _ in model.run_requests([request], burst_s=0.0):
                pass
            alone.append(model.generation(request))
        alone = everything(alone)
        roomy = {"kv_bytes": 60 * page}
        found, stats, requests = served(model, roomy)
        assert found == alone
        assert stats.prefix_hits > 400
        assert requests[0].cached_tokens > 128
        assert requests[0].cached_tokens % 64  # a part of a page
        for limits in (
            {**roomy, "max_step_tokens": 7, "prefix_cache": False},
            {**roomy, "max_step_tokens": 33, "max_sequences": 3, "burst_s": 10.0},
        ):
            assert served(model, limits, reversed(ORDER))[0] == alone
        found, stats, _ = served(model, {"kv_bytes": 7 * page, "max_step_tokens": 40})
        assert stats.preemptions > 0
        assert found == alone
        found, _, requests = served(model, roomy, proposer=guess, n_proposed=5)
        assert found == alone
        assert 0 < sum(r.n_accepted for r in requests) < sum(r.n_drafted for r in requests)


def test_pages_that_sequences_have_in_common_are_read_once(wide, monkeypatch):
    shared = []

    def plan_into(plan, *step):
        n_items = bind_plan_into(plan, *step)
        shared.append(plan.items[:, plan.COLUMNS.index("shared")].max())
        return n_items

    bind_plan_into = attention_plans.plan_into
    monkeypatch.setattr(attention_plans, "plan_into", plan_into)
    with nbflow.load(wide, threads=1, kv="q8_0") as model:
        alone = [model.logits([*IDS[:130], i])[-1] for i in range(3)]
        assert not any(shared)
        with model.session() as session:
            first = session.begin()
            session.run({first: IDS[:130]})
            three = [first, session.fork(first), session.fork(first)]
            rows = session.run({sequence: [i] for i, sequence in enumerate(three)})
            assert shared[-1] == 128  # two pages
            for sequence, logits in zip(three, alone, strict=True):
                np.testing.assert_array_equal(rows[sequence].logits[-1], logits)


INT8 = {"weights": "q8", "activations": "int8"}


@pytest.mark.parametrize(
    ("name", "options"), [("qwen2_moe", {}), ("qwen2_moe", INT8), ("gemma2", {}), ("bloom", {})]
)
def test_other_kinds_of_layers(name, options):
    """Experts, windows, soft caps, distance biases: logits of chunks and in batches."""
    ids = np.load(FAMILIES / name / "golden.npz")["ids"].tolist()
    with nbflow.load(FAMILIES / name, threads=1, **options) as model:
        whole, other = model.logits(ids), model.logits(ids[5:])
        with model.session() as session:
            a, b = session.begin(), session.begin()
            rows = session.run({a: ids, b: ids[5:]})
            np.testing.assert_array_equal(rows[a].logits, whole)
            np.testing.assert_array_equal(rows[b].logits, other)
            c = session.begin()
            found = [session.run({c: ids[i : i + 3]})[c].logits for i in range(0, len(ids), 3)]
        np.testing.assert_array_equal(np.concatenate(found), whole)


def test_encoders_read_together(tmp_path):
    """Results of an encoder-decoder model do not depend on other inputs of the step."""
    read = np.load(FAMILIES / "m2m_100" / "golden.npz")["encoder_ids"].tolist()
    inputs = [read[i:] for i in range(5)]
    with nbflow.load(FAMILIES / "m2m_100", threads=1) as model:
        alone = [model.generate(ids, 6) for ids in inputs]
        memory = model.workers[0].cross_attention
        with nbflow.LLMEngine(model, max_sequences=3) as engine:
            handles = [
                engine.submit(model.make_request(ids, 6, "greedy", 0, False)) for ids in inputs
            ]
            results = [h.result(300) for h in handles]
            assert everything(results) == everything(alone)
        assert memory.table.sequences == []


def test_texts_embedded_together(checkpoint):
    ids = np.load(FAMILIES / "bert" / "golden.npz")["ids"].tolist()
    texts = [ids[i:] for i in range(6)]
    with nbflow.load(FAMILIES / "bert", threads=1, max_step_tokens=100) as model:
        alone = [model.embed(text) for text in texts]
        np.testing.assert_array_equal(model.embed_batch(texts), alone)
        with nbflow.LLMEngine(model) as engine:
            np.testing.assert_array_equal(engine.embed(texts), alone)
            np.testing.assert_array_equal(engine.embed(texts[:1]), alone[:1])
    with nbflow.load(checkpoint, threads=1) as model:
        with nbflow.LLMEngine(model) as engine:
            rows = engine.embed([[1, 2, 3], [4, 5]], pooling="last", normalize=False)
        np.testing.assert_array_equal(rows[0], model.hidden([1, 2, 3])[-1])
