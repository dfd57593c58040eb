#!/usr/bin/env python3
"""Measure the host time of CUDA launches, and append the rows to results/.

    python tools/measure/launches.py results/launches/MACHINE [--before FOLDER]

Needs no GPU (`nbflow_kernels.benchmarks.launch_overhead`).  With --before, the package in another
folder (``git archive COMMIT kernels``) is measured in turn with this one; a row is the fastest of
the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from published_rows import append, conditions

ROUNDS = 8
COMMAND = [sys.executable, "-m", "nbflow_kernels.benchmarks.launch_overhead", "--json"]
TIMES = {"us_per_launch": "now_us", "recorded_us_per_launch": "recorded_us"}


def _measured(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a package in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    answer = subprocess.run(COMMAND, env=environment, stdout=subprocess.PIPE, check=True)
    rows: list[dict[str, Any]] = json.loads(answer.stdout)
    return rows


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path, help="folder of an older nbflow_kernels")
    arguments = parser.parse_args()
    facts = conditions()
    now = Path(__file__).resolve().parents[2] / "kernels"
    found: dict[str, dict[str, Any]] = {}
    for _ in range(ROUNDS):
        for folder in (now, arguments.before):
            for row in [] if folder is None else _measured(folder):
                kept = found.setdefault(row["op"], {"op": row["op"], "launches": 1})
                names = TIMES if folder is now else {"us_per_launch": "before_us"}
                if folder is now:
                    kept["launches"] = row["launches"]
                for name, key in names.items():
                    kept[key] = min(row[name], kept.get(key, row[name]))
    append(arguments.out / "rows.jsonl", facts, found.values())


if __name__ == "__main__":
    main()
