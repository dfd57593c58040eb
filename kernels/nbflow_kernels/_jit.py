"""The one `njit` of the package: compiled once per machine, called without the GIL.

Numba's disk cache looks only at the file of the cached function: it would go on serving old
machine code after an edit in a function that was inlined from another file.  The cache folder of a
module is therefore named after a digest of its source and of all sources of this package that it
imports, directly or through others.  `NUMBA_CACHE_DIR` moves the folders, as usual.  Each compiled
kernel is a file of its own there (`_disk_cache`).

A source that was edited after the process began may differ from the code that the process runs,
and many kernels are made long after their module was imported.  Machine code of the old source must
not be kept under the new one's digest, nor the new one's be called by old Python code: as soon as
one of its sources has changed, a kernel is compiled for this process alone.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import bytecode, event

from nbflow_kernels import stepping
from nbflow_kernels._disk_cache import use_keyed_files
from nbflow_kernels._parts import PartCompiler
from nbflow_kernels.stepping import numba_config


def _name_apart() -> None:
    """Let the names of what this process compiles be no other process's.

    A compiled function is called by a name that has a number in it, which each process counts up
    from 1.  Kernels of one factory (a product for two formats) had the same name then when one was
    compiled here and the other one came from the disk, where another process had put it: asked for
    the address of the first, Numba gave the second's.
    """
    start = int.from_bytes(os.urandom(6), "little")
    bytecode.FunctionIdentity._unique_ids = itertools.count(start)


_name_apart()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_name_apart)

# No "nnan"/"ninf": masks are -inf and tests fill outputs with NaN.  No "reassoc": the order of
# additions is part of a kernel's contract (a row's result must not depend on its neighbours).
FAST_MATH = {"contract", "nsz"}

# Not in Numba's type hints.  Kernels are called from Python and by address, never as a C function;
# parts of kernels are not called from Python either.
_NO_C: Any = {"no_cfunc_wrapper": True}
_BARE: Any = {"no_cpython_wrapper": True, "pipeline_class": PartCompiler, **_NO_C}

_ROOT = Path(__file__).parent


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return when a file was last written and its size; None if it is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


# Of the files as this process began to import them; of others, when they were first looked at.
_stamps = {
    path: _stamp(path)
    for folder, _, names in os.walk(_ROOT)
    for path in (Path(folder, name) for name in names if name.endswith(".py"))
}
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(nbflow_kernels[.\w]*)[ \t]+import[ \t]*(\([^)]*\)|[^\n]*)"
    r"|import[ \t]+(nbflow_kernels[.\w]+))",
    re.MULTILINE,
)


def _file_of(module: str) -> Path | None:
    """Return the source file of a module of this package, if there is such a module."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    path = path / "__init__.py"
    return path if path.is_file() and path.parent != _ROOT else None


@functools.cache
def _source(path: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Return a file's bytes and the files of this package that it imports."""
    _stamps.setdefault(path, _stamp(path))
    source = path.read_bytes()
    found: set[Path] = set()
    for match in _IMPORT.finditer(source.decode()):
        package, names, module = match.groups()
        if module:
            found.add(_file_of(module) or path)
            continue
        for name in re.findall(r"\w+", re.sub(r"\bas\s+\w+|#[^\n]*", "", names)):
            found.add(_file_of(f"{package}.{name}") or _file_of(package) or path)
    return source, tuple(sorted(found - {path}))


@functools.cache
def _sources(path: Path) -> tuple[Path, ...]:
    """Return a module's file and the files of this package that it imports, also through others."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file not in seen:
            seen.add(file)
            waiting.extend(_source(file)[1])
    return tuple(sorted(seen, key=lambda f: (f != path, f)))


@functools.cache
def source_digest(path: Path) -> str:
    """Return the digest of a module's source and of what it imports from this package."""
    digest = hashlib.sha256()
    for file in _sources(path):
        digest.update(_source(file)[0])
    return digest.hexdigest()[:16]


def is_as_imported(path: Path) -> bool:
    """Return whether no source that a kernel of this module is made of was edited meanwhile."""
    return all(_stamp(file) == _stamps[file] for file in _sources(path))


def cache_root() -> Path:
    """Return the folder that holds the cache folders of all modules."""
    base = os.environ.get("NUMBA_CACHE_DIR")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nbflow"


def cache_folder(path: Path) -> Path:
    """Return the folder of compiled kernels of the module at `path`, for its present sources."""
    return cache_root() / f"{path.parent.name}.{path.stem}-{source_digest(path)}"


class _WithoutCollector(event.Listener):
    """Keeps Python's garbage collector off while Numba compiles, which takes a tenth less time.

    Compiling makes millions of objects that stay; the collector would go through them again and
    again.  Numba compiles one kernel at a time, under a lock, and the parts of it in between.
    """

    depth = 0
    was_on = False

    def on_start(self, event: Any) -> None:
        if self.depth == 0:
            self.was_on = gc.isenabled()
            gc.disable()
        self.depth += 1

    def on_end(self, event: Any) -> None:
        self.depth -= 1
        if self.depth == 0 and self.was_on:
            gc.enable()


event.register("numba:compile", _WithoutCollector())


def njit(function: Callable[..., Any]) -> Any:
    """Compile a module-level kernel lazily, cached on disk, without the GIL and without asserts."""
    return _compiled(function, FAST_MATH)


def strict_njit(function: Callable[..., Any]) -> Any:
    """Do as `njit`, but never fuse a product and a sum: for encoders whose bits are published."""
    return _compiled(function, False)


def _compiled(function: Callable[..., Any], fastmath: Any) -> Any:
    if stepping.is_on():
        return stepping.kernel(function)
    path = Path(function.__code__.co_filename)
    cached = is_as_imported(path)
    before = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = str(cache_folder(path))
    try:
        compiled = numba.njit(
            cache=cached, nogil=True, error_model="numpy", boundscheck=False, fastmath=fastmath,
            **_NO_C,
        )(function)  # fmt: skip
        if not cached:
            return compiled
        # what other files import from elsewhere is not in their digest
        folder = cache_folder(path) if path.is_relative_to(_ROOT) else None
        return use_keyed_files(compiled, lambda: is_as_imported(path), folder)
    finally:
        numba_config.CACHE_DIR = before


def part(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call: without wrappers and a cache entry of its own.

    It is part of the machine code of the kernel that calls it, which is what the cache holds.  This
    halves the time to compile a kernel that is made of many functions.
    """
    return numba.njit(
        nogil=True, error_model="numpy", boundscheck=False, fastmath=FAST_MATH, **_BARE
    )(function)


def inline(function: Callable[..., Any]) -> Any:
    """Compile a scalar helper into whichever kernel calls it (CPU and CUDA alike)."""
    return numba.njit(inline="always", error_model="numpy", fastmath=FAST_MATH)(function)


def helper(function: Callable[..., Any]) -> Any:
    """Compile a CPU helper once per process, and let LLVM put it into the kernels that call it.

    `inline` puts the helper's Python code into the caller, which is then typed as a whole: for
    helpers of helpers that takes several times as long.
    """
    return numba.njit(
        forceinline=True, error_model="numpy", fastmath=FAST_MATH, **_BARE
    )(function)  # fmt: skip


def strict_part(function: Callable[..., Any]) -> Any:
    """Do as `part`, but never fuse a product and a sum, like `strict_njit`."""
    return numba.njit(
        nogil=True, error_model="numpy", boundscheck=False, fastmath=False, **_BARE
    )(function)  # fmt: skip
