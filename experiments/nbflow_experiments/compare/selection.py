"""Selection of compared points: ``FOLDER`` or ``FOLDER:name=value,name=value``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nbflow_experiments.settings import SETTINGS
from nbflow_experiments.store.hdf5_arrays import open_arrays
from nbflow_experiments.store.results_reader import matches, parse_where, read_points, results_frame
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Side:
    """The points of one side."""

    text: str
    path: Path
    fixed: dict[str, str]
    points: list[dict[str, Any]]
    """The settings of each point that succeeded, and its name under ``point``."""
    readings: Any
    """``results.csv`` as a DataFrame."""

    def repetitions(self, point: str) -> dict[str, np.ndarray]:
        """Return the repeated measurements of a point, by metric."""
        rows = self.readings[self.readings.point == point]
        repeated = rows[rows["repeat"].notna() & rows["rank"].isna()]
        return {
            str(metric): part.value.to_numpy(np.float64)
            for metric, part in repeated.groupby("metric", sort=False)
        }

    def single(self, point: str) -> dict[str, float]:
        """Return the summaries of a point over ranks and repetitions, by metric."""
        rows = self.readings[self.readings.point == point]
        whole = rows[rows["repeat"].isna() & rows["rank"].isna()]
        return dict(zip(whole.metric, whole.value.astype(float), strict=True))

    def per_token(self, point: str) -> dict[str, np.ndarray]:
        """Return the per-token arrays of a point, if stored."""
        file = self.path / "results.h5"
        if not file.is_file():
            return {}
        with open_arrays(file) as stream:
            group = stream.get("points", {}).get(point, {})
            return {name: group[name][...] for name in ("nll_nats", "kld_nats") if name in group}


def select(text: str) -> Side:
    """Parse a side and select its points."""
    folder, _, wanted = text.partition(":")
    path, fixed = Path(folder), parse_where(wanted)
    points = read_points(path)[1]
    selected = [row for row in points if matches(row, fixed)]
    rows = [
        {name: row[name] for name in ("point", *SETTINGS)}
        for row in selected
        if row["status"] == "done"
    ]
    if selected and not rows:
        raise UsageError(
            f"{text}: the points ({len(selected)}) all failed; see {path}/points/*/log.txt"
        )
    if not rows:
        there = "; ".join(f"{name} is {_values(points, name)}" for name in fixed)
        raise UsageError(f"{text}: no point has these settings; {there or 'the folder has none'}")
    return Side(text, path, fixed, rows, results_frame(path))


def _values(points: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the values that a setting has, a dozen of them at most."""
    return ", ".join(list(dict.fromkeys(str(point[name]) for point in points))[:12])


def matching(a: Side, b: Side) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the pairs of points that agree in all settings that neither side fixes."""
    free = [name for name in SETTINGS if name not in a.fixed and name not in b.fixed]

    def key(point: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(point[name]) for name in free)

    others = {key(point): point for point in b.points}
    pairs = [(point, others[key(point)]) for point in a.points if key(point) in others]
    if not pairs:
        raise UsageError(
            f"no point of {a.text} has a partner in {b.text}: two points are compared if they "
            f"agree in {', '.join(free)}"
        )
    return pairs
