"""Histograms of weights and relative errors, and weight statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHUNK_WEIGHTS = 1 << 20
"""Weights per chunk: about 80 MB of float64 arrays."""
OUTLIER = 4.0
"""A weight counts as an outlier from this multiple of the tensor's root mean square on."""
DENSITY_BINS = 1024
"""Bins between the least and the largest weight for the differential entropy."""
RELATIVE_EDGES = np.concatenate([[0.0], np.logspace(-6, 1, 141), [np.inf]])
"""Edges of the histograms of relative errors: 20 bins a decade from 1e-6 to 10, and beyond."""
SCALED_EDGES = np.concatenate([[-np.inf], np.linspace(-8, 8, 161), [np.inf]])
"""Edges of the histograms of weights in units of their root mean square."""

Float64Array = NDArray[np.float64]
Counts = NDArray[np.int64]


def row_chunks(array: NDArray[np.float32]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) rows of chunks of at most `CHUNK_WEIGHTS` weights, at least one row."""
    step = max(1, CHUNK_WEIGHTS // array.shape[1])
    for start in range(0, len(array), step):
        yield start, min(start + step, len(array))


def relative_counts(ratios: Float64Array) -> Counts:
    """Return the histogram of ratios over `RELATIVE_EDGES`."""
    with np.errstate(divide="ignore"):
        bins = np.floor((np.log10(ratios.ravel()) + 6) * 20) + 1
    return _counts(bins, len(RELATIVE_EDGES) - 1)


def scaled_counts(scaled: Float64Array) -> Counts:
    """Return the histogram of numbers over `SCALED_EDGES`."""
    return _counts(np.floor((scaled.ravel() + 8) * 10) + 1, len(SCALED_EDGES) - 1)


def _counts(bins: Float64Array, n_bins: int) -> Counts:
    found = np.bincount(np.clip(bins, 0, n_bins - 1).astype(np.int64), minlength=n_bins)
    return found.astype(np.int64)


@dataclass(frozen=True)
class Spread:
    """Distribution of relative errors over a tensor's rows, columns or blocks."""

    counts: Counts
    """Number of groups between two `RELATIVE_EDGES`."""
    median: float
    largest: float
    worst: int
    """Index of the group with the largest error."""

    @classmethod
    def of(cls, ratios: Float64Array) -> Spread:
        """Summarise the error ratios of the groups."""
        worst = int(np.argmax(ratios))
        return cls(relative_counts(ratios), float(np.median(ratios)), float(ratios[worst]), worst)


@dataclass(frozen=True)
class Weights:
    """Statistics of a tensor's weights, independent of the format."""

    rms: float
    std: float
    kurtosis: float
    """Fourth central moment over the squared variance, minus 3: 0 for normal weights."""
    outlier_share: float
    """Share of weights of at least `OUTLIER` times `rms`."""
    density_bits: float
    """Differential entropy, in bits: of a histogram of `DENSITY_BINS` bins."""
    counts: Counts
    """Histogram of the weights over `rms`, between `SCALED_EDGES`."""

    @classmethod
    def of(cls, exact: NDArray[np.float32]) -> Weights:
        """Compute statistics of a tensor (N, K) in two passes, to avoid cancellation."""
        n = exact.size
        total = squares = 0.0
        for start, stop in row_chunks(exact):
            values = exact[start:stop].astype(np.float64)
            total, squares = total + float(values.sum()), squares + float(np.square(values).sum())
        mean, rms = total / n, math.sqrt(squares / n)
        low, high = float(exact.min()), float(exact.max())
        second = fourth = 0.0
        beyond = 0
        counts = np.zeros(len(SCALED_EDGES) - 1, np.int64)
        density = np.zeros(DENSITY_BINS, np.int64)
        for start, stop in row_chunks(exact):
            values = exact[start:stop].astype(np.float64)
            centred = np.square(values - mean)
            second, fourth = second + float(centred.sum()), fourth + float(np.square(centred).sum())
            if rms:
                beyond += int(np.count_nonzero(np.abs(values) >= OUTLIER * rms))
                counts += scaled_counts(values / rms)
            if high > low:
                density += np.histogram(values, DENSITY_BINS, (low, high))[0]
        variance = second / n
        return cls(
            rms,
            math.sqrt(variance),
            fourth / n / variance**2 - 3 if variance else math.nan,
            beyond / n,
            _density_bits(density, (high - low) / DENSITY_BINS),
            counts,
        )


def _density_bits(counts: Counts, width: float) -> float:
    """Return the differential entropy of a histogram, with the Miller-Madow correction."""
    n = int(counts.sum())
    if n == 0:  # all weights are the same
        return -math.inf
    share = counts[counts > 0] / n
    bias = (len(share) - 1) / (2 * n * math.log(2))
    return float(-np.sum(share * np.log2(share))) + bias + math.log2(width)
