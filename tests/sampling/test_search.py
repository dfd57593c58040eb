"""Beam and contrastive search against brute force; n-gram proposer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from nbflow.engine.search.beam import Beams, BeamSearch
from nbflow.engine.search.contrastive import ContrastiveSearch, History
from nbflow.engine.speculative.ngram import NgramProposer
from nbflow_kernels.errors import UsageError

V, END = 5, 0


def markov(seed, n=6):
    """Log-probabilities by position, last token and token."""
    logits = np.random.default_rng(seed).normal(0, 1.5, (n, V, V))
    return logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))


def search(table, max_tokens, end_ids=(END,), **options):
    beams = Beams(BeamSearch(**options), max_tokens, end_ids)
    n_steps = 0
    while not beams.done:
        beams.advance(np.array([table[len(h.ids), (1, *h.ids)[-1]] for h in beams.running]))
        assert len(beams.running) <= beams.search.num_beams
        n_steps += 1
    return beams.finished, n_steps


def everything(table, max_tokens, length_penalty):
    found = []
    for length in range(1, max_tokens + 1):
        for ids in itertools.product(range(V), repeat=length):
            whole = ids[-1] == END or length == max_tokens
            if whole and END not in ids[:-1]:
                places = zip(range(length), (1, *ids), ids, strict=False)
                found.append((sum(table[p] for p in places) / length**length_penalty, ids))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_enough_beams_find_the_best(length_penalty):
    for seed in range(4):
        table = markov(seed)
        expected = everything(table, 4, length_penalty)[:7]
        # 4**3 sequences without an end, and their continuations
        found, _ = search(
            table, 4, num_beams=400, length_penalty=length_penalty, early_stopping="never"
        )
        np.testing.assert_allclose([h.score for h in found[:7]], [s for s, _ in expected])
        assert [h.ids for h in found[:7]] == [ids for _, ids in expected]


def test_one_beam_is_greedy():
    table = markov(3)
    table[:, :, END] = -np.inf
    (best, *_), _ = search(table, 6, num_beams=1, length_penalty=0.0)
    expected, last = [], 1
    for n in range(6):
        expected.append(int(table[n, last].argmax()))
        last = expected[-1]
    assert list(best.ids) == expected
    assert best.score == pytest.approx(sum(best.logprobs))


def test_when_the_search_ends():
    # an end is always the second best: two beams have two ends after two steps
    table = np.log(np.tile([0.3, 0.35, 0.1, 0.1, 0.15], (30, V, 1)))
    _, early = search(table, 30, num_beams=2, early_stopping=True, length_penalty=1.0)
    _, plain = search(table, 30, num_beams=2, early_stopping=False, length_penalty=0.0)
    _, never = search(table, 30, num_beams=2, early_stopping="never", length_penalty=2.0)
    assert early == 2
    assert early <= plain < 10 < never == 30


def test_wrong_parameters_are_refused():
    for options in ({"num_beams": 0}, {"early_stopping": "always"}, {"length_penalty": 1e9}):
        with pytest.raises(UsageError):
            BeamSearch(**options)
    with pytest.raises(UsageError, match="penalty_alpha"):
        ContrastiveSearch(penalty_alpha=2.0)


def test_contrastive_by_hand():
    before = np.array([[1.0, 0.0], [0.0, 2.0]])
    hidden = np.array([[3.0, 0.0], [1.0, 1.0], [-1.0, -1.0]])  # likeness 1, .7071, -.7071
    probs = np.array([0.6, 0.3, 0.1])
    history = History()
    for row in before:
        history.add(row[None])
    similarity = history.similarity(hidden)
    np.testing.assert_allclose(similarity, [1.0, 0.5**0.5, -(0.5**0.5)], rtol=1e-6)  # float32
    assert ContrastiveSearch(penalty_alpha=0.0).choose(probs, similarity) == 0
    # .54 - .1, .27 - .0707, .09 + .0707
    assert ContrastiveSearch(penalty_alpha=0.1).choose(probs, similarity) == 0
    # .24 - .6, .12 - .424, .04 + .424
    assert ContrastiveSearch(penalty_alpha=0.6).choose(probs, similarity) == 2
    assert ContrastiveSearch(penalty_alpha=0.6).choose(probs[:2], similarity[:2]) == 1
    history.take(1)
    np.testing.assert_allclose(history.similarity(hidden), [1.0, 1.0, -(0.5**0.5)], rtol=1e-6)
    for _ in range(200):  # beyond the room it began with
        history.add(hidden[2:])
    assert len(history) == 203
    np.testing.assert_allclose(history.similarity(-hidden[:1]), [0.5**0.5], rtol=1e-6)


def naive_ngram(ids, n, min_n, max_n):
    for size in range(max_n, min_n - 1, -1):
        if size < len(ids):
            for end in range(len(ids) - 1, size - 1, -1):
                if ids[end - size : end] == ids[len(ids) - size :]:
                    return ids[end : end + n]
    return []


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 3), (2, 4), (3, 3)])
def test_ngram_proposals(min_n, max_n):
    rng = np.random.default_rng(4)
    for _ in range(20):
        text, propose, length = rng.integers(0, 4, 60).tolist(), NgramProposer(min_n, max_n), 0
        while length < len(text):
            length += int(rng.integers(1, 6))
            ids = text[:length]
            assert propose(ids, 3) == naive_ngram(ids, 3, min_n, max_n)
        assert propose(text[:9], 3) == naive_ngram(text[:9], 3, min_n, max_n)  # another text
    with pytest.raises(UsageError, match="min_n"):
        NgramProposer(3, 2)
