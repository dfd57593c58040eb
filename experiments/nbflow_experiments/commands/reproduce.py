"""`nbflow reproduce TABLE ...`: published tables of quality, measured with nbflow.

Without a table it lists them.  Each row is printed with the published value, ours, the difference
and a verdict.  Models and texts are not part of the package::

    nbflow pull Qwen/Qwen3-0.6B-Base --to qwen
    nbflow reproduce T3 --model qwen --text wiki.test.raw

A model of another size stands in: it is measured by the same convention and not judged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbflow_experiments import backend
from nbflow_experiments.reproduce.measured_table import Outcome, measure_table, text_windows
from nbflow_experiments.reproduce.published_table import (
    PublishedTable,
    known_tables,
    load_table,
)
from nbflow_experiments.store.json_files import plain
from nbflow_experiments.store.provenance import describe_rank, git_state, now
from nbflow_experiments.terminal_table import print_table
from nbflow_kernels.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="T1, T2, ..., or a file")
    parser.add_argument("--model", metavar="MODEL", help="the table's model, as for nbflow run")
    parser.add_argument("--text", metavar="FILE", help="the table's text, UTF-8 (its eval.txt)")
    parser.add_argument("--files", metavar="DIR", help="folder of the checkpoints that rows name")
    parser.add_argument("--windows", type=int, default=0, metavar="N", help="only the first N")
    parser.add_argument("--threads", type=int, metavar="N", help="threads (all cores)")
    parser.add_argument(
        "--out", metavar="FILE", help="append the rows as JSON lines, with versions"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if not arguments.tables:
        _print_list()
        return 0
    if arguments.windows < 0:
        raise UsageError(f"--windows must not be negative, got {arguments.windows}")
    tables = [load_table(name) for name in arguments.tables]
    if arguments.model is None:
        raise UsageError(
            f"{tables[0].id} needs its model: nbflow pull {tables[0].model} --to FOLDER, then "
            "--model FOLDER (or a model that stands in)"
        )
    done = True
    for table in tables:
        done &= _measure(table, arguments)
    return 0 if done else 1


def _measure(table: PublishedTable, arguments: argparse.Namespace) -> bool:
    """Measure, print and record one table; return whether every row was measured."""
    text = backend.text_file(arguments.model, arguments.text)
    windows = text_windows(table, arguments.model, text, arguments.windows)
    files = None if arguments.files is None else Path(arguments.files)
    outcomes = []
    for outcome in measure_table(
        table, arguments.model, windows, files, arguments.threads, not arguments.windows
    ):
        outcomes.append(outcome)
        facts = _facts(table, outcome, arguments.model, text)
        if arguments.out is not None:
            with Path(arguments.out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(facts)) + "\n")
        if arguments.json:
            print(json.dumps(plain(facts)))
    if not arguments.json:
        _print(table, outcomes, sum(window.n_scored for window in windows))
    return all(outcome.status == "done" for outcome in outcomes)


def _facts(table: PublishedTable, outcome: Outcome, model: str, text: Path) -> dict[str, Any]:
    """Return a row as plain data, with its conditions."""
    git = git_state(Path(__file__))
    return {
        "table": table.id,
        "row": outcome.row.name,
        "status": outcome.status,
        "published": dict(outcome.row.published),
        "ours": outcome.ours,
        "stderr": outcome.stderr,
        "verdicts": outcome.verdicts,
        "model": model,
        "text_sha256": backend.digest_files([text]),
        "measured": now(),
        "commit": None if git is None else git["commit"],
        "machine": describe_rank(),
    }


def _print_list() -> None:
    rows = []
    for name in known_tables():
        table = load_table(name)
        rows.append((name, table.title, table.model, str(len(table.rows)), table.text))
    print_table(("table", "title", "model", "rows", "text"), rows, 5)


def _print(table: PublishedTable, outcomes: Sequence[Outcome], n_scored: int) -> None:
    """Print a table."""
    how = table.convention
    stride = f", stride {how.stride}" if how.stride else ""
    print(f"{table.id}: {table.title}\n{table.source} ({table.date})")
    print(
        f"context {how.context}{stride}, scored: {how.scored}, BOS: {how.bos}; "
        f"{n_scored:,} tokens scored{'; ' + how.note if how.note else ''}"
    )
    cells = []
    for outcome in outcomes:
        for metric, published in outcome.row.published.items():
            if outcome.status != "done":
                cells.append((outcome.row.name, metric, outcome.status, f"{published:g}", "", ""))
                continue
            ours = outcome.ours[metric]
            change = f"{100 * (ours / published - 1):+.1f} %" if published else ""
            cells.append(
                (outcome.row.name, metric, outcome.verdicts[metric], f"{published:g}",
                 f"{ours:.5g}", change)
            )  # fmt: skip
    print_table(("row", "metric", "verdict", "published", "ours", "difference"), cells, 3)
