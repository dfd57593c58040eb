"""Full-precision tables: CSV, JSON lines, Parquet."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbflow.utils.atomic_write import replace_atomically
from nbflow_experiments.optional_packages import require
from nbflow_experiments.store.results_reader import Row
from nbflow_experiments.store.summary import write_csv


def to_csv(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table as CSV; None is an empty field, NaN is ``nan``."""
    stream = io.StringIO(newline="")
    write_csv(stream, columns, rows)
    return stream.getvalue()


def to_jsonl(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table as one JSON object per line.

    JSON lacks NaN and infinity: they become the strings "NaN", "Infinity" and "-Infinity", which
    ``float`` parses.
    """
    lines = [json.dumps({c: _plain(row[c]) for c in columns}, allow_nan=False) for row in rows]
    return "".join(f"{line}\n" for line in lines)


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def write_parquet(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a table as Parquet; None is null, NaN is NaN."""
    arrow = require("pyarrow", "parquet")
    parquet = require("pyarrow.parquet", "parquet")
    arrays = [arrow.array([row[c] for row in rows], _arrow_type(rows, c)) for c in columns]
    with replace_atomically(path) as temporary:
        parquet.write_table(arrow.table(arrays, names=list(columns)), temporary)


def _arrow_type(rows: Sequence[Row], column: str) -> Any:
    """Return the type of a column: text, 64-bit integers or float64."""
    arrow = require("pyarrow", "parquet")
    kinds = {type(row[column]) for row in rows if row[column] is not None}
    return arrow.string() if str in kinds else arrow.int64() if kinds == {int} else arrow.float64()
