from __future__ import annotations

import math

import numpy as np
import pytest

from nbflow_experiments.measures.evaluation import make_windows
from nbflow_experiments.scoring.estimates import estimate_mean, estimate_perplexity, estimate_share
from nbflow_kernels.errors import UsageError

# Both sides are float64 sums of at most a few hundred terms: about sqrt(300) * 2**-53 = 2e-15.
RTOL = 1e-12


def test_perplexity_and_its_error_by_the_formula() -> None:
    nll = np.random.default_rng(0).gamma(2.0, 1.5, 300)
    found = estimate_perplexity(nll)
    mean = nll.sum() / 300
    variance = ((nll - mean) ** 2).sum() / 299
    assert found.n == 300
    assert found.mean == pytest.approx(math.exp(mean), rel=RTOL)
    assert found.stderr == pytest.approx(math.exp(mean) * math.sqrt(variance / 300), rel=RTOL)


def test_standard_error_is_the_spread_of_repeated_experiments() -> None:
    rng = np.random.default_rng(1)
    found = [estimate_perplexity(rng.normal(2, 0.5, 400)) for _ in range(400)]
    spread = np.std([f.mean for f in found], ddof=1)
    # The spread of 400 values is itself known to 1 / sqrt(2 * 400) = 3.5 %: four of these.
    assert np.mean([f.stderr for f in found]) == pytest.approx(spread, rel=0.14)


def test_small_spread_around_a_large_mean_is_kept() -> None:
    x = 1e9 + np.array([0.0, 1.0, 2.0])
    assert estimate_mean(x).stderr == pytest.approx(1 / math.sqrt(3), rel=1e-6)


def test_share() -> None:
    found = estimate_share(np.array([True, True, False, True]))
    assert found.mean == 0.75
    assert found.stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 4), rel=RTOL)


def test_nothing_is_dropped() -> None:
    assert math.isnan(estimate_mean(np.array([1.0, np.nan])).mean)
    assert math.isnan(estimate_mean(np.array([1.0])).stderr)
    assert math.isnan(estimate_mean(np.array([])).mean)
    assert estimate_perplexity(np.array([1000.0, 1000.0])).mean == math.inf


def test_windows() -> None:
    ids = np.arange(103)
    np.testing.assert_array_equal(make_windows(ids, 100, 10, 0), np.arange(100).reshape(10, 10))
    some = make_windows(ids, 35, 10, 0)
    assert some.shape == (3, 10)
    assert all(row[0] % 10 == 0 and list(row) == list(range(row[0], row[0] + 10)) for row in some)
    assert list(some[:, 0]) == sorted(some[:, 0])
    np.testing.assert_array_equal(some, make_windows(ids, 35, 10, 0))
    chosen = {tuple(make_windows(ids, 35, 10, seed)[:, 0]) for seed in range(8)}
    assert len(chosen) > 1
    with pytest.raises(UsageError, match=r"asks for 11 windows of 10 tokens, .* 103 tokens"):
        make_windows(ids, 110, 10, 0)
