"""Summary tables, HDF5 file and provenance of a sweep, built from its point folders."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from nbflow.utils.atomic_write import replace_atomically
from nbflow_experiments.optional_packages import require
from nbflow_experiments.settings import OFFLOAD_SETTINGS, SETTINGS
from nbflow_experiments.store.hdf5_arrays import is_link, link_ranks, linked_ranks, open_arrays
from nbflow_experiments.store.json_files import DamagedFileError, write_json
from nbflow_experiments.store.results_folder import SCHEMA_VERSION, ResultsFolder

RESULT_COLUMNS = ("point", "rank", "repeat", "measure", "metric", "value", "unit", "n", "stderr")
"""Columns of ``results.csv``; an empty rank or repeat stands for all of them."""
_STATUS = (
    "point", "status", "attempt", "error_type", "error_message", "error_step", "wall_s",
    "quality_shared_from", "partition_chosen", "devices",
)  # fmt: skip
_BINS = np.logspace(-9, 2, 111)
"""Edges of the histograms of the divergence, in nats: ten bins per decade."""


def write_summaries(folder: ResultsFolder) -> list[dict[str, Any]]:
    """Write ``points.csv``, ``results.csv``, ``results.h5`` and ``provenance.json``.

    Concurrent launches write one after the other, so the last files hold all points.
    """
    with folder.exclusive():
        return _write_summaries(folder)


def _write_summaries(folder: ResultsFolder) -> list[dict[str, Any]]:
    """Write the tables from the folders of the points."""
    names = folder.finished()
    results = {name: folder.result(name) or {} for name in names}
    unset = {name: SETTINGS[name].default for name in OFFLOAD_SETTINGS}  # not in their ids
    configs = {name: unset | folder.config(name)["config"] for name in names}
    wide = [_wide_row(name, configs[name], results[name]) for name in names]
    metrics = dict.fromkeys(key for row in wide for key in row)
    columns = [*_STATUS, *SETTINGS, "bits_per_weight"]
    long = (row for name in names for row in _long_rows(name, results[name]))
    tables = (
        ("points.csv", [*columns, *(m for m in metrics if m not in columns)], wide),
        ("results.csv", RESULT_COLUMNS, long),
    )
    for name, head, rows in tables:
        with (
            replace_atomically(folder.path / name) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as stream,
        ):
            write_csv(stream, head, rows)
    _write_arrays(folder, folder.path / "results.h5", configs)
    launches = {"schema_version": SCHEMA_VERSION, "launches": folder.launches()}
    write_json(folder.path / "provenance.json", launches)
    return wide


def _wide_row(name: str, config: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    error = result.get("error") or {}
    row: dict[str, Any] = {
        "point": name,
        "status": result["status"],
        "attempt": result["attempt"],
        "error_type": error.get("type"),
        "error_message": error.get("message"),
        "error_step": _failed_step(result),
        "wall_s": result.get("wall_s"),
        "quality_shared_from": result.get("quality_shared_from"),
        "partition_chosen": result.get("partition_chosen"),
        "devices": result.get("devices"),
        **config,
        "bits_per_weight": result.get("bits_per_weight"),
    }
    for reading in result.get("readings", ()):
        if reading["rank"] is None and reading["repeat"] is None:
            row[reading["metric"]] = _number(reading["value"])
            if reading["stderr"] is not None:
                row[f"{reading['metric']}_stderr"] = reading["stderr"]
    return row


def _failed_step(result: Mapping[str, Any]) -> str | None:
    """Return the step that failed; None if none did, or the process was killed."""
    if result["status"] == "nonfinite":
        summaries = (r for r in result["readings"] if r["rank"] is None and r["repeat"] is None)
        return next((str(r["measure"]) for r in summaries if r["value"] is None), None)
    steps = result.get("steps_s")
    if not result.get("error") or not isinstance(steps, dict):
        return None
    return next(reversed(steps), None)  # a failure ends the point: the last step is the one


def _long_rows(name: str, result: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for reading in result.get("readings", ()):
        row = {column: reading.get(column) for column in RESULT_COLUMNS if column != "point"}
        yield {"point": name, **row, "value": _number(reading["value"])}


def _number(value: float | None) -> float:
    """Return a measured number; null in JSON stands for NaN."""
    return math.nan if value is None else value


def write_csv(stream: TextIO, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table; floats keep round-trip precision, None is an empty field, NaN is ``nan``."""
    writer = csv.DictWriter(stream, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)


def _write_arrays(
    folder: ResultsFolder, path: Path, configs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Copy the arrays of all points into one file, per-token divergences also as histograms."""
    h5py = require("h5py")
    with replace_atomically(path) as temporary, h5py.File(temporary, "w", track_order=True) as file:
        file.attrs["schema_version"] = SCHEMA_VERSION
        file.attrs["sweep"] = folder.sweep().get("name", "")
        points = file.create_group("points", track_order=True)
        for name, config in configs.items():
            group = points.create_group(name, track_order=True)
            for key, value in config.items():
                group.attrs[key] = value
            source = folder.folder(name) / "arrays.h5"
            if not source.is_file():
                continue
            try:
                _copy_arrays(source, group)
            except DamagedFileError as error:
                print(f"warning: {error}; {path.name} lacks its arrays", file=sys.stderr)


def _copy_arrays(source: Path, group: Any) -> None:
    with open_arrays(source) as arrays:
        for key in arrays:
            if not is_link(key):  # relative to the folder of the point
                arrays.copy(key, group, expand_refs=False)
        if ranks := linked_ranks(arrays):
            link_ranks(group, source.parent, ranks)
        if "kld_nats" in arrays:
            _write_histogram(group, arrays["kld_nats"][...])


def _write_histogram(group: Any, samples: np.ndarray) -> None:
    """Write the histogram of per-token divergence; the outer bins are open."""
    finite = samples[np.isfinite(samples)]
    counts, _ = np.histogram(np.clip(finite, _BINS[0], _BINS[-1]), _BINS)
    dataset = group.create_dataset("kld_histogram", data=counts)
    dataset.attrs["unit"] = "token"
    dataset.attrs["note"] = "tokens per bin of KL(reference || model); outer bins are open"
    dataset.attrs["nonfinite"] = int(samples.size - finite.size)
    edges = group.create_dataset("kld_histogram_edges_nats", data=_BINS)
    edges.attrs["unit"] = "nat"
