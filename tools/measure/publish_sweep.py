#!/usr/bin/env python3
"""Put the results of a sweep into results/, where the documentation quotes them.

    python tools/measure/publish_sweep.py runs/quantization [...] --machine amd-epyc-2-cores
    python tools/docs/update_tables.py        # then writes the tables of docs/experiments.md

results/<sweep>/<machine>/ gets the tables, the provenance, the figures and the report; not the
folders of the points.  Other files there stay.  Paths inside the checkout are written relative to
it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from nbflow_experiments.report import write_report
from nbflow_experiments.store.json_files import write_json

ROOT = Path(__file__).resolve().parents[2]
TABLES = ("points.csv", "results.csv", "sweep.json")


def publish(run: Path, results: Path, machine: str) -> Path:
    """Copy the published files of a results folder; return the target folder."""
    name = json.loads((run / "sweep.json").read_text(encoding="utf-8"))["name"]
    folder = results / name / machine
    shutil.rmtree(folder / "figures", ignore_errors=True)  # other rows in the folder stay
    folder.mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        shutil.copyfile(run / table, folder / table)
    provenance = json.loads((run / "provenance.json").read_text(encoding="utf-8"))
    write_json(folder / "provenance.json", relative(provenance))
    write_report(folder)
    return folder


def relative(data: Any) -> Any:
    """Return plain data with paths inside the checkout relative to it, programs by their names."""
    if isinstance(data, dict):
        plain = {relative(key): relative(value) for key, value in data.items()}
        if isinstance(plain.get("command"), list):
            plain["command"] = [Path(plain["command"][0]).name, *plain["command"][1:]]
        return plain
    if isinstance(data, list):
        return [relative(value) for value in data]
    return data.replace(f"{ROOT}/", "") if isinstance(data, str) else data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="results folders of nbflow sweep")
    parser.add_argument(
        "--machine", required=True, help="name of the machine, e.g. amd-epyc-2-cores"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    arguments = parser.parse_args()
    for run in arguments.runs:
        print(publish(run, arguments.results, arguments.machine))


if __name__ == "__main__":
    main()
