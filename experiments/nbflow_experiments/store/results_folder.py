"""Layout and writing of a sweep's results folder.

::

    <out>/<sweep>/
      sweep.json                 name, description, factors, measures, ids of all points
      launches/<name>.json       of each launch: code, packages, machine, ranks, inputs, times
      locks/<id>.lock            held while a point is measured (`nbflow_experiments.sweep`)
      locks/<id>.json            process that holds it
      points/<id>/config.json    frozen configuration, written when the point starts
      points/<id>/result.json    status, readings, error; its presence means the point is finished
      points/<id>/log.txt        timestamped log
      points/<id>/arrays.h5      repetitions, per-token and per-tensor values
      points/<id>/arrays.rank0.h5  arrays of rank 0 under mpirun (see `store.hdf5_arrays`)
      reference/<id>.h5          logits of the unquantized model
      points.csv                 one row per point: factors and summaries, units in the column names
      results.csv                one row per number: point, rank, repeat, metric, value, unit, n,
                                 stderr
      results.h5                 the arrays of all points
      provenance.json            all launches

The folders of points and launches are the source of the four summary files at the end
(`nbflow_experiments.store.summary`).  Every file is written under a temporary name and renamed, so
that it is complete or absent; a point without ``result.json`` is unfinished.  A point with a
damaged ``result.json`` or ``config.json`` counts as unfinished: a message names the file, and the
next launch with ``--resume`` keeps it as ``NAME.damaged`` and measures the point again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbflow.utils.atomic_write import replace_atomically, write_text
from nbflow_experiments.config.points import Point, point_id
from nbflow_experiments.measures import Array, Reading
from nbflow_experiments.optional_packages import require
from nbflow_experiments.store.hdf5_arrays import link_ranks, write_arrays
from nbflow_experiments.store.json_files import (
    DamagedFileError,
    Kinds,
    check_fields,
    read_object,
    write_json,
)
from nbflow_kernels.errors import UsageError

SCHEMA_VERSION = 1
"""Version of the layout above."""


_NONE = type(None)
_NUMBER = (int, float, _NONE)
_FIELDS: Mapping[str, Mapping[str, Kinds]] = {
    "sweep.json": {"name": str, "factors": list, "points": list},
    "config.json": {"id": str, "config": dict},
    "result.json": {
        "status": str, "attempt": int, "launch": str, "readings": list, "error": (dict, _NONE),
    },
}  # fmt: skip
_READING: Mapping[str, Kinds] = {
    "measure": str, "metric": str, "value": _NUMBER, "stderr": _NUMBER,
    "rank": (int, _NONE), "repeat": (int, _NONE),
}  # fmt: skip
_LAUNCH: Mapping[str, Kinds] = {"world_size": int}


class ResultsFolder:
    """Results folder of one sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told: set[Path] = set()

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def exists(self) -> bool:
        """Return whether a sweep has been written here."""
        return (self.path / "sweep.json").is_file() or (self.path / "points").is_dir()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other launches from planning or writing tables while the block runs."""
        self.path.mkdir(parents=True, exist_ok=True)
        with require("filelock").FileLock(self.path / ".lock"):
            yield

    @property
    def reference(self) -> Path:
        """Return the folder of the reference's logits."""
        return self.path / "reference"

    def folder(self, short: str) -> Path:
        """Return the folder of a point."""
        return self.path / "points" / short

    def write_config(self, point: Point) -> None:
        """Write the frozen configuration of a point."""
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
        """Write the result of a point; ``result.json`` last, since it marks completion.

        `ranks` have written their own files (`nbflow_experiments.store.hdf5_arrays`).
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
        """Return the result of a point, None if unfinished."""
        return self._whole(self.folder(short) / "result.json")

    def config(self, short: str) -> dict[str, Any]:
        """Return the frozen configuration of a point."""
        path = self.folder(short) / "config.json"
        if not path.is_file():
            raise UsageError(f"{path} is missing; delete the folder to measure this point again")
        return _read(path)

    def _whole(self, path: Path) -> dict[str, Any] | None:
        """Read a file; None, with one warning, if it is missing or damaged."""
        if not path.is_file():
            return None
        try:
            return _read(path)
        except DamagedFileError as error:
            if path not in self._told:
                self._told.add(path)
                print(f"warning: {error}; it counts as missing", file=sys.stderr, flush=True)
            return None

    def set_damaged_aside(self, points: Sequence[Point]) -> None:
        """Rename damaged files of the sweep and of these points to ``NAME.damaged``.

        Called before a launch writes; damaged files are rewritten.
        """
        names = ("config.json", "result.json")
        checked = [self.folder(point.short) / name for point in points for name in names]
        for path in (self.path / "sweep.json", *checked):
            if path.is_file() and self._whole(path) is None:
                path.replace(path.with_name(f"{path.name}.damaged"))

    def refuse_links(self, points: Sequence[Point]) -> None:
        """Raise if a folder to be written is a symbolic link."""
        folders = [self.path / name for name in ("points", "locks", "launches", "reference")]
        for folder in (*folders, *(self.folder(point.short) for point in points)):
            if folder.is_symlink():
                raise UsageError(
                    f"{folder} must be a folder, not a symbolic link (to {folder.readlink()}): a "
                    f"sweep writes into its results folder only; remove the link"
                )

    def is_finished(self, point: Point, retry_failed: bool) -> bool:
        """Return whether a point can be skipped."""
        result = self.result(point.short)
        kept = self._whole(self.folder(point.short) / "config.json")
        if result is None or kept is None:
            return False
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
        names = sorted(
            path.parent.name
            for path in (self.path / "points").glob("*/result.json")
            if self._whole(path) and self._whole(path.with_name("config.json"))
        )
        order = {short: i for i, short in enumerate(self.sweep().get("points", []))}
        return sorted(names, key=lambda name: order.get(name, len(order)))

    def sweep(self) -> dict[str, Any]:
        """Return the description of the sweep; empty if missing."""
        return self._whole(self.path / "sweep.json") or {}

    def launches(self) -> list[dict[str, Any]]:
        """Return the provenance of every launch, in order of time."""
        files = sorted((self.path / "launches").glob("*.json"))  # names begin with the time
        found = (self._whole(file) for file in files)
        return [launch for launch in found if launch is not None]

    def write_launch(self, name: str, launch: Mapping[str, Any]) -> None:
        """Write or replace the provenance of one launch."""
        write_json(self.path / "launches" / f"{name}.json", {"name": name, **launch})


def _read(path: Path) -> dict[str, Any]:
    """Read a file of the folder and check the fields that the tables need."""
    data = read_object(path, _FIELDS.get(path.name, _LAUNCH))
    if path.name == "result.json":
        for reading in data["readings"]:
            check_fields(path, "a reading", reading, _READING)
        if data["error"] is not None:
            check_fields(path, "the error", data["error"], {"type": str, "message": str})
    return data


def reading_row(measure: str, reading: Reading) -> dict[str, Any]:
    """Return a reading as plain data."""
    return {"measure": measure, **asdict(reading)}
