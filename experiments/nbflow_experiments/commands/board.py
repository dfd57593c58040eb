"""`nbflow board [FORMAT|FILE ...]`: weight formats at equal stored bits on a fixed model and text.

Without arguments it prints the published rows.  With formats, or Python files that register some,
it measures them on the same model and text and shows their places.  Example::

    nbflow board my_format.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from nbflow.cli.options import add_plugins_argument
from nbflow_experiments.compare.board import Entry, as_json, board, check_format, measure, published
from nbflow_experiments.terminal_table import print_table
from nbflow_kernels import FORMATS
from nbflow_kernels.errors import UsageError
from nbflow_kernels.plugins import load_plugins

HEAD = ("format", "quantizer", "bits", "KLD", "+- 95 %", "to the best", "95 % interval")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "formats", nargs="*", metavar="FORMAT|FILE",
        help="formats to measure, or Python files that register formats",
    )  # fmt: skip
    parser.add_argument("--quantizer", metavar="E", default="auto", help="of the formats (auto)")
    parser.add_argument("--importance", metavar="FILE", help="importance matrix of nbflow imatrix")
    add_plugins_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    names = _names(arguments.formats)
    for name in names:
        check_format(name)
    mine = [measure(name, arguments.quantizer, arguments.importance) for name in names]
    entries = [*published(), *mine]
    if arguments.json:
        print(json.dumps({"entries": [as_json(entry) for entry in entries]}, indent=1))
        return 0
    print_board(entries)
    return 0


def _names(given: Sequence[str]) -> list[str]:
    """Return the formats to measure; files are imported."""
    names: list[str] = []
    for name in given:
        if not name.endswith(".py"):
            names.append(name)
            continue
        known = set(FORMATS)
        load_plugins([Path(name)])
        found = [format for format in FORMATS if format not in known]
        if not found:
            raise UsageError(
                f"{name} registers no format that is not there yet; it should call "
                "nbflow_kernels.register_format"
            )
        names += found
    return names


def print_board(entries: Sequence[Entry]) -> None:
    """Print the parts of the board."""
    for budget, part in board(entries).items():
        if part:
            print(f"At most {budget:g} stored bits per weight")
            print_table(HEAD, [_cells(entry, part[0]) for entry in part], 2)
    print("KLD: mean divergence from float32, nat per token; * measured now")


def _cells(entry: Entry, best: Entry) -> tuple[str, ...]:
    name = entry.format if entry.published else f"{entry.format} *"
    numbers = (
        f"{entry.bits:.4g}", f"{entry.divergence:.4f}", f"{entry.half_width:.4f}",
    )  # fmt: skip
    if entry is best:
        return (name, entry.quantizer, *numbers, "", "")
    change = entry.against(best)
    difference = f"{change.change:+.4f}", f"{change.low:+.4f} to {change.high:+.4f}"
    return (name, entry.quantizer, *numbers, *difference)
