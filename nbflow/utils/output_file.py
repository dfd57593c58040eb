"""Files and folders that appear under their names only when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nbflow_kernels.errors import UsageError


def check_output(out: Path, source: Path, *, force: bool, may_hold: frozenset[str]) -> None:
    """Raise if `out` must not be written.

    Parameters
    ----------
    out : Path
        File or folder to write.
    source : Path
        The checkpoint that is read.
    force : bool
        Whether `out` may be there already.
    may_hold : frozenset of str
        Names that a folder that is replaced may have in it.
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


def temporary_name(out: Path) -> Path:
    """Return the name beside `out` that an unfinished file or folder has."""
    return out.with_name(f".{out.name}.{os.getpid()}.part")


@contextmanager
def new_file(out: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name at the end; after an error or Ctrl-C it is gone."""
    temporary = temporary_name(out)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Make a folder that gets its name at the end; after an error or Ctrl-C it is gone."""
    temporary = temporary_name(out)
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    try:
        temporary.mkdir()
        yield temporary
        if out.exists():
            os.rename(out, old)
        try:
            os.rename(temporary, out)
        except BaseException:
            if old.exists():
                os.rename(old, out)
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
