"""Disk cache of compiled CUDA kernels, in the folder ``cuda`` next to the CPU kernels' folders.

A file is named after a digest of all inputs: the source with its includes and
imports, the target, the compilers' versions, the options.  It is written atomically by
a rename, so that processes may share the folder; a file that does not match its first line is
compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nbflow_kernels.jit_cache import cache_root

Compiled = tuple[bytes, str]
"""Code and entry name of the kernel."""


def folder() -> Path:
    """Return the folder of compiled CUDA kernels."""
    return cache_root() / "cuda"


def digest(*parts: str | bytes) -> str:
    """Return the digest of the parts, each with its length."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:32]


def cached(name: str, output: str, key: str, build: Callable[[], Compiled]) -> Compiled:
    """Return the cache entry of a key; build and store it if absent.

    Parameters
    ----------
    name, output : str
        The kernel's name and ``ptx`` or ``cubin``, for the file's name.
    key : str
        Digest of sources and options; see `digest`.
    build : callable
        Returns the code and its entry name.
    """
    path = folder() / f"{name[:40]}-{key}.{output}"
    found = _read(path)
    if found is None:
        with _alone(path):
            found = _read(path)  # another process may have built it meanwhile
            if found is None:
                found = build()
                with contextlib.suppress(OSError):  # a read-only folder costs time only
                    _write(path, found)
    return found


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock a file against other processes that build it: all ranks of a node start at once."""
    lock = path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, ImportError):  # else it is compiled more than once
            fcntl = importlib.import_module("fcntl")
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(lock.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            held.callback(lock.unlink, missing_ok=True)
        yield


def _read(path: Path) -> Compiled | None:
    try:
        header, code = path.read_bytes().split(b"\n", 1)
        said = json.loads(header)
        if said["sha256"] == hashlib.sha256(code).hexdigest():
            return code, str(said["entry"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _write(path: Path, compiled: Compiled) -> None:
    code, entry = compiled
    header = json.dumps({"entry": entry, "sha256": hashlib.sha256(code).hexdigest()})
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header.encode() + b"\n" + code)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
