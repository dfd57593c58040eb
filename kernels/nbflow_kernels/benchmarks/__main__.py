"""Command line of the benchmarks: ``python -m nbflow_kernels.benchmarks [OP ...]``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import nbflow_kernels
from nbflow_kernels.benchmarks import gpu_worker
from nbflow_kernels.benchmarks.ops import Row, choose, last_level_cache_bytes, measure, table
from nbflow_kernels.benchmarks.roofline import read_bandwidth
from nbflow_kernels.cpu.parallel_for import get_num_threads, set_num_threads
from nbflow_kernels.errors import UsageError
from nbflow_kernels.testing import checks

BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nbflow_kernels.benchmarks",
        description="Check each op against its float64 reference, then time it.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops or cases; default: all timed")
    parser.add_argument(
        "--suite", choices=("cpu", "gpu"), default="cpu", help="where (default: cpu)"
    )
    parser.add_argument("--threads", type=int, help="default: all processors of this process")
    parser.add_argument(
        "--budget",
        type=float,
        default=gpu_worker.BUDGET_S,
        metavar="SECONDS",
        help=f"with --suite gpu: begin no case later (default: {gpu_worker.BUDGET_S:.0f})",
    )
    parser.add_argument("--repeats", type=int, default=20, help="samples per case (default: 20)")
    parser.add_argument(
        "--plugins",
        action="append",
        default=[],
        metavar="FILE",
        help="Python file that registers weight formats; it is executed (repeatable)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON to FILE")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code (1: a check failed, 2: wrong usage)."""
    arguments = _parser().parse_args(argv)
    try:
        for file in arguments.plugins:
            nbflow_kernels.load_plugin(file)
        cases = choose(arguments.ops, arguments.suite)
        if arguments.repeats < 1:
            raise UsageError(f"--repeats must be at least 1, got {arguments.repeats}")
        if arguments.threads is not None:
            set_num_threads(arguments.threads)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.suite == "gpu":
        return gpu_worker.main(
            cases, arguments.repeats, arguments.json, arguments.out, arguments.plugins,
            arguments.budget,
        )  # fmt: skip
    bandwidth = read_bandwidth()
    rows: list[Row] = []
    failed = 0
    for n, case in enumerate(cases, 1):
        print(f"[{n}/{len(cases)}] {case.op} {case.name}", file=sys.stderr, flush=True)
        try:
            rows.append(measure(case, arguments.repeats, bandwidth))
        except checks.CheckError as error:
            failed += 1
            print(f"check failed, not timed: {error}", file=sys.stderr)
    report = {
        "read_bandwidth_bytes_per_s": bandwidth,
        "last_level_cache_bytes": last_level_cache_bytes(),
        "rows": [asdict(row) for row in rows],
    }
    text = json.dumps(report, indent=2)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    if arguments.json:
        print(text)
    else:
        print(f"read bandwidth, {get_num_threads()} threads: {bandwidth / 1e9:.1f} GB/s\n")
        print(table(rows))
    return 1 if failed else 0


def _restart_with_blas_threads() -> None:
    """Restart this command with the peer library's thread count set.

    BLAS libraries read these variables once, when NumPy is imported.
    """
    threads = str(_parser().parse_args().threads or get_num_threads())
    if any(os.environ.get(name) != threads for name in BLAS_VARIABLES):
        environment = os.environ | dict.fromkeys(BLAS_VARIABLES, threads)
        command = [sys.executable, "-m", "nbflow_kernels.benchmarks", *sys.argv[1:]]
        os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    _restart_with_blas_threads()
    sys.exit(main())
