"""Timing of batches: decode steps from planted times of tokens, and from partitions of a model."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import nbflow
from nbflow.benchmark.timing import Test, Times, time_both, time_test, times_of


def even(first: float, step_s: float, n: int) -> list[float]:
    return [first + i * step_s for i in range(n)]


@pytest.mark.parametrize(
    ("replicas", "wanted"),
    [
        # one rank: all sequences in every step
        ([[even(3.0, 0.5, 5)] * 4], Times(3.0, 2.0, 0.5)),
        # prompts one after the other, in steps of 2; the early sequences decode along.  All decode
        # from 3 on, in steps of 1, until the first has its last token at 6.
        (
            [[[1.0, 3.0, 4.0, 5.0, 6.0], [3.0, 4.0, 5.0, 6.0, 7.0], [3.0, 4.0, 5.0, 6.0, 7.0]]],
            Times(3.0, 4.0, 1.0),
        ),
        # a pipeline of two stages of 1 s: two groups take turns, each has a token every 2 s
        ([[even(2.0, 2.0, 6), even(2.0, 2.0, 6), even(3.0, 2.0, 6)]], Times(3.0, 10.0, 2.0)),
        # replicas: the second is slower, and starts later
        ([[even(1.0, 0.25, 9)] * 2, [even(1.6, 0.5, 9)]], Times(1.6, 4.0, 0.5)),
        # never all at once
        ([[[1.0, 2.0], [2.0, 3.0]]], Times(2.0, 1.0, math.nan)),
    ],
)
def test_decode_steps_are_those_in_which_all_sequences_decode(replicas, wanted):
    found = times_of(replicas)
    np.testing.assert_allclose(
        (found.prefill_s, found.rest_s, found.step_s),
        (wanted.prefill_s, wanted.rest_s, wanted.step_s),
        rtol=1e-12,  # sums of a dozen numbers
    )


@pytest.mark.parametrize("partition", ["0", "0;1", "0&1", "0/1"])
def test_every_token_of_a_partition_is_timed(partition, monkeypatch):
    """The times of all sequences increase, and begin after the first step."""
    seen: list[list[list[float]]] = []

    def keep(replicas):
        seen.append(replicas)
        return times_of(replicas)

    monkeypatch.setattr("nbflow.benchmark.timing.times_of", keep)
    with nbflow.load("tiny_python", partition=partition, threads=1, max_context=64) as model:
        found = time_both(model, 6, 5, 4)
        assert time_test(model, Test(0, 3, 2, depth=4)) > 0
        assert model.gather("token_times")[0]["times"] == []  # recording has stopped
    replicas = seen[0]
    assert [len(replica) for replica in replicas] == ([2, 2] if partition == "0/1" else [4])
    for times in (t for replica in replicas for t in replica):
        assert len(times) == 6
        assert times[0] > 0
        assert all(b > a for a, b in itertools.pairwise(times))
    assert found.prefill_s > 0
    assert found.rest_s > 0


def test_only_the_first_repetition_fills_the_cache():
    """Tokens before generation are computed once; timed prompts every time."""
    with nbflow.load("tiny_python", threads=1, max_context=64) as model:
        deep, hits = Test(0, 3, 2, depth=20), []
        for test in (deep, deep, Test(20, 3, 2), Test(20, 3, 2)):
            time_test(model, test)
            hits.append(model.workers[0].table.hit_tokens)
    assert hits == [0, 2 * 19, 0, 0]  # the last token of a prompt is always computed
