"""The measures of a sweep: one file each, listed here in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable

from nbflow_experiments.measures import (
    batching,
    cascade,
    communication,
    decode,
    divergence,
    memory,
    perplexity,
    prefill,
    shared_prefix,
    speculation,
    weight_error,
)
from nbflow_experiments.measures.measure import Array, Context, Measure, MeasureResult, Reading

__all__ = [
    "MEASURES",
    "METRICS_VERSION",
    "Array",
    "Context",
    "Measure",
    "MeasureResult",
    "Reading",
    "needs_reference",
    "needs_text",
]

METRICS_VERSION = 3
"""Raised when a measure changes its meaning, so that old results are not taken for new ones.

1: first version.  2: memory of the point alone, and a minimum time of a repetition.  3: the device
is a setting; memory of devices, and the plan's.
"""

MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        weight_error.MEASURE,
        perplexity.MEASURE,
        divergence.MEASURE,
        prefill.MEASURE,
        decode.MEASURE,
        batching.MEASURE,
        shared_prefix.MEASURE,
        cascade.MEASURE,
        speculation.MEASURE,
        communication.MEASURE,
        memory.MEASURE,
    )
}
"""Every measure by name."""


def needs_text(names: Iterable[str]) -> bool:
    """Return whether any of these measures evaluates text."""
    return any(MEASURES[name].needs_text for name in names)


def needs_reference(names: Iterable[str]) -> bool:
    """Return whether any of these measures needs reference logits."""
    return any(MEASURES[name].needs_reference for name in names)
