"""Sampling parameters: names, types, ranges, inferred strategy, logits processors."""

from __future__ import annotations

import math

import numpy as np
import pytest

import nbflow
from nbflow.options import SamplingParams
from nbflow.sampling import (
    STRATEGIES,
    Chain,
    Constrained,
    Filters,
    Greedy,
    LogitsProcessors,
    Mirostat,
    Sample,
    TopP,
    build_strategy,
    dry_breakers,
    of_other_strategies,
    with_recommended,
)
from nbflow.sampling.dry_breakers import breaker_sequences
from nbflow.sampling.logits_processors import constrain
from nbflow.tokenization.token_bytes import vocabulary_bytes
from nbflow_kernels.errors import UsageError


@pytest.fixture(scope="module")
def tokenizer():
    return nbflow.load_tokenizer("tiny_python")


def strategy(**values):
    return build_strategy(SamplingParams.parse(values), 100, known_end_ids=(2,))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Greedy()),
        ({"temperature": 0}, Greedy()),
        ({"temperature": 0.0, "top_p": 0.9}, Greedy()),
        ({"temperature": 0.7}, Filters(temperature=0.7)),
        ({"temp": 0.7, "top_k": -1}, Filters(temperature=0.7)),
        ({"top_k": 20, "top_p": 0.9, "min_p": 0.01}, Filters(1.0, 20, 0.9, 0.01)),
        ({"decoding": "top_p", "top_p": 0.8}, TopP(1.0, 0.8)),
        ({"decoding": "sample"}, Sample()),
        ({"decoding": "chain"}, Chain()),
        ({"mirostat": 2, "mirostat_tau": 3.0}, Mirostat(1.0, 2, 3.0)),
        ({"decoding": "mirostat"}, Mirostat()),
        ({"decoding": "inferflow.fsd", "alpha": 0.3}, STRATEGIES["inferflow.fsd"](alpha=0.3)),
        (
            {"typ_p": 0.9, "temperature": 0.5},
            Chain(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0, typical_p=0.9, repeat_last_n=-1),
        ),
        ({"decoding": "chain", "repeat_penalty": 1.2}, Chain(repeat_penalty=1.2)),
        ({"samplers": "kt", "top_k": 4, "decoding": "chain"}, Chain("kt", top_k=4)),
        ({"top_k": 5, "repetition_penalty": 1.2},
         Constrained(Filters(top_k=5), LogitsProcessors(repetition_penalty=1.2, end_ids=(2,)))),
        ({"min_tokens": 3}, Constrained(Greedy(), LogitsProcessors(min_tokens=3, end_ids=(2,)))),
        ({"logit_bias": {"5": -100}},
         Constrained(Greedy(), LogitsProcessors(logit_bias=((5, -100.0),), end_ids=(2,)))),
        ({"logit_bias": [[5, False]]},
         Constrained(Greedy(), LogitsProcessors(logit_bias=((5, -math.inf),), end_ids=(2,)))),
    ],
)  # fmt: skip
def test_what_parameters_mean(values, expected):
    assert strategy(**values) == expected


def test_a_strategy_can_be_constrained():
    made = build_strategy(SamplingParams(min_tokens=2), 100, known_end_ids=(2,), inner=TopP())
    assert made == Constrained(TopP(), LogitsProcessors(min_tokens=2, end_ids=(2,)))
    with pytest.raises(UsageError, match="give top_k to it"):
        build_strategy(SamplingParams(top_k=2), 100, inner=TopP())


def test_recommended_values_are_taken_where_none_is_given():
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 0}
    made = build_strategy(SamplingParams(top_k=7), 100, defaults=recommended)
    assert made == Filters(temperature=0.6, top_k=7, top_p=0.9)
    assert build_strategy(SamplingParams(), 100, defaults=recommended) == Filters(0.6, 0, 0.9)
    assert build_strategy(SamplingParams(decoding="greedy"), 100, defaults=recommended) == Greedy()
    made = build_strategy(SamplingParams(typical_p=0.8), 100, defaults=recommended)
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (0.6, 0.9, 0, 0.0)


def test_recommended_values_with_a_stated_strategy():
    """They hold where the strategy has such a parameter, and never with Inferflow's."""
    recommended = {"temperature": 0.3, "top_p": 0.9, "top_k": 5}
    assert with_recommended({"top_k": 7}, recommended) == recommended | {"top_k": 7}
    stated = {"decoding": "top_p", "min_tokens": 3}
    assert with_recommended(stated, recommended) == stated | {"temperature": 0.3, "top_p": 0.9}
    stated = {"decoding": "inferflow.top_p", "top_p": 0.8}
    assert with_recommended(stated, recommended) == stated
    assert of_other_strategies(["top_k", "top_p", "stop"], "inferflow.top_p") == {"top_k"}


def test_temperatures_near_zero_are_greedy(rows):
    for name in ("sample", "filters", "chain", "mirostat", "inferflow.top_p"):
        made = build_strategy(SamplingParams(decoding=name, temperature=1e-30), 20)
        assert text(made, rows) == [int(row.argmax()) for row in rows], name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"decoding": "top_b"}, "unknown decoding strategy 'top_b'"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"temperature": -1.0}, "temperature must be in"),
        ({"temp": 1.0, "temperature": 2.0}, "given twice"),
        ({"max_tokens": -1}, "max_tokens must be in"),
        ({"n": 0}, "n must be in"),
        ({"seed": -(2**63) - 1}, "seed must be in"),
        ({"stop": ["a", ""]}, "stop must hold texts"),
        ({"logit_bias": {"x": 1}}, "logit_bias must map"),
        ({"logit_bias": {"100": 1}}, "logit_bias must hold ids in 0..99, got 100"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must hold ids"),
        ({"bad_words": ["x"]}, "bad_words needs the model's tokenizer"),
        ({"regex": "a", "choice": ["a"]}, "give one of"),
        ({"regex": "a"}, "regex needs the model's tokenizer"),
        ({"decoding": "greedy", "top_p": 0.5}, "has no parameter 'top_p'"),
        ({"decoding": "top_p", "dry_multiplier": 0.5}, "has no parameter 'dry_multiplier'"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids must be a list of whole numbers"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids must be a list of whole numbers"),
        ({"stop": 5}, "stop must be a text or a list of texts"),
        ({"samplers": 5}, "samplers must be a text or a list of texts"),
        ({"bad_words": "abc"}, "bad_words must be a list of texts or lists"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"max_k": 3}, "has no parameter 'max_k'"),
        ({"mirostat": 2, "top_p": 0.5}, "has no parameter 'top_p'"),
        ({"temperature": 0, "mirostat_tau": 3.0}, "has no parameter 'mirostat_tau'"),
    ],
)
def test_wrong_parameters_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        strategy(**values)


def text(made, rows, prompt=(), seed=3):
    state, ids = made.begin(prompt, seed), []
    for row in rows:
        ids.append(state.choose(row.copy()))
        state.accept(ids[-1])
    return ids


@pytest.fixture
def rows():
    return np.random.default_rng(8).normal(0, 1, (30, 20)).astype(np.float32)


def test_constraints_that_do_not_bind_do_not_change_the_draws(rows):
    plain = Filters(temperature=1.3, top_k=9)
    bound = constrain(plain, LogitsProcessors(banned_token_ids=(0,)))
    rows[:, 0] = -np.inf
    seeds, ids = np.array([3], np.uint64), []
    for n, row in enumerate(rows):
        ids.append(int(plain.choose(row[None], seeds, np.array([n], np.uint64))[0]))
    assert text(bound, rows) == ids


def test_bias_bans_and_allowed_tokens(rows):
    assert set(text(constrain(Greedy(), LogitsProcessors(allowed_token_ids=(4, 7))), rows)) == {
        4,
        7,
    }
    assert 5 not in text(constrain(Greedy(), LogitsProcessors(banned_token_ids=(5,))), rows)
    assert set(text(constrain(Greedy(), LogitsProcessors(logit_bias=((3, 100.0),))), rows)) == {3}
    for strategy in (Chain(), Greedy()):
        with pytest.raises(UsageError, match="every token is banned, so"):
            text(constrain(strategy, LogitsProcessors(banned_token_ids=tuple(range(20)))), rows)


def test_bad_words_are_sequences(rows):
    row = np.zeros(20, np.float32)
    row[1], row[2] = 2.0, 1.0
    rules = LogitsProcessors(bad_words=((1, 1), (9,)))
    assert text(constrain(Greedy(), rules), [row] * 4, prompt=[1]) == [1, 2, 1, 2]
    assert text(constrain(Greedy(), LogitsProcessors(bad_words=((1, 2, 1),))), [row] * 3) == [
        1,
        1,
        1,
    ]


def test_end_tokens_wait_for_min_tokens():
    row = np.zeros(20, np.float32)
    row[2] = 5.0
    made = constrain(Greedy(), LogitsProcessors(min_tokens=3, end_ids=(2,)))
    assert text(made, [row] * 4) == [0, 0, 0, 2]


def test_penalties_and_ngrams_count_as_elsewhere():
    row = np.zeros(4, np.float32)
    row[:] = [1.0, 0.9, 0.8, 0.7]
    # OpenAI's penalties do not see the prompt; Hugging Face's does
    made = constrain(Greedy(), LogitsProcessors(presence_penalty=0.15))
    assert text(made, [row] * 4, prompt=[0]) == [0, 1, 0, 0]  # .85 .75 .8 .7 from then on
    made = constrain(Greedy(), LogitsProcessors(repetition_penalty=2.0))
    assert text(made, [row] * 3, prompt=[0]) == [1, 2, 3]
    made = constrain(Greedy(), LogitsProcessors(no_repeat_ngram_size=2))
    assert text(made, [row] * 4) == [0, 0, 1, 0]


def test_a_fork_goes_on_by_itself(rows):
    made = constrain(Chain(temperature=2.0), LogitsProcessors(no_repeat_ngram_size=1))
    state = made.begin([], 1)
    best = int(rows[0].argmax())
    other = state.fork()
    other.accept(best)
    assert state.probs(rows[0].copy())[best] > 0.0
    assert other.probs(rows[0].copy())[best] == 0.0


def test_bad_words_come_with_and_without_a_space(tokenizer):
    made = build_strategy(SamplingParams(bad_words=["return"]), tokenizer.vocab_size, tokenizer)
    encode_errors = made.constraints.bad_words
    assert [tokenizer.decode(w) for w in encode_errors] == ["return", " return"]


def slow_sequences(tokenizer, breaker):
    """Reference: breakers by a scan of the vocabulary."""
    whole, found = breaker.encode(), set()
    for token, text in enumerate(vocabulary_bytes(tokenizer)):
        if text is None:
            continue
        if whole in text:
            found.add((token,))
            continue
        for n in range(1, len(whole)):
            if text.endswith(whole[:n]):
                rest = whole[n:].decode("utf-8", "ignore")
                found.add((token, *tokenizer.encode(rest)[:20]))
    return found


@pytest.mark.parametrize(
    "breaker", ["\n", "e", "):", "self", "é", " return x", "==" * 20, "\n\n  "]
)
def test_breakers_are_the_sequences_that_a_search_of_the_vocabulary_finds(tokenizer, breaker):
    assert set(breaker_sequences(tokenizer, (breaker,))) == slow_sequences(tokenizer, breaker)


def test_the_vocabulary_is_gone_through_once_and_few_results_are_kept(monkeypatch):
    tokenizer, walks = nbflow.load_tokenizer("tiny_python"), []
    monkeypatch.setattr(
        dry_breakers, "vocabulary_bytes", lambda t: walks.append(t) or vocabulary_bytes(t)
    )
    for i in range(100):
        breaker_sequences(tokenizer, tuple(f"{i} {k}" for k in range(5)))
    assert len(walks) == 1
    kept = tokenizer.__dict__["_breaker_index"]._kept
    assert len(kept) == 32
    last = tuple(f"99 {k}" for k in range(5))
    assert breaker_sequences(tokenizer, last) is kept[last]


def test_breakers_have_limits(tokenizer, monkeypatch):
    for wrong in (("x",) * 65, ("x" * 41,), ("\ud800",)):
        with pytest.raises(UsageError, match="breakers"):
            breaker_sequences(tokenizer, wrong)
    monkeypatch.setattr(dry_breakers, "MAX_SEQUENCES", 10)
    with pytest.raises(UsageError, match="more than 10 token sequences"):
        breaker_sequences(tokenizer, ("e", "t"))


def test_breakers_are_found_in_tokens(tokenizer):
    found = breaker_sequences(tokenizer, ("\n",))
    texts = {tokenizer.decode(s) for s in found}
    assert all("\n" in t for t in texts)
    assert "\n" in texts
    assert len(texts) > 1  # other tokens hold a line break, too
    pair = breaker_sequences(tokenizer, ("):",))
    assert any(len(s) == 2 for s in pair)
    assert all("):" in tokenizer.decode(s) for s in pair)
    with pytest.raises(UsageError, match="breakers must have"):
        breaker_sequences(tokenizer, ("",))
