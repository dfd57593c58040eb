"""Files that are either whole or absent, whenever the process is killed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to, and put that file in the place of `path` at the end.

    The content reaches the disk before the name does, so `path` is always the old or the new file.
    After an error nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last through a power failure, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with replace_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file, whole or not at all; numbers that JSON cannot hold become null."""
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


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
