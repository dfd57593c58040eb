"""The formulas behind the quality measures, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    """Mean of the observations."""
    stderr: float
    """Sample standard deviation / sqrt(n); NaN for fewer than two observations."""
    n: int
    """Number of observations."""


def estimate_mean(x: np.ndarray) -> Estimate:
    """Return mean and standard error of independent observations `x` (n,).

    Two passes, so that a small spread around a large mean is not lost.  Not a number in, not a
    number out: nothing is dropped.
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
    perplexity = math.exp(nats.mean) if nats.mean < 700 else math.inf
    return Estimate(perplexity, perplexity * nats.stderr, nats.n)


def estimate_share(hits: np.ndarray) -> Estimate:
    """Return the share of true entries, with the binomial standard error sqrt(p (1 - p) / n)."""
    n = int(hits.size)
    share = float(np.count_nonzero(hits)) / n if n else math.nan
    return Estimate(share, math.sqrt(share * (1.0 - share) / n) if n else math.nan, n)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log probabilities, float64 (T, V), of `logits` (T, V)."""
    x = np.asarray(logits, np.float64)
    with np.errstate(invalid="ignore"):
        x = x - np.max(x, axis=-1, keepdims=True)
        shifted: np.ndarray = x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))
    return shifted


def negative_log_likelihood(log_p: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return -log p of each target, in nats (T,); `log_p` (T, V), `targets` (T,)."""
    picked: np.ndarray = -log_p[np.arange(len(targets)), targets]
    return picked


def kl_divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Return KL(p || q) of each row in nats (T,), `p` being the reference; both (T, V).

    Rounding can make the sum of an all but equal pair slightly negative; it is not clipped.
    """
    with np.errstate(invalid="ignore"):
        p = np.exp(log_p)
        # A probability of 0 contributes 0, even where its logarithm is -inf.
        terms: np.ndarray = np.where(p > 0, p * (log_p - log_q), 0.0)
        total: np.ndarray = np.where(np.isnan(p).any(axis=-1), np.nan, terms.sum(axis=-1))
    return total
