"""Interface of a measure: context, readings, arrays and result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from nbflow.engine.llm import LLM


Scope = Literal["format", "quality", "point"]


@dataclass(frozen=True)
class Reading:
    """One measured number."""

    metric: str
    """Metric name; ends with its unit unless it is a plain ratio."""
    value: float
    """The number; NaN if undefined."""
    unit: str
    """Its unit; "1" for ratios and counts."""
    n: int = 1
    """Number of observations summarised."""
    stderr: float | None = None
    """Standard error, where one is defined."""
    rank: int | None = None
    """MPI rank; None: the whole model."""
    repeat: int | None = None
    """Index of the repetition; None: a summary."""


@dataclass(frozen=True)
class Array:
    """Array stored in HDF5."""

    values: np.ndarray
    unit: str
    labels: tuple[str, ...] = ()
    note: str = ""
    """Meaning of an entry."""


@dataclass
class MeasureResult:
    """Readings and arrays of one measure at one point."""

    readings: list[Reading] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    rank_arrays: dict[str, Array] = field(default_factory=dict)
    """Arrays of this rank alone, by name; under mpirun each rank writes its own file."""
    devices: str = ""
    """Hardware that it ran on, if the measure knows it."""


@dataclass
class Context:
    """Input of a measure, on every rank of the model."""

    config: Mapping[str, str | int | float]
    model: LLM
    leads: bool
    """True on the rank whose result is recorded."""
    windows: np.ndarray | None = None
    """Token ids to evaluate, int64 (windows, window); None if no measure needs them."""
    reference: Path | None = None
    """HDF5 file with the reference's logits (`nbflow_experiments.measures.reference_logits`)."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Cache shared by measures of one quality, for example the evaluation pass."""

    def number(self, name: str) -> int:
        """Return an integer setting."""
        return int(self.config[name])

    @property
    def min_repetition_s(self) -> float:
        """Return the shortest time of a timed repetition, in seconds."""
        return float(self.config["min_repetition_s"])


@dataclass(frozen=True)
class Measure:
    """A measure: one file of this folder."""

    name: str
    scope: Scope
    """Inputs of its result: only the model and its weight format (measured once per format),
    everything but batch and lengths (once per loaded model), or every setting."""
    run: Callable[[Context], MeasureResult]
    """Collective call, on every rank of the model."""
    about: str
    """Definition, exclusions, unit and repetitions: the docstring of its module."""
    needs_text: bool = False
    """True if it evaluates text."""
    needs_reference: bool = False
    """True if it compares with the logits of the unquantized model."""
    by_default: bool = True
    """True if it runs in sweeps that list no measures."""


def repeated(metric: str, values: Sequence[float] | np.ndarray, unit: str) -> list[Reading]:
    """Return the median of repetitions, followed by each repetition."""
    return [
        Reading(metric, float(np.median(values)), unit, len(values)),
        *(Reading(metric, float(value), unit, repeat=i) for i, value in enumerate(values)),
    ]


def speed(name: str, seconds: Sequence[float], n_tokens: int, leads: bool) -> MeasureResult:
    """Return median, minimum, maximum and every repetition of `n_tokens` in `seconds`.

    Ranks other than the leading one only keep their own seconds.
    """
    note = f"wall time of {n_tokens} tokens, mean of one repetition"
    array = Array(np.asarray(seconds, np.float64), "s", note=note)
    if not leads:
        return MeasureResult(rank_arrays={f"{name}_s": array})
    rates = n_tokens / np.asarray(seconds, np.float64)
    unit, n = "token/s", len(rates)
    median, *repetitions = repeated(f"{name}_tokens_per_s", rates, unit)
    readings = [
        median,
        Reading(f"{name}_min_tokens_per_s", float(rates.min()), unit, n),
        Reading(f"{name}_max_tokens_per_s", float(rates.max()), unit, n),
        *repetitions,
    ]
    return MeasureResult(readings, {f"{name}_s": array}, {f"{name}_s": array})
