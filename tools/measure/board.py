#!/usr/bin/env python3
"""Measure the published rows of `nbflow board`: every format of at most 5 stored bits.

    python tools/measure/board.py          # writes compare/board.json of nbflow_experiments

The numbers are the same on every machine, up to the rounding of float32 sums.
"""

from __future__ import annotations

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
    facts = {"model": MODEL, "context": CONTEXT, "n_windows": N_WINDOWS, **conditions()}
    rows = []
    for name, format in FORMATS.items():
        if format.bits_per_weight > BUDGETS[-1]:
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
