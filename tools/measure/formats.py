"""Measure all weight formats for the tables of docs/formats.md and README.md.

    python tools/measure/formats.py [--machine NAME] [--repeats N] [--threads N] [--shape N K]
                                    [--products | --rows FORMAT ... | FORMAT ...]

Kernels: `nbflow_kernels.benchmarks.formats`.  Bundled model: the sweep
experiments/sweeps/formats.toml. Writes results/formats/NAME/formats.json; `python
tools/docs/update_tables.py` then writes the tables.  With names of formats only these are measured
and added to the file, with the conditions of this measurement.  With --rows it appends the one-row
products of these formats, such as those of checkpoints, to rows.jsonl there, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from published_rows import append, conditions

from nbflow.utils import system
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels import FORMATS, get_num_threads, set_num_threads
from nbflow_kernels.benchmarks import formats
from nbflow_kernels.benchmarks.roofline import read_bandwidth
from nbflow_kernels.cpu.cpu_quota import available_cores

ROOT = Path(__file__).resolve().parents[2]
METRICS = ("weight_error_relative", "kld_mean_nats", "top1_agreement_share")


def model_rows(points: Path) -> dict[str, dict[str, float]]:
    """Return the errors on the bundled model by format, from the points of the sweep."""
    table = pd.read_csv(points)
    failed = table[table.status != "done"]
    if len(failed):
        raise SystemExit(f"points failed: {failed[['weights', 'error_message']].to_string()}")
    return {
        FORMATS[row.weights].name: {f"model_{m}": float(getattr(row, m)) for m in METRICS}
        for row in table.itertuples()
    }


def machine_name() -> str:
    words = re.sub(r"\W+", "-", system.processor_name().lower()).strip("-")
    return f"{words}-{available_cores()}-cores"


def measure_products(arguments: argparse.Namespace, file: Path) -> dict[str, Any]:
    """Return the recorded report with the one-row products measured again."""
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    set_num_threads(arguments.threads)
    shape = arguments.shape[0], arguments.shape[1]
    if (report["threads"], tuple(report["shape"])) != (arguments.threads, shape):
        raise SystemExit(f"{file} has {report['threads']} threads and shape {report['shape']}")
    rows = formats.measure_products(list(report["formats"]), shape, arguments.repeats)
    for name, row in rows.items():
        report["formats"][name] |= row
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    report["products"] = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "repeats": arguments.repeats,
    }
    return report | {"read_bandwidth_gb_per_s": read_bandwidth() / 1e9}


def append_products(arguments: argparse.Namespace, file: Path) -> None:
    """Append a row for each format, whose products were measured in turn."""
    facts = conditions()
    set_num_threads(arguments.threads)
    shape = arguments.shape[0], arguments.shape[1]
    found = formats.measure_products(arguments.rows, shape, arguments.repeats)
    more = {"threads": arguments.threads, "shape": list(shape)}
    append(file, facts, [{"weights": name} | more | row for name, row in found.items()])


def measure_rows(names: list[str], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the rows of formats: kernels, and errors on the bundled model."""
    set_num_threads(arguments.threads)
    kernels = formats.run(names, tuple(arguments.shape), arguments.repeats)
    sweep = ROOT / "experiments" / "sweeps" / "formats.toml"
    with tempfile.TemporaryDirectory() as folder:
        options = SweepOptions(sweep, Path(folder), (f"axes.weights={json.dumps(names)}",))
        if run_sweep(options):
            raise SystemExit("the sweep over the bundled model failed")
        model = model_rows(Path(folder) / "formats" / "points.csv")
    return {name: row | model[name] for name, row in kernels.items()}


def add_formats(arguments: argparse.Namespace, file: Path) -> dict[str, Any]:
    """Return the recorded report with the rows of some formats."""
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    names = [FORMATS[name].name for name in arguments.formats]
    bandwidth = {"read_bandwidth_gb_per_s": read_bandwidth() / 1e9}
    rows = measure_rows(names, arguments)
    added = conditions() | bandwidth | {"threads": arguments.threads, "shape": arguments.shape}
    report["added"] = report.get("added", {}) | dict.fromkeys(names, added)
    found = report["formats"] | rows
    report["formats"] = {name: found[name] for name in FORMATS if name in found}
    return report


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = measure_rows(list(FORMATS), arguments)
    return {
        "command": "python tools/measure/formats.py",
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": system.processor_name(),
        "packages": system.package_versions(),
        "threads": get_num_threads(),
        "shape": list(arguments.shape),
        "repeats": arguments.repeats,
        "read_bandwidth_gb_per_s": read_bandwidth() / 1e9,
        "formats": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="measure all weight formats")
    parser.add_argument("--machine", default=machine_name(), help="folder in results/formats")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", nargs=2, type=int, default=formats.SHAPE)
    parser.add_argument(
        "--products", action="store_true", help="measure matmuls only, keep the rest"
    )
    parser.add_argument("--rows", nargs="+", metavar="FORMAT", help="append products of formats")
    parser.add_argument("formats", nargs="*", help="measure and add only these")
    arguments = parser.parse_args()
    if arguments.rows:
        append_products(arguments, ROOT / "results" / "formats" / arguments.machine / "rows.jsonl")
        return
    file = ROOT / "results" / "formats" / arguments.machine / "formats.json"
    if arguments.formats:
        report = add_formats(arguments, file)
    else:
        report = measure_products(arguments, file) if arguments.products else measure(arguments)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(file.relative_to(ROOT))


if __name__ == "__main__":
    main()
