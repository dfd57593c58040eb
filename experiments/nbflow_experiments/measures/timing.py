"""From seconds per repetition to the readings that both speed measures give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nbflow_experiments.measures.base import Array, Outcome, Reading


def speed(name: str, seconds: Sequence[float], n_tokens: int, leads: bool) -> Outcome:
    """Return median, slowest, fastest and every repetition of `n_tokens` done in `seconds`.

    A rank that does not lead only keeps its own seconds.
    """
    note = f"wall time of one repetition: {n_tokens} tokens"
    array = Array(np.asarray(seconds, np.float64), "s", note=note)
    if not leads:
        return Outcome(rank_arrays={f"{name}_s": array})
    rates = n_tokens / np.asarray(seconds, np.float64)
    unit, n = "token/s", len(rates)
    readings = [
        Reading(f"{name}_tokens_per_s", float(np.median(rates)), unit, n),
        Reading(f"{name}_min_tokens_per_s", float(rates.min()), unit, n),
        Reading(f"{name}_max_tokens_per_s", float(rates.max()), unit, n),
    ]
    for i, rate in enumerate(rates):
        readings.append(Reading(f"{name}_tokens_per_s", float(rate), unit, repeat=i))
    return Outcome(readings, {f"{name}_s": array}, {f"{name}_s": array})
