"""Compiled kernels on disk: a folder for each state of the sources, a file for each kernel.

Numba's disk cache looks only at the file of the cached function: it would go on serving old
machine code after an edit in a function that was inlined from another file.  The cache folder of a
module is therefore named after a digest of its source and of all sources of this package that it
imports, directly or through others.  `NUMBA_CACHE_DIR` moves the folders, as usual.

A source that was edited after the process began may differ from the code that the process runs,
and many kernels are made long after their module was imported.  Machine code of the old source must
not be kept under the new one's digest, nor the new one's be called by old Python code: as soon as
one of its sources has changed, a kernel is compiled for this process alone.

Numba keeps an index of the numbered files of a function.  Two processes that compile the same
function for different types at the same time both take the next number; afterwards the index may
name a file that holds the other's machine code, which then runs on the wrong types.  MPI ranks and
parallel tests do just that.  Here a file is named by what it was compiled for, says so inside, and
is put in its place by a rename; there is no index.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core import caching

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


def is_ours(path: Path) -> bool:
    """Return whether a source file belongs to this package."""
    return path.is_relative_to(_ROOT)


def cache_root() -> Path:
    """Return the folder that holds the cache folders of all modules."""
    base = os.environ.get("NUMBA_CACHE_DIR")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nbflow"


def cache_folder(path: Path) -> Path:
    """Return the folder of compiled kernels of the module at `path`, for its present sources."""
    return cache_root() / f"{path.parent.name}.{path.stem}-{source_digest(path)}"


class KeyedFiles(caching.IndexDataCacheFile):
    """The files of one function, in place of Numba's index and numbered files.

    Parameters
    ----------
    like : numba.core.caching.IndexDataCacheFile
        Numba's.
    may_save : callable
        Says whether the sources are still those that the folder is named after.
    """

    def __init__(
        self, like: caching.IndexDataCacheFile, may_save: Callable[[], bool] = lambda: True
    ) -> None:
        self._may_save = may_save
        self._cache_path = like._cache_path
        self._index_path = like._index_path
        self._base = Path(like._index_name).stem
        self._stamp = like._version, like._source_stamp

    def flush(self) -> None:
        """Forget everything."""
        for path in Path(self._cache_path).glob(f"{self._base}.*.nbc"):
            path.unlink(missing_ok=True)

    def save(self, key: Any, data: Any) -> None:
        """Write what was compiled for a key."""
        if not self._may_save():
            return
        content = self._dump((self._stamp, key, self._dump(data)))
        with self._open_for_write(str(self._path(key))) as file:
            file.write(content)

    def load(self, key: Any) -> Any:
        """Return what was compiled for a key, or None; a file that is broken counts as absent."""
        try:
            stamp, found, data = pickle.loads(self._path(key).read_bytes())
            return pickle.loads(data) if (stamp, found) == (self._stamp, key) else None
        except Exception:  # pickles of other programs, or cut off, can raise anything
            return None

    def _path(self, key: Any) -> Path:
        digest = hashlib.sha256(repr((self._stamp, key)).encode()).hexdigest()[:24]
        return Path(self._cache_path) / f"{self._base}.{digest}.nbc"


class _Locator(caching._CacheLocator):
    """Tells Numba's cache where the files of one function are.

    Parameters
    ----------
    function : callable
        The function.
    folder : Path
        Named after all sources that it is made of.
    by_time : bool
        Whether the folder is for one source file, and what was compiled from it at another time
        does not count.  Otherwise all copies of the sources share what one of them has compiled.
    """

    def __init__(self, function: Any, folder: Path, by_time: bool) -> None:
        self._py_file = function.__code__.co_filename
        self._line = function.__code__.co_firstlineno
        self._stamp: tuple[float, int] | None = None
        self._folder = folder
        if by_time:
            found = Path(self._py_file).stat()
            self._stamp = found.st_mtime, found.st_size
            self._folder /= self.get_suitable_cache_subpath(self._py_file)

    def get_cache_path(self) -> str:
        """Return the folder."""
        return str(self._folder)

    def get_source_stamp(self) -> Any:
        """Return what must be the same for a file to count."""
        return self._stamp

    def get_disambiguator(self) -> str:
        """Return what tells functions of one name apart."""
        return str(self._line)


class _Kernels(caching.CompileResultCacheImpl):
    """Numba's way to write a compiled function down, with a locator that is given."""

    def __init__(self, function: Any, locator: _Locator) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._locator = locator
        name = f"{Path(locator._py_file).stem}.{function.__qualname__}"
        self._filename_base = self.get_filename_base(name, getattr(sys, "abiflags", ""))


class KernelCache(caching.FunctionCache):
    """Numba's cache of a function, with `KeyedFiles` in a folder that is given.

    None of Numba's settings is touched, which other threads may use to make functions of theirs.

    Parameters
    ----------
    function : callable
        The function to be compiled.
    folder : Path
        A folder named after all sources that it is made of.
    may_save : callable
        Says whether the sources are still those that the folder is named after.
    by_time : bool
        Whether a file counts only for a source written at the same time.
    """

    def __init__(
        self, function: Any, folder: Path, may_save: Callable[[], bool], by_time: bool
    ) -> None:
        self._name = repr(function)
        self._py_func = function
        locator = _Locator(function, folder, by_time)
        self._impl = _Kernels(function, locator)
        self._cache_path = locator.get_cache_path()
        self._cache_file = KeyedFiles(
            caching.IndexDataCacheFile(
                self._cache_path, self._impl.filename_base, locator.get_source_stamp()
            ),
            may_save,
        )
        self.enable()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what was compiled for a signature; None if there is nothing that can be used."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # bytes that another program has left can do anything
            return None
