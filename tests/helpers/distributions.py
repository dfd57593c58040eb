"""Draws of the sampling tests and their comparison with probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np

N_DRAWS = 20_000


def some_probs(seed: int = 0) -> np.ndarray:
    probs = np.random.default_rng(seed).dirichlet(np.full(40, 0.3)).astype(np.float32)
    probs[::7] = 0.0
    return probs[None]


def draws(op: Any, probs: np.ndarray, *filters: Any, **options: Any) -> np.ndarray:
    zeros = np.zeros(N_DRAWS, np.int32)
    result: np.ndarray = op(probs, *filters, seed=42, indices=zeros, **options)
    return result


def check_frequencies(tokens: np.ndarray, wanted: np.ndarray) -> None:
    """Compare counts with probabilities by chi-square, false alarm 1e-4; the seed is fixed."""
    counts = np.bincount(tokens, minlength=len(wanted))
    assert not counts[wanted == 0].any(), "a token outside the allowed set was drawn"
    likely = wanted * len(tokens) >= 5  # the approximation needs expected counts of 5
    expected = np.append(wanted[likely], wanted[~likely].sum()) * len(tokens)
    observed = np.append(counts[likely], counts[~likely].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    df = max(len(expected) - 1, 1)
    # Wilson-Hilferty quantile of chi-square at 1 - 1e-4 (normal quantile 3.72)
    limit = df * (1 - 2 / (9 * df) + 3.72 * np.sqrt(2 / (9 * df))) ** 3
    assert statistic < limit
