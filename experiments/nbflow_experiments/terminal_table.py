"""Tables on the terminal, by rich, and a progress counter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from nbflow_experiments.optional_packages import require


def print_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], n_left: int, box: str = "SIMPLE_HEAD"
) -> None:
    """Print a table; unlimited width if the output is not a terminal.

    Parameters
    ----------
    head : sequence of str
        Names of the columns.
    rows : iterable of sequences of str
        The cells, which are printed as they are.
    n_left : int
        Columns aligned to the left; the others are aligned to the right.
    box : str
        Name of a border style of `rich.box`.
    """
    table = require("rich.table").Table(box=getattr(require("rich.box"), box))
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < n_left else "right", no_wrap=i == 0)
    for row in rows:
        table.add_row(*map(require("rich.text").Text, row))
    width = None if sys.stdout.isatty() and box != "MARKDOWN" else 1000
    console = require("rich.console").Console(width=width, highlight=False, force_jupyter=False)
    console.print(table)


def counter(what: str) -> Callable[[int, int], None] | None:
    """Return a progress counter for standard error, None where that is not a terminal."""
    if not sys.stderr.isatty():
        return None

    def show(n_done: int, n: int) -> None:
        end = "\n" if n_done == n else ""
        print(f"\r{what} {n_done}/{n}", end=end, file=sys.stderr, flush=True)

    return show
