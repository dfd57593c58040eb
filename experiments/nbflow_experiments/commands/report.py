"""``nbflow report RESULTS``: figures and one HTML page from a recorded sweep.

Of an analysis' folder (``nbflow analyze --out``) it draws the figures again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nbflow_experiments.analysis.output_folder import AnalysisFolder
from nbflow_experiments.report import write_report
from nbflow_kernels.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nbflow report``."""
    parser.add_argument(
        "results", metavar="RESULTS", type=Path, help="results folder of a sweep or an analysis"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="page to write, with figures/ next to it (default: RESULTS/report.html)",
    )
    parser.add_argument(
        "--weights",
        metavar="FMT",
        help="format in the figure of the partitions (default: ~4.5 bits)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report; prints the files, the page last."""
    if (args.results / "analysis.json").is_file():
        if args.out or args.weights:
            raise UsageError("--out and --weights belong to the report of a sweep")
        for path in AnalysisFolder(args.results).draw():
            print(path)
        return 0
    page, figures = write_report(args.results, args.out, args.weights)
    for path in figures:
        print(path)
    print(page.absolute())
    return 0
