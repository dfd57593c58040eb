"""The chain of samplers against llama.cpp's own (tools/golden/llama_cpp_samplers.py)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from nbflow.sampling.candidates import Candidates
from nbflow.sampling.mirostat import Mirostat
from nbflow.sampling.sampler_chain import Chain, parse_samplers
from nbflow.sampling.samplers import DEFAULT_ORDER
from nbflow_kernels.errors import UsageError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "samplers.json").read_text())
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# llama.cpp adds and exponentiates in float32: 40 terms, each 2**-24 of at most 1; the file holds
# seven places
TOLERANCE = 2e-5


def rows():
    return [np.array(row, np.float32) for row in GOLDEN["rows"]]


def kept(state, row):
    dense = state.probs(row.copy())
    ids = np.flatnonzero(dense)
    return ids.tolist(), dense[ids]


@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda c: f"{'+'.join(c['samplers'])[:30]}-{c['row']}"
)
def test_samplers_keep_what_llama_cpp_keeps(case):
    options = {k: v for k, v in case["options"].items() if k != "samplers"}
    chain = Chain(samplers=tuple(case["samplers"]), **{**NEUTRAL, **options})
    ids, probs = kept(chain.begin(GOLDEN["history"], 0), rows()[case["row"]])
    assert ids == case["ids"]
    np.testing.assert_allclose(probs, case["probs"], atol=TOLERANCE)


@pytest.mark.parametrize("run", GOLDEN["mirostat"], ids=lambda r: f"v{r['version']}")
def test_mirostat_follows_llama_cpp(run):
    strategy = Mirostat(
        temperature=1.0, mirostat=run["version"], mirostat_tau=run["tau"],
        mirostat_eta=run["eta"], mirostat_m=run["m"],
    )  # fmt: skip
    state = strategy.begin([], 0)
    for i, step in enumerate(run["steps"]):
        ids, probs = kept(state, rows()[i % 2])
        assert ids == step["ids"]
        np.testing.assert_allclose(probs, step["probs"], atol=TOLERANCE)
        state.accept(step["selected"])


def test_history_counts_prompt_and_new_tokens():
    row = np.zeros(6, np.float32)
    chain = Chain(("penalties",), presence_penalty=1.0, repeat_last_n=2)
    state = chain.begin([3], 0)
    assert state.probs(row)[3] < state.probs(row)[0]
    state.accept(1)
    state.accept(2)  # pushes token 3 out of the window of two
    dense = state.probs(row)
    assert dense[3] == dense[0]
    assert dense[1] == dense[2] < dense[0]


def test_a_draw_depends_on_seed_and_place_alone():
    row = np.random.default_rng(0).normal(size=50).astype(np.float32)
    chain = Chain(temperature=2.0, top_k=0, min_p=0.0, top_p=1.0)

    def text(seed, n=20):
        state, ids = chain.begin([1], seed), []
        for _ in range(n):
            assert state.choose(row.copy()) == state.choose(row.copy())
            ids.append(state.choose(row.copy()))
            state.accept(ids[-1])
        return ids

    assert text(4) == text(4)
    assert text(4) != text(5)
    state = chain.begin([1], 4)
    for token in text(4)[:7]:  # a state made again from the tokens goes on the same
        state.accept(token)
    other = state.fork()
    assert state.choose(row) == text(4)[7]
    state.accept(0)
    assert other.choose(row) == text(4)[7]


def test_draws_have_the_distribution():
    row = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    chain = Chain(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0)
    state, n = chain.begin([], 9), 4000
    counts = np.zeros(4)
    for _ in range(n):
        counts[state.choose(row)] += 1
        state.accept(0)
    expected = n * np.array([0.5, 0.25, 0.15]) / 0.9
    assert counts[3] == 0
    # chi-square with 2 degrees of freedom: 18.4 is passed by chance once in 10,000 seeds
    assert ((counts[:3] - expected) ** 2 / expected).sum() < 18.4


def test_orders_are_written_in_four_ways():
    assert parse_samplers("edskypmxt") == DEFAULT_ORDER
    assert (
        parse_samplers(["top_k", "temp"]) == parse_samplers("top_k; temp") == parse_samplers("kt")
    )
    assert Chain(samplers="top_k").samplers == ("top_k",)
    with pytest.raises(UsageError, match="did you mean 'top_k'"):
        parse_samplers("top_kk;temp")
    with pytest.raises(UsageError, match="at least one"):
        parse_samplers("")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 1.5}, "top_p must be in"),
        ({"repeat_penalty": 0.0}, "repeat_penalty must be in"),
        ({"dry_allowed_length": 0}, "dry_allowed_length"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_wrong_values_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Chain(**options)


def test_every_field_of_the_chain_changes_something():
    """No parameter is parsed and ignored."""
    row = np.random.default_rng(5).normal(0, 1, 60).astype(np.float32)
    row[[1, 2, 3, 9]] += 3.0  # the penalized ones are not cut away
    history = [1, 2, 3, 9, 1, 2, 3, 9, 1, 2]
    base = {"samplers": (*DEFAULT_ORDER, "tfs_z"), "dry_multiplier": 0.05, "repeat_penalty": 1.1,
            "xtc_threshold": 0.04, "dynatemp_range": 0.2}  # fmt: skip
    changed = {
        "samplers": ("temperature",), "temperature": 1.5, "dynatemp_range": 0.6,
        "dynatemp_exponent": 3.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "typical_p": 0.3,
        "tfs_z": 0.2, "top_n_sigma": 0.5, "xtc_probability": 1.0, "xtc_threshold": 0.2,
        "repeat_last_n": 1, "repeat_penalty": 2.0, "frequency_penalty": 1.0,
        "presence_penalty": 1.0, "dry_multiplier": 0.2, "dry_base": 2.0, "dry_allowed_length": 5,
        "dry_penalty_last_n": 1, "dry_breakers": ((2,),), "min_keep": 50,
    }  # fmt: skip
    assert set(changed) == {f.name for f in dataclasses.fields(Chain)}
    for name, value in changed.items():
        start = {**base, "xtc_probability": 1.0} if name == "xtc_threshold" else base
        before = Chain(**start).begin(history, 0).probs(row.copy())
        after = Chain(**{**start, name: value}).begin(history, 0).probs(row.copy())
        assert not np.allclose(before, after, atol=1e-7), name


def test_the_best_are_found_without_sorting_all():
    rng = np.random.default_rng(3)
    for n_vocab in (50, 700, 6000):
        row = np.round(rng.normal(0, 2, n_vocab), 1).astype(np.float32)  # many equal ones
        row[rng.integers(0, n_vocab, n_vocab // 10)] = -np.inf
        order = np.argsort(-row.astype(np.float64), kind="stable")
        p = np.exp(row[order].astype(np.float64))
        sums = np.cumsum(p / p.sum())
        for n in (1, 7, 40, n_vocab):
            fresh, used = Candidates(row.copy()), Candidates(row.copy())
            used.scale(1.0)
            for found in (fresh, used):
                found.first(n)
                assert found.ids.tolist() == [i for i in order[:n] if row[i] > -np.inf]
        for mass in (0.1, 0.5, 0.9, 0.9999):
            found = Candidates(row.copy())
            found.reaching(mass)
            assert found.ids.tolist() == order[: int((sums < mass).sum()) + 1].tolist()


def test_rows_without_a_distribution_are_refused():
    for row in ([np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]):
        with pytest.raises(UsageError, match="no token can be sampled"):
            Candidates(np.array(row, np.float32))
