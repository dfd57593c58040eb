"""Recorded numbers in the form that figures and page use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbflow_experiments.figure_style import launch_facts
from nbflow_experiments.measures import BUILT_IN
from nbflow_experiments.optional_packages import require
from nbflow_experiments.settings import SETTINGS
from nbflow_experiments.store.json_files import read_object
from nbflow_experiments.store.results_folder import ResultsFolder
from nbflow_experiments.store.results_reader import points_frame
from nbflow_experiments.store.summary import write_summaries
from nbflow_experiments.sweep.progress import headline
from nbflow_kernels.errors import UsageError, unknown_name


@dataclass(frozen=True)
class Results:
    """Content of a results folder."""

    path: Path
    sweep: dict[str, Any]
    """``sweep.json``."""
    launches: list[dict[str, Any]]
    points: Any
    """``points.csv`` as a pandas DataFrame, in the order of the sweep."""
    failures: list[dict[str, Any]]
    """Name, varying settings, step and error of each failed point."""
    weights: str
    """Format of figures that show a single format."""

    @property
    def done(self) -> Any:
        """Return the points in which every built-in measure succeeded."""
        return self.points[_succeeded(self.points, self.sweep)]

    @property
    def partition(self) -> str:
        """Return the partition of figures that show a single one: the first of the sweep."""
        return str(self.done.partition.iloc[0])

    @property
    def origin(self) -> str:
        """Return sweep, models, points, machine, date and commit, for the footer of a figure."""
        models = list(dict.fromkeys(Path(str(name)).name for name in self.done.model))
        shown = ", ".join(models[:3]) + (" ..." if len(models) > 3 else "")
        launch = launch_facts(self.launches[-1] if self.launches else {})
        return f"{self.sweep['name']}: {shown}; {len(self.done)} points; {launch}"

    def varying(self, names: Sequence[str]) -> list[str]:
        """Return the settings among `names` that vary over the points that succeeded."""
        return [name for name in names if self.done[name].nunique() > 1]

    def series(self, fixed: Sequence[str]) -> list[tuple[str, Any]]:
        """Group the points that succeeded by every varying setting that is not in `fixed`.

        Each group has a label of its varying settings; empty for a single group.
        """
        names = self.varying([n for n in SETTINGS if n in self.done and n not in fixed])
        if not names:
            return [("", self.done)]
        parts = []
        for values, part in self.done.groupby(names, sort=False):
            given = zip(names, values, strict=True)
            parts.append((", ".join(f"{n} = {_shown_value(v)}" for n, v in given), part))
        return parts

    def with_fewer_series(self, fixed: Sequence[str], most: int) -> tuple[Results, str]:
        """Return these results at the first value of some settings, for at most `most` series.

        Settings with the fewest values are held first, and the one with the most values never is.
        The text names them with their values, e.g. "kv = f16, seed = 0".
        """
        results, held = self, []
        names = self.varying([n for n in SETTINGS if n in self.done and n not in fixed])
        names.sort(key=lambda name: int(self.done[name].nunique()))
        for name in names[:-1]:
            if len(results.series(fixed)) <= most:
                break
            first = results.done[name].iloc[0]
            results = replace(results, points=results.points[results.points[name] == first])
            held.append(f"{name} = {_shown_value(first)}")
        return results, ", ".join(held)


def _shown_value(value: Any) -> str:
    return "none" if value == "" else str(value)


def _succeeded(points: Any, sweep: Mapping[str, Any]) -> Any:
    """Return True for each point that succeeded, or failed in a user's measure alone.

    Users' measures run after the built-in ones, so that all columns of figures are there.
    """
    succeeded = points.status == "done"
    if "error_step" in points:
        own = set(sweep.get("measures", ())) - BUILT_IN
        succeeded = succeeded | points.error_step.isin(own)
    return succeeded


def load_results(path: Path, weights: str | None = None) -> Results:
    """Read a results folder, first bringing its tables up to date.

    Raises
    ------
    UsageError
        If the folder has no results, no point has every built-in measure, or none the format.
    """
    require("matplotlib")
    folder = ResultsFolder(path)
    if not folder.exists:
        raise UsageError(
            f"{path} is not a results folder of nbflow sweep (it has no sweep.json); give the "
            f"folder that the sweep printed last"
        )
    names = folder.finished()
    copied = not names and (path / "points.csv").is_file()  # the tables alone, without the points
    if not names and not copied:
        raise UsageError(f"{path} has no finished points yet; continue with nbflow sweep --resume")
    if not copied and _outdated(folder, names):
        write_summaries(folder)
    points = points_frame(path)
    sweep = folder.sweep()
    if not sweep:
        raise UsageError(
            f"{path / 'sweep.json'} is missing or damaged; nbflow sweep --resume writes it again"
        )
    failures = _failures(folder, points, sweep["factors"])
    done = points[_succeeded(points, sweep)]
    if not len(done):
        raise UsageError(
            f"{path}: all {len(points)} finished points failed, the first "
            f"{failure_text(failures[0])}; see points/*/log.txt"
        )
    launches = folder.launches()
    if copied and (path / "provenance.json").is_file():
        launches = read_object(path / "provenance.json", {"launches": list})["launches"]
    return Results(path, sweep, launches, points, failures, _shown(done, weights))


def _failures(folder: ResultsFolder, points: Any, factors: Sequence[str]) -> list[dict[str, Any]]:
    """Return name, varying settings, step and error of each failed point."""
    failures = []
    for row in points[points.status != "done"].to_dict("records"):
        result = folder.result(row["point"]) or {}
        error = result.get("error") or {"type": row["error_type"], "message": row["error_message"]}
        config = {factor: row[factor] for factor in factors}
        step = row.get("error_step")
        failures.append(
            {"point": row["point"], "config": config, "step": step, "traceback": "", **error}
        )
    return failures


def failure_text(failure: Mapping[str, Any]) -> str:
    """Return step and error of a failed point, e.g. "in decode: ValueError: ..."."""
    where = f"in {failure['step']}: " if failure["step"] else ""
    return where + headline(failure["type"], str(failure["message"]))


def _outdated(folder: ResultsFolder, names: Sequence[str]) -> bool:
    """Return whether the tables lack points or columns."""
    tables = [folder.path / name for name in ("points.csv", "results.csv", "results.h5")]
    if not all(table.is_file() for table in tables):
        return True
    if "error_step" not in tables[0].read_text(encoding="utf-8").partition("\n")[0]:
        return True  # written before the column existed
    oldest = min(table.stat().st_mtime for table in tables)
    return any((folder.folder(n) / "result.json").stat().st_mtime > oldest for n in names)


def _shown(done: Any, weights: str | None) -> str:
    """Return the requested format, by default the one nearest to 4.5 bits."""
    bits: dict[str, float] = dict(zip(done.weights, done.bits_per_weight, strict=True))
    if weights is None:
        return min(bits, key=lambda name: abs(bits[name] - 4.5))
    if weights.lower() not in bits:
        raise unknown_name("format in the results", weights, bits)
    return weights.lower()
