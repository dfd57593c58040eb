"""Estimators of the quality measures, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    stderr: float
    """Sample standard deviation / sqrt(n); NaN for fewer than two observations."""
    n: int


def estimate_mean(x: np.ndarray) -> Estimate:
    """Return mean and standard error of independent observations `x` (n,).

    Two passes, to avoid cancellation for a small spread around a large mean.  NaN propagates.
    """
    x = np.asarray(x, np.float64)
    n = int(x.size)
    if n == 0:
        return Estimate(math.nan, math.nan, 0)
    with np.errstate(invalid="ignore"):
        mean = float(np.mean(x))
        spread = float(np.std(x, ddof=1)) if n > 1 else math.nan
    return Estimate(mean, spread / math.sqrt(n), n)


def estimate_perplexity(nll: np.ndarray) -> Estimate:
    """Return exp(mean) of negative log likelihoods in nats, with the standard error of that.

    The error goes through the exponential to first order (delta method): the perplexity times the
    standard error of the mean.

    Examples
    --------
    >>> import numpy as np
    >>> round(estimate_perplexity(np.log([2.0, 8.0])).mean, 6)
    4.0
    """
    nats = estimate_mean(nll)
    perplexity = math.inf if nats.mean >= 700 else math.exp(nats.mean)
    return Estimate(perplexity, perplexity * nats.stderr, nats.n)


def estimate_share(hits: np.ndarray) -> Estimate:
    """Return the share of true entries, with the binomial standard error sqrt(p (1 - p) / n)."""
    n = int(hits.size)
    share = float(np.count_nonzero(hits)) / n if n else math.nan
    return Estimate(share, math.sqrt(share * (1.0 - share) / n) if n else math.nan, n)
