"""``nbflow export RESULTS``: a table of a recorded sweep for another program or a paper.

Example::

    nbflow export runs/demo --format markdown
    nbflow export runs/demo --format latex --where partition=0,batch=1 --columns weights,perplexity
    nbflow export runs/demo --format parquet --table results --out results.parquet
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nbflow.utils.atomic_write import write_text
from nbflow_experiments.export.data_tables import to_csv, to_jsonl, write_parquet
from nbflow_experiments.export.markup_tables import quoted_columns, to_latex, to_markdown
from nbflow_experiments.store.results_reader import (
    Row,
    known_columns,
    matches,
    parse_where,
    read_points,
    read_results,
)
from nbflow_kernels.errors import UsageError

_TEXT: dict[str, Callable[[Sequence[str], Sequence[Row]], str]] = {
    "csv": to_csv,
    "jsonl": to_jsonl,
    "markdown": to_markdown,
    "latex": to_latex,
}
FORMATS = (*_TEXT, "parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nbflow export``."""
    parser.add_argument("results", metavar="RESULTS", type=Path, help="results folder of a sweep")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="markdown",
        help="(markdown); parquet needs the extra 'parquet'",
    )
    parser.add_argument(
        "--table",
        choices=("points", "results"),
        default="points",
        help="points: a row per point; results: a row per number, with ranks and repetitions",
    )
    parser.add_argument(
        "--columns",
        metavar="A,B",
        help="only these (default: all; in markdown and latex what varies and what is quoted)",
    )
    parser.add_argument(
        "--where", metavar="NAME=VALUE,...", default="", help="only points with these settings"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: stdout)")


def run(args: argparse.Namespace) -> int:
    """Write the table; the path of a file is printed."""
    if args.format == "parquet" and args.out is None:
        raise UsageError("Parquet is binary; name a file with --out")
    columns, rows = _table(args)
    if args.format == "parquet":
        write_parquet(args.out, columns, rows)
    else:
        text = _TEXT[args.format](columns, rows)
        if args.out is None:
            sys.stdout.write(text)
            return 0
        write_text(args.out, text)
    print(args.out.absolute())
    return 0


def _table(args: argparse.Namespace) -> tuple[list[str], list[Row]]:
    all_columns, points = read_points(args.results)
    where = parse_where(args.where)
    points = [row for row in points if matches(row, where)]
    if not points:
        raise UsageError(f"{args.results}: no point is like --where {args.where}")
    columns, rows = list(all_columns), points
    if args.table == "results":
        there = {row["point"] for row in points}
        columns, rows = read_results(args.results)
        rows = [row for row in rows if row["point"] in there]
    if args.columns:
        columns = known_columns([c.strip() for c in args.columns.split(",")], columns)
    elif args.format in ("markdown", "latex") and args.table == "points":
        columns = quoted_columns(columns, rows)
    return columns, rows
