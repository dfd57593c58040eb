"""Atomic writes: a file or folder appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nbflow_kernels.errors import UsageError


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename that file to `path` at the end.

    The content is synced before the rename, so `path` is always the old or the new file.  After an
    error the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _sync(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
        with contextlib.suppress(OSError):  # not every system can open a folder
            _sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replace_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replace_folder_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to `path` at the end.

    An existing folder is moved aside first and removed last.  After an error it is back under its
    name, and the temporary folder is removed.
    """
    temporary, old = (
        path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("part", "old")
    )
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        if path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_output(out: Path, source: Path, *, force: bool, may_hold: frozenset[str]) -> None:
    """Raise `UsageError` if `out` must not be written.

    `source` is the checkpoint that is read; with `force`, `out` may exist.  `may_hold` are the
    names that a replaced folder may contain; empty if `out` is a file.
    """
    if not out.parent.is_dir():
        raise UsageError(f"{out}: the folder {out.parent} does not exist")
    if out.resolve() == source.resolve():
        raise UsageError(f"{out}: is the checkpoint that is read; write elsewhere")
    if not out.exists():
        return
    if not force:
        raise UsageError(f"{out}: exists; give another name, or --force (force=True)")
    if may_hold and not out.is_dir():
        raise UsageError(f"{out}: is a file, and a folder would be written")
    if not may_hold and out.is_dir():
        raise UsageError(f"{out}: is a folder, and a file would be written")
    others = sorted({p.name for p in out.iterdir()} - may_hold) if out.is_dir() else []
    if others:
        raise UsageError(
            f"{out}: also holds {', '.join(others[:5])}, which would be lost; remove the folder "
            "yourself or write elsewhere"
        )


def _sync(path: Path) -> None:
    """Write a file, or a rename in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
