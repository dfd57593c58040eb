"""Inferflow's strategies against results worked out by hand and against the kernels."""

from __future__ import annotations

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow.compat.inferflow.fsd import NgramModel
from nbflow.compat.inferflow.java_random import JavaRandom
from nbflow.compat.inferflow.strategies import INFERFLOW
from nbflow_kernels.errors import UsageError

P = np.array([0.4, 0.2, 0.15, 0.1, 0.06, 0.04, 0.03, 0.01, 0.006, 0.004])


def row(p=P, n_vocab=None):
    logits = np.full(n_vocab or len(p), -50.0, np.float32)
    logits[: len(p)] = np.log(p)
    return logits


def kept(name, logits, prompt=(), **options):
    state = INFERFLOW[name](**options).begin(prompt, 1)
    return np.flatnonzero(state.probs(logits)).tolist()


def test_java_random():
    # published outputs of new Random(seed).nextDouble()
    java = JavaRandom(42)
    assert [java.next_double() for _ in range(3)] == [
        0.7275636800328681, 0.6832234717598454, 0.30871945533265976,
    ]  # fmt: skip
    assert JavaRandom(0).next_double() == 0.730967787376657
    # nextInt is the upper 32 bits as a signed number
    assert JavaRandom(42).next(32) == -1170105035 % 2**32


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("greedy", {}, [0]),
        ("top_k", {}, list(range(8))),
        ("top_k", {"max_k": 3}, [0, 1, 2]),
        ("top_p", {}, list(range(5))),  # .4 .6 .75 .85 .91
        ("top_p", {"top_p": 0.995}, list(range(8))),  # at most max_k
        ("top_p", {"top_p": 0.995, "max_k": 20}, list(range(9))),  # .99 .996
        ("std", {}, list(range(5))),
        ("auto", {}, list(range(8))),
        ("min_p", {}, list(range(7))),  # 0.05 * 0.4 = 0.02
        ("min_p", {"min_p": 0.49}, [0, 1]),
    ],
)
def test_what_is_kept(name, options, expected):
    assert kept(name, row(), **options) == expected


def test_temperature_comes_before_truncation():
    # halving the logits takes square roots: .63 .45 .39 .32 .24 .2 .17 .1 .08 .06 of 2.64; the
    # best four have mass .68, the best five .77
    assert kept("top_p", row(), temperature=2.0, top_p=0.7) == list(range(5))
    assert kept("top_p", row(), temperature=0.0) == [0]  # 0.001 at least


def test_the_pool_bounds_what_has_mass():
    flat = np.zeros(200, np.float32)
    assert kept("min_p", flat) == list(range(50))  # the lower id among equals
    # 0.9 of the mass of the pool of 50, not of the 200 tokens
    assert len(kept("top_p", flat, max_k=200)) == 45
    assert len(kept("top_p", flat, max_k=200, pool_size=100)) == 90


def test_tail_free_leaves_out_the_first_bend():
    rng = np.random.default_rng(2)
    for z in (0.3, 0.7, 0.95):
        logits = rng.normal(0, 2, 40).astype(np.float32)
        p = nk.softmax(logits[None])
        expected = np.flatnonzero(nk.tail_free_renorm_probs(p, z, first_counts=False)[0])
        assert kept("tfs", logits, z=z) == expected.tolist()
    assert kept("tfs", row(np.array([0.6, 0.4]))) == [0, 1]  # no bends: all are kept


def test_typical_keeps_one_and_then_counts():
    # the entropy is 1.0397; surprises .693, 1.386, 1.386: distances .347 each, the first by a hair
    logits = row(np.array([0.5, 0.25, 0.25]))
    assert kept("typical", logits, p=0.2) == [0, 1] or kept("typical", logits, p=0.2) == [1, 2]
    # distances from 1.2799: .587, .093, .329, 1.0227; without the first one's 0.3 the masses that
    # follow are .5 and .65
    logits = row(np.array([0.5, 0.3, 0.15, 0.05]))
    surprise = -np.log([0.5, 0.3, 0.15, 0.05])
    order = np.argsort(np.abs(surprise - (np.exp(-surprise) * surprise).sum()))
    assert order[0] == 1
    assert kept("typical", logits, p=0.1) == sorted(order[:2].tolist())
    assert kept("typical", logits, p=0.95) == [0, 1, 2, 3]


def test_mirostat_follows_the_surprise():
    state = INFERFLOW["mirostat"](tau=1.5, eta=0.3).begin([], 7)
    mu, seen = 3.0, []
    for _ in range(20):
        bits = -np.log2(P)
        within = max(1, int((bits <= mu).sum()))
        seen.append(within)
        assert np.flatnonzero(state.probs(row())).tolist() == list(range(within))
        token = state.choose(row())
        state.accept(token)
        mu -= 0.3 * (-np.log2(P[token] / P[:within].sum()) - 1.5)
        assert state.mu == pytest.approx(mu, abs=1e-5)  # float32 logits
    assert len(set(seen)) > 1


def test_ngram_penalty_by_hand():
    model = NgramModel(3, 0.9)
    model.extend([7])
    assert model.penalty(7) == 0.0  # shorter than n - 1
    model.extend([8, 9, 7, 8])
    # context (7, 8): 9 once of 1; (8): 9 once of 1; (): 9 once of 5
    expected = 0.9 * 1 / 2 + 0.1 * 0.9 * 1 / 2 + 0.01 * 1 / 5
    assert model.penalty(9) == pytest.approx(expected, rel=1e-12)
    # 7 is known only by itself, twice of 5, with nothing taken away by longer contexts
    assert model.penalty(7) == pytest.approx(2 / 5, rel=1e-12)
    assert model.penalty(3) == 0.0


def test_fsd_avoids_what_the_text_expects():
    logits = row(np.array([0.5, 0.4, 0.1]), 10)
    fsd = INFERFLOW["fsd"]
    assert fsd().begin([4, 5], 0).choose(logits) == 0
    # after (1, 2) came 0 twice: .5 * .5 - .5 * pen < .5 * .4
    state = fsd().begin([1, 2, 0, 1, 2, 0, 1, 2], 0)
    assert state.choose(logits) == 1
    state.accept(1)
    assert fsd(alpha=0.0).begin([1, 2, 0, 1, 2, 0, 1, 2], 0).choose(logits) == 0
    # the sixth best is compared, the seventh is not
    assert kept("fsd", row(), prompt=[0, 1] * 9, alpha=1.0, k=2) in ([0], [1])


def test_random_fsd_tosses_for_ten_tokens():
    logits = row()
    sampled = 0
    for seed in range(60):
        state, plain = INFERFLOW["random_fsd"]().begin([], seed), INFERFLOW["fsd"]().begin([], 0)
        for n in range(14):
            token = state.choose(logits)
            assert token == state.choose(logits)
            if n >= 10:
                assert token == plain.choose(logits)
            elif token != plain.choose(logits):
                sampled += 1
            state.accept(token)
            plain.accept(token)
    # at least: half of 600 are drawn, and the best token is among them less than half of the time
    assert 100 < sampled < 300


def test_eos_is_passed_over_as_often_as_allowed():
    std = INFERFLOW["std"](eos_ids=(0,), eos_bypassing_max=2, top_p=0.5, max_k=2)
    state, drawn = std.begin([], 3), []
    for _ in range(40):
        drawn.append(state.choose(row()))
        state.accept(drawn[-1])
    first = drawn.index(0)
    plain = INFERFLOW["std"](top_p=0.5, max_k=2).begin([], 3)
    expected = []
    for _ in range(40):
        expected.append(plain.choose(row()))
        plain.accept(expected[-1])
    ends = [i for i, token in enumerate(expected) if token == 0]
    assert first == ends[2]  # two ends were replaced by the other token
    assert drawn[ends[0]] == drawn[ends[1]] == 1
    alone = INFERFLOW["std"](eos_ids=(0,), eos_bypassing_max=9, max_k=1).begin([], 3)
    assert alone.choose(row()) == 0  # nothing else may be drawn


def test_draws_are_java_numbers_on_falling_probabilities():
    state, java = INFERFLOW["top_k"](max_k=8).begin([], 12), JavaRandom(12)
    shuffled = np.random.default_rng(1).permutation(10)
    logits = np.empty(10, np.float32)
    logits[shuffled] = row()
    sums = np.cumsum(P[:8])
    for _ in range(50):
        expected = shuffled[np.searchsorted(sums, java.next_double() * sums[-1], side="right")]
        assert state.choose(logits) == expected
        state.accept(int(expected))


def test_replaying_tokens_passes_over_their_numbers():
    for name in ("top_p", "random_fsd", "fsd"):
        strategy = INFERFLOW[name]()
        state, ids = strategy.begin([3], 5), []
        for _ in range(15):
            ids.append(state.choose(row()))
            state.accept(ids[-1])
        again = strategy.begin([3], 5)
        for token in ids[:8]:
            again.accept(token)
        for token in ids[8:]:
            assert again.choose(row()) == token
            again.accept(token)


def test_wrong_values_are_refused():
    with pytest.raises(UsageError, match="max_k must be in"):
        INFERFLOW["top_k"](max_k=0)
    with pytest.raises(UsageError, match="alpha must be in"):
        INFERFLOW["fsd"](alpha=2.0)
