"""Comparison of paired points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow_experiments.compare.bootstrap import Interval, paired, unpaired
from nbflow_experiments.compare.selection import Side, matching
from nbflow_experiments.settings import SETTINGS
from nbflow_kernels.errors import unknown_name

PER_TOKEN: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "perplexity": ("nll_nats", np.exp),
    "kld_mean_nats": ("kld_nats", np.asarray),
}
"""Metrics that are a function of a mean over tokens: the array, and the function."""


@dataclass(frozen=True)
class Comparison:
    """One metric of a pair of points."""

    label: dict[str, Any]
    """The settings in which pairs differ from each other."""
    metric: str
    interval: Interval
    """Both values and the interval of the change."""
    basis: str
    """Resampled units: ``windows``, ``repetitions``, or ``-`` without an interval."""


def compare(a: Side, b: Side, metrics: Sequence[str] = ()) -> list[Comparison]:
    """Compare all pairs of points.

    Parameters
    ----------
    a, b : Side
        Both sides.
    metrics : sequence of str
        Metrics to compare; by default all that both sides have.
    """
    pairs = matching(a, b)
    varying = [
        name
        for name in SETTINGS
        if name not in a.fixed and name not in b.fixed and len({str(p[name]) for p, _ in pairs}) > 1
    ]
    found: list[Comparison] = []
    for one, other in pairs:
        label = {name: one[name] for name in varying}
        found += [
            Comparison(label, metric, interval, basis)
            for metric, interval, basis in _of_pair(a, b, one, other)
        ]
    known = list(dict.fromkeys(c.metric for c in found))
    for metric in metrics:
        if metric not in known:
            raise unknown_name("metric that both sides have", metric, known)
    return [c for c in found if not metrics or c.metric in metrics]


def _of_pair(
    a: Side, b: Side, one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterable[tuple[str, Interval, str]]:
    """Yield metric, interval and what it was drawn from."""
    first, second = a.single(one["point"]), b.single(other["point"])
    tokens = [side.per_token(p["point"]) for side, p in ((a, one), (b, other))]
    repeats = [side.repetitions(p["point"]) for side, p in ((a, one), (b, other))]
    window = int(one["eval_window"]) - int(one["eval_context"])
    for metric in first:
        if metric not in second or metric in ("nll_mean_nats",):
            continue
        array, function = PER_TOKEN.get(metric, ("", np.asarray))
        if all(array in t for t in tokens) and len({t[array].shape for t in tokens}) == 1:
            interval = paired(tokens[0][array], tokens[1][array], window, function)
            yield metric, interval, "windows"
        elif metric in repeats[0] and metric in repeats[1]:
            yield metric, unpaired(repeats[0][metric], repeats[1][metric]), "repetitions"
        else:
            interval = Interval(first[metric], second[metric], np.nan, np.nan, ratio=False, n=1)
            yield metric, interval, "-"
