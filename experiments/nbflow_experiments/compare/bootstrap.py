"""Intervals by resampling.

Per-token metrics are compared in pairs, which cancels the difficulty of the text.  Windows are
resampled, not tokens, because neighbouring tokens are correlated.  Repetitions of a time are not
paired.  Percentile intervals, with a fixed seed.

Source: B. Efron and R. J. Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 13 and 16;
for paired tests of models P. Koehn, "Statistical Significance Tests for Machine Translation
Evaluation", EMNLP 2004.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
SEED = 0
_AT_ONCE = 2**22
"""Elements of one array of resamples."""


@dataclass(frozen=True)
class Interval:
    """A change from one side to the other."""

    a: float
    b: float
    low: float
    """Lower end of the interval of the change; NaN without repetitions."""
    high: float
    """Its upper end."""
    ratio: bool
    """True: the change is b / a; else it is b - a."""
    n: int
    """Number of windows, or repetitions of the side with fewer, that were resampled."""

    @property
    def change(self) -> float:
        """Return the change itself."""
        return self.b / self.a if self.ratio else self.b - self.a

    @property
    def is_clear(self) -> bool:
        """Return whether the interval excludes "no change"."""
        nothing = 1.0 if self.ratio else 0.0
        return bool(self.low > nothing or self.high < nothing)


def paired(
    a: np.ndarray,
    b: np.ndarray,
    window: int,
    transform: Callable[[np.ndarray], np.ndarray] = lambda mean: mean,
) -> Interval:
    """Return the change of a mean over tokens, or of a function of it.

    Parameters
    ----------
    a, b : arrays, shape (n,)
        Per-token values of both sides.
    window : int
        Tokens per window, resampled together.
    transform : callable
        Function of the mean, e.g. `numpy.exp` for perplexities.
    """
    starts = np.arange(0, len(a), window)
    sums = np.stack([np.add.reduceat(x.astype(np.float64), starts) for x in (a, b)])
    sizes = np.diff([*starts, len(a)]).astype(np.float64)
    rng = np.random.default_rng(SEED)
    n = len(starts)
    changes = []
    step = max(1, _AT_ONCE // n)
    for first in range(0, RESAMPLES, step):
        draws = min(step, RESAMPLES - first)
        counts = rng.multinomial(n, np.full(n, 1 / n), size=draws).astype(np.float64)
        means = (counts @ sums.T) / (counts @ sizes)[:, None]
        both = transform(means)
        changes.append(both[:, 1] - both[:, 0])
    low, high = _ends(np.concatenate(changes)) if n > 1 else (np.nan, np.nan)
    now = transform(np.array([a.mean(), b.mean()]))
    return Interval(float(now[0]), float(now[1]), low, high, ratio=False, n=n)


def unpaired(a: np.ndarray, b: np.ndarray) -> Interval:
    """Return the ratio of the medians of two sets of repetitions."""
    rng = np.random.default_rng(SEED)
    low = high = np.nan
    n = min(len(a), len(b))
    if n > 1:
        drawn = [np.median(rng.choice(x, (RESAMPLES, len(x))), axis=1) for x in (a, b)]
        low, high = _ends(drawn[1] / drawn[0])
    return Interval(float(np.median(a)), float(np.median(b)), low, high, ratio=True, n=n)


def _ends(changes: np.ndarray) -> tuple[float, float]:
    """Return the ends of the 95 % interval."""
    low, high = np.percentile(changes, [2.5, 97.5])
    return float(low), float(high)
