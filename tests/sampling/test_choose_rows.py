"""Rows of several strategies in shared launches get the tokens that each gets alone."""

from __future__ import annotations

import numpy as np
import pytest

from nbflow.sampling import make_strategy
from nbflow.sampling.strategy import choose_rows
from nbflow_kernels.errors import UsageError

STRATEGIES = [
    make_strategy("greedy"),
    make_strategy("sample", temperature=0.7),
    make_strategy("filters", temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    make_strategy("top_k", top_k=3),
    make_strategy("top_p", temperature=0.9, top_p=0.5),
    make_strategy("filters", temperature=1.3, top_k=0, top_p=0.9),
    make_strategy("greedy"),
    make_strategy("min_p", temperature=3.0, min_p=0.3),
]


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def logits(rng):
    return rng.standard_normal((11, 700), dtype=np.float32) * 3


def test_each_row_gets_the_token_of_its_strategy_alone(logits, rng):
    rows = [0, 1, 3, 4, 6, 7, 8, 10]
    before, n = logits.copy(), len(rows)
    seen = set()
    for offset in range(12):
        seeds = rng.integers(0, 2**60, n).astype(np.uint64)
        offsets = np.arange(offset, offset + n, dtype=np.uint64)
        found = choose_rows(STRATEGIES, logits, rows, seeds, offsets)
        for i, (row, strategy) in enumerate(zip(rows, STRATEGIES, strict=True)):
            alone = strategy.choose(logits[[row]], seeds[[i]], offsets[[i]])
            assert found[i] == alone[0]
        seen.add(tuple(found))
    assert np.array_equal(logits, before)
    assert len(seen) > 6  # the draws differ


def test_a_row_without_a_distribution_is_refused(logits):
    logits[6, 5] = np.nan
    two, streams = [STRATEGIES[1], STRATEGIES[2]], np.zeros(2, np.uint64)
    assert len(choose_rows(two, logits, [5, 7], streams, streams)) == 2
    with pytest.raises(UsageError, match="NaN or an infinity"):
        choose_rows(two, logits, [5, 6], streams, streams)
