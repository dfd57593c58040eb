"""``nbflow report RESULTS``: figures and one HTML page from a recorded sweep."""

from __future__ import annotations

import argparse
from pathlib import Path

from nbflow_experiments.report import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nbflow report``."""
    parser.add_argument("results", metavar="RESULTS", type=Path, help="results folder of a sweep")
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
    page, figures = write_report(args.results, args.out, args.weights)
    for path in figures:
        print(path)
    print(page.absolute())
    return 0
