"""From seconds per repetition to the readings that both speed measures give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nbflow_experiments.measures.base import Array, Outcome, Reading


def speed(name: str, seconds: Sequence[float], n_tokens: int) -> Outcome:
    """Return median, slowest, fastest and every repetition of `n_tokens` done in `seconds`."""
    rates = n_tokens / np.asarray(seconds, np.float64)
    unit, n = "token/s", len(rates)
    readings = [
        Reading(f"{name}_tokens_per_s", float(np.median(rates)), unit, n),
        Reading(f"{name}_min_tokens_per_s", float(rates.min()), unit, n),
        Reading(f"{name}_max_tokens_per_s", float(rates.max()), unit, n),
    ]
    for i, rate in enumerate(rates):
        readings.append(Reading(f"{name}_tokens_per_s", float(rate), unit, repeat=i))
    note = f"wall time of one repetition: {n_tokens} tokens"
    return Outcome(readings, {f"{name}_s": Array(np.asarray(seconds, np.float64), "s", note=note)})
