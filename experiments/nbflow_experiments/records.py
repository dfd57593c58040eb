"""The results folder of a sweep, and how its files are written.

::

    <out>/<sweep>/
      sweep.json                 name, description, factors, measures, ids of all points
      launches/<name>.json       of each launch: code, packages, machine, ranks, inputs, times
      claims/<id>.<n>.json       which process runs a point (`nbflow_experiments.claims`)
      points/<id>/config.json    frozen configuration, written when the point starts
      points/<id>/result.json    status, readings, error; its presence means the point is finished
      points/<id>/log.txt        what happened when
      points/<id>/arrays.h5      repetitions, per-token and per-tensor values
      points/<id>/arrays.rank0.h5  under mpirun: what rank 0 measured; `nbflow_experiments.arrays`
      reference/<id>.h5          logits of the unquantized model
      points.csv                 one row per point: factors and summaries, units in the column names
      results.csv                one row per number: point, rank, repeat, metric, value, unit, n,
                                 stderr
      results.h5                 the arrays of all points
      provenance.json            all launches

The folders of the points and of the launches are the truth; the four files at the end are made from
them (`nbflow_experiments.summary`).  Every file is written beside its place and renamed, so that it
is whole or absent; a point without ``result.json`` has not finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbflow_experiments.arrays import link_ranks, write_arrays
from nbflow_experiments.extras import require
from nbflow_experiments.files import read_json, replace_atomically, write_json, write_text
from nbflow_experiments.measures import Array, Reading
from nbflow_experiments.points import Point, point_id
from nbflow_kernels.errors import UsageError

SCHEMA_VERSION = 1
"""Version of the layout above."""


class ResultsFolder:
    """The results folder of one sweep.

    Parameters
    ----------
    path : Path
        ``<out>/<sweep>``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def exists(self) -> bool:
        """Return whether a sweep has been written here."""
        return (self.path / "sweep.json").is_file() or (self.path / "points").is_dir()

    @property
    def reference(self) -> Path:
        """Return the folder of the reference's logits."""
        return self.path / "reference"

    def folder(self, short: str) -> Path:
        """Return the folder of a point."""
        return self.path / "points" / short

    def write_config(self, point: Point) -> None:
        """Freeze what a point is."""
        data = {"schema_version": SCHEMA_VERSION, "id": point.id, **point.record()}
        data["eval_text"] = str(point.text or "")
        write_json(self.folder(point.short) / "config.json", data)

    def write_result(
        self,
        short: str,
        result: Mapping[str, Any],
        log: str,
        arrays: Mapping[str, Array],
        ranks: Sequence[int] = (),
    ) -> None:
        """Write what was found at a point; ``result.json`` last, since it says all is there.

        `ranks` have written files of their own (`nbflow_experiments.arrays`).
        """
        folder = self.folder(short)
        write_text(folder / "log.txt", log)
        if arrays or ranks:
            with (
                replace_atomically(folder / "arrays.h5") as temporary,
                require("h5py").File(temporary, "w", track_order=True) as file,
            ):
                write_arrays(file, arrays)
                if ranks:
                    link_ranks(file, folder, ranks)
        else:
            (folder / "arrays.h5").unlink(missing_ok=True)  # an earlier attempt's
        write_json(folder / "result.json", dict(result))

    def result(self, short: str) -> dict[str, Any] | None:
        """Return what was found at a point, or None if it has not finished."""
        path = self.folder(short) / "result.json"
        if not path.is_file():
            return None
        data: dict[str, Any] = read_json(path)
        return data

    def config(self, short: str) -> dict[str, Any]:
        """Return the frozen configuration of a point."""
        path = self.folder(short) / "config.json"
        if not path.is_file():
            raise UsageError(f"{path} is missing; delete the folder to measure this point again")
        data: dict[str, Any] = read_json(path)
        return data

    def is_finished(self, point: Point, retry_failed: bool) -> bool:
        """Return whether a point need not be run again.

        Raises
        ------
        UsageError
            If the folder of the point holds another configuration.
        """
        result = self.result(point.short)
        if result is None:
            return False
        kept = self.config(point.short)
        found = {key: kept.get(key) for key in point.record()}
        if kept.get("id") != point.id or point_id(found) != point.id:
            raise UsageError(
                f"{self.folder(point.short) / 'config.json'} was changed after the point was run: "
                f"its content does not give the id {point.id}; delete that folder or use another "
                f"--out"
            )
        return result["status"] == "done" or not retry_failed

    def finished(self) -> list[str]:
        """Return the folder names of all finished points, in the order of the sweep."""
        names = sorted(p.parent.name for p in (self.path / "points").glob("*/result.json"))
        order = {short: i for i, short in enumerate(self.sweep().get("points", []))}
        return sorted(names, key=lambda name: order.get(name, len(order)))

    def sweep(self) -> dict[str, Any]:
        """Return the description of the sweep; empty if it was never written."""
        path = self.path / "sweep.json"
        data: dict[str, Any] = read_json(path) if path.is_file() else {}
        return data

    def versions(self) -> dict[str, int]:
        """Return when each finished point was written, to tell whether any was written since."""
        paths = (self.path / "points").glob("*/result.json")
        return {path.parent.name: path.stat().st_mtime_ns for path in paths}

    def launches(self) -> list[dict[str, Any]]:
        """Return the provenance of every launch that wrote here, the first one first."""
        files = sorted((self.path / "launches").glob("*.json"))  # names begin with the time
        return [read_json(file) for file in files]

    def write_launch(self, name: str, launch: Mapping[str, Any]) -> None:
        """Write or replace the provenance of one launch."""
        write_json(self.path / "launches" / f"{name}.json", {"name": name, **launch})


def reading_row(measure: str, reading: Reading) -> dict[str, Any]:
    """Return a reading as plain data."""
    return {"measure": measure, **asdict(reading)}
