"""Untrusted JSON objects: bounded, without repeated names, with errors that name the file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, overload

from nbflow.utils.binary_file import read_file
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

MAX_JSON_BYTES = 100_000_000


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object in UTF-8; `where` begins the error messages.

    Raises `UsageError` if it is not JSON or not an object, is nested too deeply, or repeats a name.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise UsageError(f"{where}: the name {shown(twice)} occurs more than once")
        return table

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{where}: must be a JSON object, got {type(value).__name__}")
    return value


def parse_lines(text: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place (``where:line``) and the object of each line that is not empty."""
    for number, line in enumerate(text.split("\n"), 1):  # U+2028 may be in a string
        if line.strip():
            place = f"{where}:{number}"
            yield place, parse_object(line.encode("utf-8", "surrogatepass"), place)


@overload
def read_object(path: Path, *, missing_ok: Literal[False] = False) -> dict[str, Any]: ...
@overload
def read_object(path: Path, *, missing_ok: bool) -> dict[str, Any] | None: ...
def read_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any] | None:
    """Read a file with one JSON object; with `missing_ok`, None if it does not exist."""
    if missing_ok and not path.exists():
        return None
    return parse_object(read_file(path, MAX_JSON_BYTES, "a JSON file"), str(path))
