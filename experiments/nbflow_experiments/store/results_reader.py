"""Reader of a results folder's tables, with typed values by column.

Only ``points.csv`` and ``results.csv`` are needed, so copied tables can be read.  Settings newer
than the recorded sweep have their defaults.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbflow_experiments.optional_packages import require
from nbflow_experiments.settings import SETTINGS, Value
from nbflow_kernels.errors import UsageError, unknown_name

Row = dict[str, Any]
TEXT = (
    "point", "status", "error_type", "error_message", "error_step", "quality_shared_from",
    "partition_chosen", "devices",
)  # fmt: skip
"""Text columns of ``points.csv`` other than settings."""
_RESULT_TEXT, _RESULT_NUMBERS = ("point", "measure", "metric", "unit"), ("rank", "repeat", "n")
_MOST_FIELD = 2**20  # characters of a field; an error message is the longest


def read_points(folder: Path) -> tuple[list[str], list[Row]]:
    """Return the columns and the rows of ``points.csv``.

    Text is str, empty where a setting is; numbers are int (integer settings, attempts) or float;
    missing measurements are None, non-finite ones NaN.  A column that is not a setting holds text
    if one of its fields is not a number.
    """
    columns, found = _read(folder, "points.csv")
    for name in ("point", "status", "weights"):
        if name not in columns:
            raise UsageError(
                f"{folder / 'points.csv'} has no column {name!r}; nbflow sweep did not write it"
            )
    rows = []
    words = {name for name in columns if name not in SETTINGS and not _are_numbers(found, name)}
    words |= set(TEXT)
    for texts in found:
        row: Row = {name: _point_value(folder, name, text, words) for name, text in texts.items()}
        rows.append({s.name: s.default for s in SETTINGS.values()} | row)
    missing = [name for name in SETTINGS if name not in columns]
    return [*columns, *missing], rows


def read_results(folder: Path) -> tuple[list[str], list[Row]]:
    """Return the columns and the rows of ``results.csv``; an empty rank or repeat is None."""
    columns, found = _read(folder, "results.csv")
    rows = []
    for texts in found:
        row: Row = {}
        for name, text in texts.items():
            if name in _RESULT_TEXT or text == "":
                row[name] = text or None
            else:
                kind = int if name in _RESULT_NUMBERS else float
                row[name] = _number(folder / "results.csv", name, text, kind)
        rows.append(row)
    return columns, rows


def points_frame(folder: Path) -> Any:
    """Return ``points.csv`` as a pandas DataFrame."""
    columns, rows = read_points(folder)
    return require("pandas").DataFrame(rows, columns=columns)


def results_frame(folder: Path) -> Any:
    """Return ``results.csv`` as a pandas DataFrame."""
    columns, rows = read_results(folder)
    return require("pandas").DataFrame(rows, columns=columns)


def parse_where(text: str) -> dict[str, str]:
    """Parse settings of the form ``name=value,name=value``."""
    fixed = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"{text}: {part!r} must be NAME=VALUE, e.g. weights=q3h")
        if name.strip() not in SETTINGS:
            raise unknown_name("setting", name.strip(), SETTINGS)
        fixed[name.strip()] = value.strip()
    if "device" in fixed:  # a comma separates settings here
        fixed["device"] = fixed["device"].replace(";", ",")
    return fixed


def matches(row: Mapping[str, Any], fixed: Mapping[str, str]) -> bool:
    """Return whether a point has all the given settings."""
    return all(_equal(row[name], value) for name, value in fixed.items())


def _equal(found: Value, wanted: str) -> bool:
    """Compare a setting's value with its textual form."""
    if isinstance(found, str):
        return found == wanted
    try:
        return float(found) == float(wanted)
    except ValueError:
        return False


def _read(folder: Path, name: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return the header and the rows of a table, as text."""
    path = folder / name
    if not path.is_file():
        raise UsageError(
            f"{folder} is not a results folder of nbflow sweep (it has no {name}); give the folder "
            f"that the sweep printed last"
        )
    csv.field_size_limit(_MOST_FIELD)
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.reader(stream)
        try:
            columns = next(reader, [])
            rows = list(reader)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not a table of nbflow sweep: {error}") from None
    if len(set(columns)) != len(columns) or not columns:
        raise UsageError(f"{path} is not a table of nbflow sweep: its columns have no clear names")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(columns):
            raise UsageError(f"{path}, row {number}: {len(row)} values for {len(columns)} columns")
    return columns, [dict(zip(columns, row, strict=True)) for row in rows]


def _are_numbers(rows: Sequence[Mapping[str, str]], name: str) -> bool:
    """Return whether all fields of a column are numbers or empty."""
    try:
        for row in rows:
            float(row[name] or 0)
    except ValueError:
        return False
    return True


def _point_value(folder: Path, name: str, text: str, words: Collection[str]) -> Value | None:
    """Return a field of ``points.csv`` with its type; `words` are columns of text."""
    known = SETTINGS.get(name)
    if name in words or (known is not None and not known.is_number):
        return text if known is not None else text or None
    if text == "":
        return None if known is None else known.default
    is_integer = known.is_integer if known is not None else name == "attempt"
    return _number(folder / "points.csv", name, text, int if is_integer else float)


def _number(path: Path, name: str, text: str, kind: type[int] | type[float]) -> float | int:
    """Parse a number; errors name the table and the column."""
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{path}: {name} must be a number, got {text!r}") from None


def known_columns(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the names, or raise if some are not columns."""
    for name in names:
        if name not in columns:
            raise unknown_name("column", name, columns)
    return list(names)
