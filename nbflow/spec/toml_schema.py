"""TOML with a closed schema: unknown keys and wrong types are errors that name the file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nbflow_kernels.errors import UsageError, unknown_name

MAX_TOML_BYTES = 1_000_000

Kind = type | tuple[str, ...] | list[type]
"""A type; a tuple of the words allowed; or ``[int]`` for one integer or a list of them."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file, or raise `UsageError` that names it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_TOML_BYTES:
        raise UsageError(f"{path}: a TOML file may have at most {MAX_TOML_BYTES} bytes")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error


def check_keys(table: Any, where: str, allowed: Iterable[str]) -> dict[str, Any]:
    """Return `table` if it is a table with none but the allowed keys."""
    if not isinstance(table, dict):
        raise UsageError(f"{where}: must be a table, got {table!r:.80}")
    names = list(allowed)
    for key in table:
        if key not in names:
            raise UsageError(f"{where}: {unknown_name('key', key, names)}")
    return table


def check_value(value: Any, where: str, kind: Kind) -> Any:
    """Return `value` as `kind`, or raise `UsageError`; an integer may stand for a float."""
    if isinstance(kind, tuple):
        if value not in kind:
            raise UsageError(f"{where}: must be one of {', '.join(kind)}, got {value!r:.80}")
        return value
    if isinstance(kind, list):
        values = value if isinstance(value, list) else [value]
        return tuple(check_value(item, where, kind[0]) for item in values)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise UsageError(f"{where}: must be of type {kind.__name__}, got {value!r:.80}")
    return value


def strings(value: Any, where: str) -> tuple[str, ...]:
    """Return a list of strings as a tuple, or raise `UsageError`."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"{where}: must be a list of strings, got {value!r:.80}")
    return tuple(value)
