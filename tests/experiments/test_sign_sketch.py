"""The sign sketch of residuals of keys: unbiased, and what its variance costs."""

from __future__ import annotations

import numpy as np
import pytest

from nbflow_experiments.analysis.sign_sketch import sketch_errors
from nbflow_kernels.errors import UsageError


def test_scores_are_unbiased_over_projections() -> None:
    q, k, v = np.random.default_rng(1).standard_normal((3, 64, 64))
    plain = sketch_errors(q, k, v, "lm2")
    found = [sketch_errors(q, k, v, "lm2", signs=64, seed=i).slope for i in range(40)]
    # least squares shrinks scores by the relative squared error of the keys, 0.11
    assert 0.86 < plain.slope < 0.92
    standard_error = np.std(found, ddof=1) / np.sqrt(len(found))
    assert abs(np.mean(found) - 1) < 4 * standard_error
    assert standard_error < 0.005


def test_error_falls_with_the_root_of_the_signs() -> None:
    q, k, v = np.random.default_rng(1).standard_normal((3, 200, 64))
    few, many = (sketch_errors(q, k, v, "lm2", signs=n).score_error for n in (64, 1024))
    assert few / many == pytest.approx(4, rel=0.15)


def test_bits_count_signs_and_length() -> None:
    x = np.random.default_rng(1).standard_normal((4, 64))
    assert sketch_errors(x, x, x, "lm3", signs=32).bits == 3.5 + 0.5 + 16 / 64
    with pytest.raises(UsageError, match="signs must not be negative, got -1"):
        sketch_errors(x, x, x, "lm3", signs=-1)
