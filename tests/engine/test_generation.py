"""Generation: stop texts, structured output, draft tokens, searches, log-probabilities."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_models import write_llama

import nbflow
from nbflow.engine.request import Request
from nbflow.engine.speculative.rejection_sampler import rejection_sample
from nbflow.sampling import Chain, make_strategy
from nbflow_kernels.errors import UsageError

GOLDEN = Path(__file__).parents[1] / "golden"
BEAM = json.loads((GOLDEN / "beam.json").read_text())
PROMPT = "def f("


@pytest.fixture(scope="module")
def tiny():
    with nbflow.load("tiny_python", threads=1) as model:
        yield model


# ---- searches -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(BEAM["models"]))
def golden(request):
    with nbflow.load(GOLDEN / "families" / request.param, kv="f32", threads=1) as model:
        yield model, BEAM["models"][request.param]


def test_beam_search_finds_what_transformers_finds(golden):
    model, expected = golden
    for run in expected["beam"]:
        options = run["options"]
        found = nbflow.beam_search(
            model, BEAM["prompt"], BEAM["n_new"], n=options["num_beams"], ignore_eos=True,
            stop_token_ids=[run["end"]], **options,
        )  # fmt: skip
        assert len(found) == len(run["found"])
        for ours, theirs in zip(found, run["found"], strict=True):
            assert ours.ids == theirs["ids"], options
            if theirs["score"] is not None:
                # sums of 12 log-probabilities of float32 models, each good to about 1e-6
                assert ours.score == pytest.approx(theirs["score"], abs=1e-4)
        pages = model.workers[0].table
        assert pages.n_used_pages == 0


def test_contrastive_search_follows_its_formula(golden):
    model, expected = golden
    for run in expected.get("contrastive", ()):
        options = {name: run[name] for name in ("top_k", "penalty_alpha")}
        found = nbflow.contrastive_search(
            model, BEAM["prompt"], BEAM["n_new"], ignore_eos=True, **options
        )
        assert found.ids == run["ids"]
    greedy = model.generate(BEAM["prompt"], 8, ignore_eos=True)
    found = nbflow.contrastive_search(model, BEAM["prompt"], 8, penalty_alpha=0.0, ignore_eos=True)
    assert found.ids == greedy.ids
    # float32 logits of the same rows in steps of another size
    np.testing.assert_allclose(found.logprobs, greedy.logprobs, atol=1e-5)


def test_searches_run_on_ranks():
    folder, options = GOLDEN / "families" / "gpt2", {"kv": "f32", "threads": 1}
    with nbflow.load(folder, **options) as whole:
        expected = nbflow.beam_search(whole, BEAM["prompt"], 6, num_beams=3, n=3)
        encode_errors = nbflow.contrastive_search(whole, BEAM["prompt"], 6)
        drawn = whole.generate(BEAM["prompt"], 20, "chain", seed=4, repeat_penalty=1.3, logprobs=2)
    with nbflow.load(folder, partition="0;1", **options) as parts:
        found = nbflow.beam_search(parts, BEAM["prompt"], 6, num_beams=3, n=3)
        assert [h.ids for h in found] == [h.ids for h in expected]
        assert nbflow.contrastive_search(parts, BEAM["prompt"], 6).ids == encode_errors.ids
        again = parts.generate(BEAM["prompt"], 20, "chain", seed=4, repeat_penalty=1.3, logprobs=2)
        assert again.ids == drawn.ids
        # ranks make the same float32 sums, but not in one order
        np.testing.assert_allclose(again.top_logprobs, drawn.top_logprobs, atol=1e-5)
        plain = parts.generate(BEAM["prompt"], 20, ignore_eos=True)
        helped = parts.generate(BEAM["prompt"], 20, ignore_eos=True, draft="ngram")
        assert helped.ids == plain.ids


# ---- proposals ------------------------------------------------------------------------------

DECODINGS = [
    {"decoding": "greedy"},
    {"decoding": "auto", "temperature": 1.0, "top_k": 30},
    {"decoding": "chain", "repeat_penalty": 1.3, "dry_multiplier": 0.5},
    {"decoding": "inferflow.mirostat"},
]


@pytest.mark.parametrize("options", DECODINGS, ids=lambda o: o["decoding"])
def test_proposals_change_nothing(tiny, options):
    plain = tiny.generate(PROMPT, 60, seed=4, ignore_eos=True, **options)
    helped = tiny.generate(PROMPT, 60, seed=4, ignore_eos=True, draft="ngram", **options)
    assert helped.ids == plain.ids
    assert plain.acceptance_rate is None
    assert helped.n_drafted > 0
    assert 0.0 <= helped.acceptance_rate <= 1.0


def test_a_draft_model_that_is_the_model_is_always_right(tiny):
    with nbflow.load("tiny_python", threads=1) as draft:
        for options in DECODINGS[:2]:
            plain = tiny.generate(PROMPT, 40, seed=2, ignore_eos=True, **options)
            helped = tiny.generate(
                PROMPT, 40, seed=2, ignore_eos=True, draft=draft, n_draft=4, **options
            )
            assert helped.ids == plain.ids
            # rows of a step of five and of one agree up to rounding: a token may tip over
            assert helped.acceptance_rate > 0.9
        assert draft.workers[0].table.n_used_pages == 0


def test_a_bad_draft_model_changes_nothing(tmp_path):
    write_llama(tmp_path / "a", n_layers=1, max_context=128, seed=1)
    write_llama(tmp_path / "b", n_layers=1, max_context=40, seed=2)
    write_llama(tmp_path / "c", n_layers=1, max_context=40, vocab_size=50)
    load = {"threads": 1, "kv": "f32"}
    with (
        nbflow.load(tmp_path / "a", **load) as model,
        nbflow.load(tmp_path / "b", **load) as draft,
        nbflow.load(tmp_path / "c", **load) as other,
    ):
        options = {"decoding": "sample", "seed": 7, "ignore_eos": True}
        plain = model.generate([1, 2, 3], 50, **options)
        helped = model.generate([1, 2, 3], 50, draft=draft, **options)  # beyond its context, too
        assert helped.ids == plain.ids
        assert helped.acceptance_rate < 0.5
        own = model.generate([1, 2, 3], 50, draft=lambda ids, n: [0] * n, **options)
        assert own.ids == plain.ids
        for errors, message in (
            (other, "must have the vocabulary"),
            (model, "differ from the target model"),
            ("grams", "unknown draft"),
        ):
            with pytest.raises(UsageError, match=message):
                model.generate([1], 2, draft=errors)


def test_a_chain_takes_more_proposals_and_keeps_greedy(tmp_path):
    for name in "ab":
        write_llama(tmp_path / name, n_layers=2, max_context=128, seed=1)
    file, rng = tmp_path / "b" / "model.safetensors", np.random.default_rng(2)
    noisy = {
        name: array * (1 + rng.normal(0, 0.1, array.shape)).astype(np.float32)
        for name, array in load_file(file).items()
    }
    save_file(noisy, file)
    with (
        nbflow.load(tmp_path / "b", threads=1) as draft,
        nbflow.load(tmp_path / "a", threads=1) as model,
    ):
        options = {"draft": draft, "ignore_eos": True, "n_draft": 4}
        plain = model.generate([1, 2, 3], 60, ignore_eos=True)
        assert model.generate([1, 2, 3], 60, draft_verify="chain", **options).ids == plain.ids
        rates = {
            verify_drafts: np.mean(
                [
                    model.generate(
                        [1, 2, 3], 60, "sample", seed=s, draft_verify=verify_drafts, **options
                    ).acceptance_rate
                    for s in range(5)
                ]
            )
            for verify_drafts in ("same", "chain")
        }
        assert rates["chain"] > rates["same"] > 0.0
        chained = model.generate(
            [1, 2, 3], 30, "chain", seed=3, draft_verify="chain", repeat_penalty=1.5, **options
        )
        assert len(chained.ids) == 30
        with pytest.raises(UsageError, match="unknown draft_verify"):
            model.generate([1], 2, draft_verify="none", **options)


def test_a_chain_keeps_the_distribution():
    """Two tokens of 6,000 texts over four words, where draft and target differ."""
    rng, V, n = np.random.default_rng(12), 4, 6_000
    q, p = rng.dirichlet(np.ones(V), V + 1), rng.dirichlet(np.ones(V), V + 1)
    strategy, counts, n_taken = make_strategy("sample"), np.zeros((V, V)), 0
    for seed in range(n):
        drafts = [int(rng.choice(V, p=p[V]))]
        drafts.append(int(rng.choice(V, p=p[drafts[0]])))
        rows = np.log(q[[V, *drafts]]).astype(np.float32)
        request = Request([0], 9, strategy, seed)
        probs = p[[V, drafts[0]]].astype(np.float32)
        tokens = rejection_sample(rows, request, drafts, probs)
        n_taken += len(tokens) - 1
        if len(tokens) == 1:  # the next step's token
            tokens.append(int(rng.choice(V, p=q[tokens[0]])))
        counts[tokens[0], tokens[1]] += 1
    expected = n * q[V][:, None] * q[:V]
    # chi-square with 15 degrees of freedom: 44.3 is passed by chance once in 10,000 seeds
    assert ((counts - expected) ** 2 / expected).sum() < 44.3
    # the first token is taken with probability sum min(p, q); 5 standard deviations of a share
    share = np.minimum(p[V], q[V]).sum()
    assert n_taken / n > share - 5 * np.sqrt(share / n)


def test_several_requests_with_proposals_of_their_own(tiny):
    prompts = [PROMPT, "class A:\n    def", "import os\n"]
    plain = tiny.generate_batch(prompts, 30, seed=3, decoding="top_p", ignore_eos=True)
    helped = tiny.generate_batch(
        prompts, 30, seed=3, decoding="top_p", ignore_eos=True, draft="ngram"
    )
    assert [g.ids for g in helped] == [g.ids for g in plain]


def test_a_draft_model_helps_all_requests_of_an_engine_at_once():
    prompts = [PROMPT, "class A:\n    def", list(range(300, 420))]
    with (
        nbflow.load("tiny_python", threads=1) as model,
        nbflow.load("tiny_python", threads=1, max_step_tokens=48) as draft,  # reads in pieces
    ):
        plain = model.generate_batch(prompts, 30, seed=3, decoding="top_p", ignore_eos=True)
        asked, run = [], draft.workers[0].run_step
        draft.workers[0].run_step = lambda step: (
            asked.append(len(step.state_rows)),
            run(step),
        )
        with nbflow.LLMEngine(model) as engine:
            handles = [
                engine.submit(
                    model.make_request(p, 30, "top_p", 3 + i, True, draft=draft, n_draft=4)
                )
                for i, p in enumerate(prompts)
            ]
            for handle, expected in zip(handles, plain, strict=True):
                made = handle.result(60)
                assert made.ids == expected.ids
                assert made.acceptance_rate == 1.0  # it is the model itself
            cut = engine.submit(model.make_request(PROMPT, 400, draft=draft, ignore_eos=True))
            next(iter(cut))
            cut.cancel()
            assert list(cut)[-1].finish_reason == "abort"
        assert max(asked) == 3
        assert draft.workers[0].table.n_used_pages == 0


@pytest.mark.parametrize("partition", ["0;1", "0&1"])
def test_a_draft_model_helps_ranks(tiny, partition):
    plain = tiny.generate(PROMPT, 30, ignore_eos=True)
    with (
        nbflow.load("tiny_python", partition=partition, threads=1) as parts,
        nbflow.load("tiny_python", threads=1) as draft,
    ):
        helped = parts.generate(PROMPT, 30, ignore_eos=True, draft=draft)
        assert helped.ids == plain.ids
        assert helped.n_accepted > 20  # of 29; the partition rounds otherwise than the draft
        with pytest.raises(UsageError, match="on one rank"):
            parts.generate(PROMPT, 3, draft=draft, draft_verify="chain")


# ---- ends and reports -----------------------------------------------------------------------


def test_stop_texts_end_the_text_at_any_token(tiny):
    whole = tiny.generate(PROMPT, 60, ignore_eos=True).text
    for stop in (whole[7:10], whole[20:22], "\n"):
        cut = tiny.generate(PROMPT, 60, ignore_eos=True, stop=[stop])
        assert cut.text == whole[: whole.index(stop)]
        assert cut.finish_reason == "stop"
        assert whole.startswith(tiny.tokenizer.decode(cut.ids[:-1]))
        assert stop in tiny.tokenizer.decode(cut.ids)
        kept = tiny.generate(
            PROMPT, 60, ignore_eos=True, stop=stop, include_stop_str_in_output=True
        )
        assert kept.text == cut.text + stop
    assert tiny.generate(PROMPT, 60, ignore_eos=True, stop="\u2603").text == whole
    streamed = list(tiny.stream(PROMPT, 60, ignore_eos=True, stop=[whole[7:10]]))
    assert streamed == tiny.generate(PROMPT, 60, ignore_eos=True, stop=[whole[7:10]]).ids


def test_one_that_stops_leaves_the_others(tiny):
    alone = [tiny.generate(p, 30, ignore_eos=True, stop="):") for p in (PROMPT, "import os")]
    both = tiny.generate_batch([PROMPT, "import os"], 30, ignore_eos=True, stop="):")
    assert [g.text for g in both] == [g.text for g in alone]


def test_stop_texts_end_requests_of_an_engine():
    with nbflow.load("tiny_python", threads=1) as model:
        whole = model.generate(PROMPT, 60, ignore_eos=True)
        options = {"ignore_eos": True, "stop": [whole.text[20:22]]}
        expected = model.generate(PROMPT, 60, **options)
        with nbflow.LLMEngine(model) as engine:
            handles = [
                engine.submit(model.make_request(PROMPT, 60, **options)),
                engine.submit(model.make_request(PROMPT, 60, ignore_eos=True)),
            ]
            events = list(handles[0])
            cut, free = [handle.result(60) for handle in handles]
        assert (cut.text, cut.ids, cut.finish_reason) == (expected.text, expected.ids, "stop")
        assert [e.token for e in events if e.token is not None] == expected.ids
        assert events[-1].finish_reason == "stop"
        assert free.ids == whole.ids


def test_most_probable_tokens_are_reported(tiny):
    made = tiny.generate(PROMPT, 8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    assert [len(top) for top in made.top_logprobs] == [3] * 8
    for token, logprob, top in zip(made.ids, made.logprobs, made.top_logprobs, strict=True):
        assert top[0] == (token, logprob)  # greedy
        assert top[0][1] >= top[1][1] >= top[2][1]
    read = tiny.generate(PROMPT, 0, prompt_logprobs=2)
    assert (read.ids, read.finish_reason) == ([], "length")
    assert read.prompt_logprobs == made.prompt_logprobs
    logits = tiny.logits([*made.prompt_ids, *made.ids[:-1]]).astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for n, (logprob, top) in enumerate(made.prompt_logprobs):
        assert len(top) == 2
        # float16 keys and values, read in steps of another size
        assert logprob == pytest.approx(exact[n, made.prompt_ids[n + 1]], abs=1e-3)
    first = len(made.prompt_ids) - 1
    np.testing.assert_allclose(
        made.logprobs, [exact[first + i, t] for i, t in enumerate(made.ids)], atol=1e-3
    )


def test_structure_and_constraints_reach_the_engine(tiny):
    made = tiny.generate(PROMPT, 30, ignore_eos=True, banned_token_ids=[0, 1], min_tokens=5)
    assert not {0, 1} & set(made.ids)
    forced = tiny.generate(PROMPT, 3, ignore_eos=True, logit_bias={"7": 1000})
    assert forced.ids == [7, 7, 7]
    pytest.importorskip("llguidance", reason="needs the extra structured")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    text = tiny.generate(
        PROMPT, 60, json_schema=schema, stop_token_ids=[5], decoding="sample", seed=1
    )
    assert text.finish_reason == "stop"
    assert isinstance(json.loads(text.text)["a"], int)


def test_n_continuations(tiny):
    options = {"decoding": "sample", "ignore_eos": True}
    made = tiny.generate_batch([PROMPT, "import"], 10, seed=5, n=3, **options)
    assert len(made) == 6
    for i, one in enumerate(made):
        prompt = PROMPT if i < 3 else "import"
        assert one.ids == tiny.generate(prompt, 10, seed=5 + i, **options).ids
    long = list(range(100))  # more than a page of 64 tokens
    shared = tiny.generate_batch([long], 10, seed=2, n=3, **options)
    assert [g.cached_tokens for g in shared] == [0, 64, 64]
    for i, one in enumerate(shared):
        assert one.ids == tiny.generate(long, 10, seed=2 + i, **options).ids
    with pytest.raises(UsageError, match="n is an argument of generate_batch"):
        tiny.make_request(PROMPT, n=2)


def test_stateful_strategies_are_the_same_alone_and_in_a_batch(tiny):
    prompts = [PROMPT, "class B:", "for i in"]
    for decoding in ("chain", "inferflow.random_fsd", Chain(temperature=1.5, xtc_probability=0.5)):
        together = tiny.generate_batch(prompts, 12, decoding, seed=9, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            alone = tiny.generate(prompt, 12, decoding, seed=9 + i, ignore_eos=True)
            assert together[i].ids == alone.ids
            assert not any(map(math.isnan, alone.logprobs))
