"""Disk cache of compiled CUDA kernels, in the folder ``cuda`` next to the CPU kernels' folders.

A file is named after a digest of all inputs: the source with its includes and
imports, the target, the compilers' versions, the options.  It is written atomically by
a rename, so that processes may share the folder; a file that does not match its first line is
compiled again.  What the folder lacks is looked for in the bundle in use (`cuda.bundle`), by the
digest without the compilers' versions, before it is compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbflow_kernels.compilation.jit_cache import cache_root
from nbflow_kernels.cuda import bundle
from nbflow_kernels.cuda.bundle import BundledKernel
from nbflow_kernels.cuda.errors import CompileError
from nbflow_kernels.errors import MissingExtraError

Compiled = tuple[bytes, str]
"""Code and entry name of the kernel."""

sources: Counter[str] = Counter()
"""Kernels that this process took from the "folder", from the "bundle" and from a "compiler"."""
used: dict[Path, str] = {}
"""Files of this process's kernels in the folder -> digest without the compilers' versions."""


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


def cached(
    name: str,
    output: str,
    key: Callable[..., str],
    compilers: Callable[[], tuple[str, ...]],
    build: Callable[[], Compiled],
) -> Compiled:
    """Return a kernel from the folder or the bundle; build and store it if both lack it.

    Parameters
    ----------
    name, output : str
        The kernel's name and ``ptx`` or ``cubin``, for the file's name.
    key : callable
        Returns the digest of sources, options and the versions it is given; see `digest`.
    compilers : callable
        Returns the versions of the compilers, or raises if one is missing.
    build : callable
        Returns the code and its entry name.
    """
    try:
        versions = compilers()
    except (MissingExtraError, CompileError):
        found = bundle.find(key())
        if found is None:
            raise
        sources["bundle"] += 1
        return found
    path = folder() / f"{name[:40]}-{key(*versions)}.{output}"
    found, origin = _read(path), "folder"
    if found is None:
        found, origin = bundle.find(key()), "bundle"
    if found is None:
        with _alone(path):
            found, origin = _read(path), "folder"  # another process may have built it meanwhile
            if found is None:
                found, origin = build(), "compiler"
                with contextlib.suppress(OSError):  # a read-only folder costs time only
                    _write(path, found, ", ".join(versions))
    sources[origin] += 1
    if origin != "bundle":
        used[path] = key()
    return found


def bundled(path: Path, key: str) -> BundledKernel | None:
    """Return a file of the folder as a kernel of a bundle; None if it is gone or damaged."""
    found = _read_with_header(path)
    if found is None:
        return None
    header, code = found
    name = path.name.rsplit("-", 1)[0]
    return BundledKernel(key, name, str(header["entry"]), str(header.get("compiler", "")), code)


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
    found = _read_with_header(path)
    return None if found is None else (found[1], str(found[0]["entry"]))


def _read_with_header(path: Path) -> tuple[dict[str, Any], bytes] | None:
    try:
        line, code = path.read_bytes().split(b"\n", 1)
        header: dict[str, Any] = json.loads(line)
        if header["sha256"] == hashlib.sha256(code).hexdigest() and "entry" in header:
            return header, code
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _write(path: Path, compiled: Compiled, compiler: str) -> None:
    code, entry = compiled
    digest = hashlib.sha256(code).hexdigest()
    header = json.dumps({"entry": entry, "compiler": compiler, "sha256": digest})
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
