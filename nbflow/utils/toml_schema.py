"""TOML files with a closed schema: an unknown key or wrong type is an error that names the file."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nbflow.utils.binary_file import read_file
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError, unknown_name

MAX_TOML_BYTES = 1_000_000
_MOST_NAMES = 25  # more are too many to read in a message
IN_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text in quotes",
    dict: "a table",
}
"""Names of the types in messages."""

Kind = type | tuple[str, ...] | list[Any]
"""A type; a tuple of the words allowed; or a list with one of these, e.g. ``[int]`` for one integer
or a list of them."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file, or raise `UsageError` that names it."""
    data = read_file(path, MAX_TOML_BYTES, "a TOML file")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}{_line_of(data, error)}") from error


def _line_of(data: bytes, error: Exception) -> str:
    """Return the line of a TOML syntax error, with a hint for the most frequent one."""
    match = re.search(r"at line (\d+)", str(error))
    lines = data.decode("utf-8", "replace").splitlines()
    if match is None or not 1 <= int(match.group(1)) <= len(lines):
        return ""
    hint = "; words are written in quotes" if str(error).startswith("Invalid value") else ""
    return f": {lines[int(match.group(1)) - 1].strip():.100}{hint}"


def check_keys(table: Any, where: str, allowed: Iterable[str], hint: str = "") -> dict[str, Any]:
    """Return `table` if it is a table with allowed keys only; `hint` is an example entry."""
    if not isinstance(table, dict):
        example = f", e.g. {{ {hint} }}" if hint else ""
        raise UsageError(f"{where}: must be a table{example}, got {shown(table):.80}")
    names = list(allowed)
    for key in table:
        if key not in names:
            raise _unknown_key(where, key, names)
    return table


def _unknown_key(where: str, key: str, names: list[str]) -> UsageError:
    """Return the error for an unknown key, with close names if there are many."""
    if len(names) <= _MOST_NAMES:
        return UsageError(f"{where}: {unknown_name('key', key, names)}")
    close = difflib.get_close_matches(key, names, n=3)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    return UsageError(
        f"{where}: unknown key {shown(key)}{hint} All {len(names)} are in docs/family_files.md"
    )


def check_value(value: Any, where: str, kind: Kind) -> Any:
    """Return `value` as `kind`, or raise `UsageError`; an integer may stand for a float."""
    if isinstance(kind, tuple):
        if value not in kind:
            raise UsageError(f"{where}: must be one of {', '.join(kind)}, got {shown(value):.80}")
        return value
    if isinstance(kind, list):
        values = value if isinstance(value, list) else [value]
        return tuple(check_value(item, where, kind[0]) for item in values)
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise UsageError(
                f"{where}: must be a number that fits a float, got {shown(value)}"
            ) from None
    if type(value) is not kind:
        raise UsageError(f"{where}: must be {IN_WORDS[kind]}, got {shown(value):.80}")
    return value


def strings(value: Any, where: str, example: str = "name") -> tuple[str, ...]:
    """Return a list of strings as a tuple, or raise `UsageError` with an example of one."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        one, found = value if isinstance(value, str) and len(value) <= 40 else example, shown(value)
        raise UsageError(f'{where}: must be a list of strings, e.g. ["{one}"], got {found:.80}')
    return tuple(value)
