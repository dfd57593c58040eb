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
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock

from nbflow_kernels import stepping
from nbflow_kernels._disk_cache import KernelCache
from nbflow_kernels._parts import KernelCompiler, PartCompiler
from nbflow_kernels.forks import around_fork

# A child that is forked while another thread compiles would wait for that thread for ever: the fork
# waits instead.  Nothing is compiled without this lock of Numba's.
around_fork(global_compiler_lock.acquire, global_compiler_lock.release)

# No "nnan"/"ninf": masks are -inf and tests fill outputs with NaN.  No "reassoc": the order of
# additions is part of a kernel's contract (a row's result must not depend on its neighbours).
FAST_MATH = {"contract", "nsz"}

# Not in Numba's type hints.  Kernels are called from Python and by address, never as a C function;
# parts of kernels are not called from Python either.
_NO_C: Any = {"no_cfunc_wrapper": True}
_KERNEL: Any = {"pipeline_class": KernelCompiler, **_NO_C}
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
    compiled = numba.njit(
        nogil=True, error_model="numpy", boundscheck=False, fastmath=fastmath, **_KERNEL
    )(function)  # fmt: skip
    if is_as_imported(path):
        # what other files import from elsewhere is not in their digest
        is_ours = path.is_relative_to(_ROOT)
        may_save = functools.partial(is_as_imported, path)
        compiled._cache = KernelCache(function, cache_folder(path), may_save, not is_ours)
    return compiled


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
