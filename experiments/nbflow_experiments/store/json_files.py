"""JSON files of a results folder: atomic writes, validated reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nbflow.utils.atomic_write import write_text
from nbflow_kernels.errors import UsageError


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file atomically; non-finite numbers become null."""
    write_text(path, json.dumps(plain(data), indent=1, allow_nan=False) + "\n")


def plain(data: Any) -> Any:
    """Return `data` with mappings and sequences copied and non-finite numbers replaced by None."""
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if data is None or isinstance(data, str | int | float | bool):
        return data
    raise TypeError(f"cannot write a {type(data).__name__} to JSON: {data!r}")


class DamagedFileError(UsageError):
    """File of a results folder is damaged; the message names it."""


Kinds = type | tuple[type, ...]


def read_object(path: Path, fields: Mapping[str, Kinds] = MappingProxyType({})) -> dict[str, Any]:
    """Read a JSON object and check its fields.

    Raises
    ------
    DamagedFileError
        If the file is not UTF-8, not JSON, not an object, or a field is missing or of another type.
    OSError
        If the file cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from None
    check_fields(path, "the file", data, fields)
    found: dict[str, Any] = data
    return found


def check_fields(path: Path, what: str, data: Any, fields: Mapping[str, Kinds]) -> None:
    """Raise `DamagedFileError` unless `data` is an object with these fields."""
    if not isinstance(data, dict):
        raise DamagedFileError(
            f"{path} is damaged: {what} must hold an object, got {type(data).__name__}"
        )
    for name, kinds in fields.items():
        value = data.get(name)
        if name not in data or not isinstance(value, kinds):
            names = [k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,))]
            wanted = " or ".join(names)
            found = type(value).__name__ if name in data else "nothing"
            raise DamagedFileError(
                f"{path} is damaged: {name!r} of {what} must be {wanted}, got {found}"
            )
