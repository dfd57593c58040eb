"""Rows of measurements under results/: JSON lines that are appended, never replaced.

Each run has an id, its time and commit; each of its rows carries the id, the time in UTC, the
commit, the versions of the packages, the processor, the load average when the run began, and the
share of the processor's time that other virtual machines took since the rows before.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from nbflow.utils.system import package_versions, processor_name
from nbflow_experiments.store.provenance import git_state, now

_ticks: list[int] = []


def _stolen_share() -> float | None:
    """Return the stolen share of the processor's time since the last call; None where unknown."""
    try:
        now_ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    passed = [a - b for a, b in zip(now_ticks, _ticks, strict=True)] if _ticks else now_ticks
    _ticks[:] = now_ticks
    return round(passed[7] / max(1, sum(passed)), 4)


def conditions() -> dict[str, Any]:
    """Return the facts of a run, which are part of each of its rows."""
    _stolen_share()
    git = git_state(Path(__file__))
    commit = "unknown" if git is None else git["commit"]
    time = datetime.datetime.now(datetime.UTC)
    packages = package_versions()
    for peer in ("llama-cpp-python", "torch"):
        try:
            packages[peer] = metadata.version(peer)
        except metadata.PackageNotFoundError:
            continue
    return {
        "measurement": f"{time:%Y%m%dT%H%M%SZ}-{commit[:8]}",
        "commit": commit,
        "uncommitted_changes": git is None or git["dirty"],
        "packages": packages,
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load_average_at_start": os.getloadavg()[0],
    }


def append(file: Path, facts: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Append a run's rows, each with the facts of the run and the time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = {**facts, "stolen_share": _stolen_share(), "measured": now()}
    with file.open("a", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps({**row, **facts}) + "\n")


def latest(file: Path, *keys: str) -> list[dict[str, Any]]:
    """Return the newest row for each value of the keys, in the order of their first appearance."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[tuple(row.get(key) for key in keys)] = row
    return list(rows.values())
