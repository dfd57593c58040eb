#!/usr/bin/env python3
"""Measure the published rows of `nbflow board`: every format of at most 5 stored bits.

    python tools/measure/board.py [FORMAT ...]   # writes compare/board.json of nbflow_experiments

With names, only these formats are measured and take their places among the published rows.  The
numbers are the same on every machine, up to the rounding of float32 sums.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from published_rows import conditions

from nbflow_experiments.compare.board import (
    BUDGETS,
    CONTEXT,
    MODEL,
    N_WINDOWS,
    ROWS,
    as_json,
    measure,
)
from nbflow_kernels import FORMATS
from nbflow_kernels.errors import UsageError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*")
    names = {FORMATS[name].name for name in parser.parse_args().formats}
    now = conditions()
    facts, rows = {"model": MODEL, "context": CONTEXT, "n_windows": N_WINDOWS, **now}, []
    if names:
        facts = json.loads(ROWS.read_text(encoding="utf-8"))
        rows = [row for row in facts.pop("entries") if row["format"] not in names]
        facts["added"] = facts.get("added", {}) | dict.fromkeys(sorted(names), now)
    for name, format in FORMATS.items():
        if format.bits_per_weight > BUDGETS[-1] or (names and name not in names):
            continue
        try:
            entry = replace(measure(name), published=True)
        except UsageError as error:  # formats that are only read
            print(f"{name}: {error}")
            continue
        print(f"{name}: {entry.divergence:.4f}", flush=True)
        rows.append(as_json(entry))
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = json.dumps(facts)[1:-1]
    ROWS.write_text(f'{{{head},\n "entries": [\n  {lines}\n ]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
