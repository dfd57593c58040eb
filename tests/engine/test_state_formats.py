"""Recurrent states in 16 and 8 bits: results, batches, prefix cache, draft tokens, memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import nbflow
from nbflow.kv_cache.state_storage import with_state_format
from nbflow.planner.memory_plan import plan_memory
from nbflow.program import build
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError
from nbflow_kernels.state_format import STATE_FORMATS

FOLDER = Path(__file__).parents[1] / "golden" / "families"
MODELS = ["olmo_hybrid", "mamba2", "falcon_mamba", "minimax"]
"""The delta rule, Mamba-2, Mamba-1, lightning attention."""
IDS = np.load(FOLDER / "olmo_hybrid" / "golden.npz")["ids"].tolist()
TEXT = [i % 90 for i in (*IDS, *IDS[::-1], *IDS[::2])]  # 100 tokens
OPTIONS = {"kv": "f32", "threads": 1}
ERROR = {"f16": 2e-3, "bf16": 2e-2, "q8_0": 4e-2}
"""Largest error of a logit, relative to the largest logit: some units of a state's rounding, 2**-11
of it, 2**-8, and 1/254 of the largest number of its block."""


@pytest.mark.parametrize("format", ERROR)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_bits(name, format):
    with np.load(FOLDER / name / "golden.npz") as file:
        ids, exact = file["ids"], file["logits"]
    ids = ids[: len(exact)]
    options = OPTIONS | {"state": format}
    with nbflow.load(FOLDER / name, max_step_tokens=64, **options) as model:
        logits = model.logits(ids)
        with model.session() as session:
            a = session.begin()
            steps = [session.run({a: [i]})[a].logits for i in ids[:12].tolist()]
        greedy = [model.generate(ids[:n], 6) for n in (40, 3, 26)]
        batch = model.generate_batch([ids[:n] for n in (40, 3, 26)], 6)
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    assert 1e-6 < error < ERROR[format]
    assert np.abs(np.concatenate(steps) - exact[:12]).max() / np.abs(exact).max() < ERROR[format]
    assert [r.ids for r in batch] == [r.ids for r in greedy]
    assert [r.logprobs for r in batch] == [r.logprobs for r in greedy]
    with nbflow.load(FOLDER / name, max_step_tokens=34, **options) as model:
        assert np.array_equal(model.logits(ids), logits)  # cut at 32 tokens


@pytest.mark.parametrize("name", ["olmo_hybrid", "mamba2"])
def test_prefix_cache_draft_tokens_and_forks(name, tmp_path):
    (tmp_path / "own.toml").write_text(f'family = "{name}"\n[override]\nmax_context = 128\n')
    options = OPTIONS | {"state": "q8_0", "spec": tmp_path / "own.toml", "max_step_tokens": 48}
    prompts = [TEXT, TEXT, [*TEXT[:66], 5, 6, 7], TEXT[:64]]
    found = {}
    with nbflow.load(FOLDER / name, **options) as model:
        for kept in (0, 4):
            with nbflow.LLMEngine(model, prefix_states=kept) as engine:
                results = [engine.submit(model.make_request(ids, 5)).result() for ids in prompts]
            found[kept] = [(r.ids, r.cached_tokens) for r in results]
        assert [tokens for _, tokens in found[4]] == [0, 64, 64, 0]
        assert [ids for ids, _ in found[0]] == [ids for ids, _ in found[4]]
        expected = found[0][0][0]

        def propose(ids, n):
            return [*expected[len(ids) - len(TEXT) :][:2], 3, 4][:n]

        drafted = model.generate(TEXT, 5, draft=propose, n_draft=4)
        assert drafted.ids == expected
        assert drafted.n_accepted >= 2
        with model.session() as session:
            a = session.begin()
            session.run({a: TEXT[:40]})
            b = session.fork(a)
            both = session.run({b: TEXT[40:42], a: TEXT[40:42]})
            assert np.array_equal(both[a].logits, both[b].logits)


def test_bytes_of_states():
    spec = resolve(FOLDER / "olmo_hybrid").spec
    sizes = {}
    for format in STATE_FORMATS:
        states = build(with_state_format(spec, format)).states.values()
        sizes[format] = sum(s.n_bytes for s in states)
        with nbflow.load(FOLDER / "olmo_hybrid", state=format, **OPTIONS) as model:
            (rank,) = model.gather("page_memory")
            assert rank["state_bytes"] == sizes[format]
            n_bytes = rank["page_bytes"] + 5 * rank["state_bytes"]
            planned = plan_memory(
                FOLDER / "olmo_hybrid", kv="f32", state=format, kv_bytes=n_bytes, max_sequences=2,
                prefix_states=3,
            )  # fmt: skip
            assert planned.ranks[0].kv_bytes == n_bytes
    assert sizes["f16"] == sizes["bf16"] == sizes["f32"] // 2
    numbers = sum(np.prod(s.shape) for s in states if s.format == "q8_0")
    others = sum(np.prod(s.shape) for s in states if s.format == "bf16")
    assert numbers < sizes["q8_0"] - 2 * others < 1.2 * numbers  # short blocks of small heads
    assert others > 0


def test_unknown_formats_are_refused():
    with pytest.raises(UsageError, match=r"unknown state 'q4_0'.*f32, f16, bf16, q8_0"):
        nbflow.load(FOLDER / "mamba2", state="q4_0")
