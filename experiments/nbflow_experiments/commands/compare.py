"""`nbflow compare A B`: changes between two sets of measured points, with intervals.

A side is a results folder, or ``FOLDER:name=value,...`` for the points with these settings.
Points are paired if they agree in all settings that neither side fixes.  Perplexity and divergence
are compared token by token on the same text (paired bootstrap over windows), times by their
repetitions; an interval that excludes "no change" is marked.

Example::

    nbflow compare runs/demo:weights=q3 runs/demo:weights=q3h --metric kld_mean_nats perplexity
    nbflow compare before/demo after/demo
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from nbflow_experiments.compare.pairs import Comparison, compare
from nbflow_experiments.compare.selection import select
from nbflow_experiments.store.json_files import plain
from nbflow_experiments.terminal_table import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("a", metavar="A", help="results folder, or FOLDER:name=value,name=value")
    parser.add_argument("b", metavar="B", help="the same, for the other side")
    parser.add_argument("--metric", nargs="+", default=[], metavar="M", help="only these metrics")
    parser.add_argument("--json", action="store_true", help="print JSON rows")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    found = compare(select(arguments.a), select(arguments.b), arguments.metric)
    if arguments.json:
        print(json.dumps([plain(_row(c)) for c in found], indent=1))
        return 0
    print(f"A: {arguments.a}\nB: {arguments.b}\n")
    _print_table(found)
    print('\n* the 95 % interval of the change excludes "no change"')
    return 0


def _row(c: Comparison) -> dict[str, object]:
    i = c.interval
    return {
        **c.label,
        "metric": c.metric,
        "a": i.a,
        "b": i.b,
        "change": i.change,
        "kind": "b / a" if i.ratio else "b - a",
        "low": i.low,
        "high": i.high,
        "basis": c.basis,
        "n": i.n,
        "clear": i.is_clear,
    }


def _print_table(found: Sequence[Comparison]) -> None:
    labels = list(found[0].label) if found else []
    head = (*labels, "metric", "A", "B", "change", "95 % interval", "drawn from", "")
    rows = []
    for c in found:
        i, drawn = c.interval, c.basis != "-"
        number = "{:.3f}" if i.ratio else "{:+.4g}"
        cells = [*(str(c.label[name]) for name in labels), c.metric, f"{i.a:.5g}", f"{i.b:.5g}"]
        cells.append(number.format(i.change) + ("x" if i.ratio else ""))
        cells.append(f"{number.format(i.low)} .. {number.format(i.high)}" if drawn else "")
        rows.append([*cells, f"{i.n} {c.basis}" if drawn else "", "*" if i.is_clear else ""])
    print_table(head, rows, len(head), "MARKDOWN")
