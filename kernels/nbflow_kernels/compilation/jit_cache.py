"""Disk cache of compiled kernels, keyed by a digest of the sources and by the signature.

Numba's disk cache checks only the file of the cached function, so it would keep serving old machine
code after an edit in a function inlined from another file.  Here the cache folder of a module is
named after a digest of its source and of all sources of this package that it imports, directly or
indirectly.  `NUMBA_CACHE_DIR` moves the folders, as usual.

A source edited after the process started may differ from the running code.  Old machine code must
not be stored under the new digest, nor new machine code be called by old Python code: once a source
has changed, its kernels are compiled for this process only.

Numba numbers the cache files of a function in an index.  Two processes that compile a function for
different types at the same time, as MPI ranks and parallel tests do, take the same number, and the
index may then name the other's machine code.  Here files are named by their key, contain it, and
are written atomically by a rename, without an index.

A process that is about to compile an entry locks it; others that need the entry wait and load it.
The operating system drops the lock of a process that ends.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from numba.core import caching
from numba.core.serialize import dumps

from nbflow_kernels.compilation.file_lock import FileLock

_ROOT = Path(__file__).parents[1]


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return modification time and size of a file; None if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


# Stamps of sources when this module was imported; of other files, when `remember` first saw them.
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


@functools.cache
def _modules(root: Path) -> dict[str, Path]:
    """Return the source file of each module of a package, the package itself left out."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found.pop(root.name, None)
    return found


@functools.cache
def _source(path: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Return a file's bytes and the files of this package that it imports."""
    remember(path)
    source, modules = path.read_bytes(), _modules(_ROOT)
    found: set[Path] = set()
    for match in _IMPORT.finditer(source.decode()):
        package, names, module = match.groups()
        if module:
            found.add(modules.get(module, path))
            continue
        for name in re.findall(r"\w+", re.sub(r"\bas\s+\w+|#[^\n]*", "", names)):
            found.add(
                _modules(_ROOT).get(f"{package}.{name}") or _modules(_ROOT).get(package, path)
            )
    return source, tuple(sorted(found - {path}))


@functools.cache
def _sources(path: Path) -> tuple[Path, ...]:
    """Return a module's file and the files of this package that it imports, transitively."""
    seen: set[Path] = set()
    pending = [path]
    while pending:
        file = pending.pop()
        if file not in seen:
            seen.add(file)
            pending.extend(_source(file)[1])
    return tuple(sorted(seen, key=lambda f: (f != path, f)))


@functools.cache
def source_digest(path: Path) -> str:
    """Return the digest of a module's source and of its imports from this package."""
    digest = hashlib.sha256()
    for file in _sources(path):
        digest.update(_source(file)[0])
    return digest.hexdigest()[:16]


def remember(path: Path) -> None:
    """Take a file for the source of the code that is running, unless it is known already."""
    if path not in _stamps:
        _stamps[path] = _stamp(path)


def is_as_imported(path: Path) -> bool:
    """Return whether the sources of a module's kernels are unchanged since their import."""
    return all(_stamp(file) == _stamps[file] for file in _sources(path))


def is_ours(path: Path) -> bool:
    """Return whether a source file belongs to this package."""
    return path.is_relative_to(_ROOT)


def cache_root() -> Path:
    """Return the parent of all cache folders."""
    base = os.environ.get("NUMBA_CACHE_DIR")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nbflow"


def cache_folder(path: Path) -> Path:
    """Return the cache folder of the module at `path` for its current sources."""
    return cache_root() / f"{path.parent.name}.{path.stem}-{source_digest(path)}"


def lock_path(entry: Path) -> Path:
    """Return the lock file of an entry."""
    return entry.with_suffix(".lock")


class EntryKey(NamedTuple):
    """Key of a compiled kernel's entry point for Python."""

    kernel: Any
    """Key of the kernel."""
    name: str
    """Symbol of the kernel's machine code, which the entry point calls."""


class KeyedFiles(caching.IndexDataCacheFile):
    """Cache files of one function, replacing Numba's index and numbered files.

    Parameters
    ----------
    like : numba.core.caching.IndexDataCacheFile
        Numba's files, whose paths and stamp are used.
    may_save : callable
        Returns whether the sources still match the folder's digest.
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
        """Delete all entries of the function."""
        for path in Path(self._cache_path).glob(f"{self._base}.*.nb[ce]"):
            path.unlink(missing_ok=True)

    def save(self, key: Any, data: Any) -> None:
        """Write the entry of a key."""
        if not self._may_save():
            return
        content = self._dump((self._stamp, key, self._dump(data)))
        with self._open_for_write(str(self.path(key))) as file:
            file.write(content)

    def load(self, key: Any) -> Any:
        """Return the entry of a key; None if it is absent or broken."""
        try:
            stamp, found, data = pickle.loads(self.path(key).read_bytes())
            return pickle.loads(data) if (stamp, found) == (self._stamp, key) else None
        except Exception:  # truncated or foreign pickles can raise anything
            return None

    def lock(self, key: Any) -> FileLock | None:
        """Return the lock of a key's entry; None if no entry may be saved."""
        if not self._may_save():
            return None
        return FileLock(lock_path(self.path(key)))

    def path(self, key: Any) -> Path:
        """Return the file of a key's entry."""
        digest = hashlib.sha256(repr((self._stamp, key)).encode()).hexdigest()[:24]
        suffix = "nbe" if isinstance(key, EntryKey) else "nbc"
        return Path(self._cache_path) / f"{self._base}.{digest}.{suffix}"


class _Locator(caching._CacheLocator):
    """Location of one function's cache files, for Numba's cache.

    Parameters
    ----------
    function : callable
        The function.
    folder : Path
        Cache folder, named after a digest of the sources.
    by_time : bool
        Entries count only for a source file with the same path and modification time.  Otherwise
        all copies of the sources share entries.
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
        """Return the stamp that an entry must have to count."""
        return self._stamp

    def get_disambiguator(self) -> str:
        """Return the line, which distinguishes functions of one name."""
        return str(self._line)


class _Kernels(caching.CompileResultCacheImpl):
    """Numba's serialization of compiled functions, with a given locator."""

    def __init__(self, function: Any, locator: _Locator) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._locator = locator
        name = f"{Path(locator._py_file).stem}.{function.__qualname__}"
        self._filename_base = self.get_filename_base(name, getattr(sys, "abiflags", ""))

    def reduce(self, data: Any) -> Any:
        """Return what an entry contains, without the typed source text, which is slow to make."""
        return super().reduce(data._replace(type_annotation=""))


class KernelCache(caching.FunctionCache):
    """Numba's function cache with `KeyedFiles` in a given folder.

    It changes none of Numba's global settings, which other threads may be using.

    Parameters
    ----------
    function : callable
        The function to compile.
    folder : Path
        Cache folder, named after a digest of the sources.
    may_save : callable
        Returns whether the sources still match the folder's digest.
    by_time : bool
        Entries count only for a source with the same modification time.
    """

    _cache_file: KeyedFiles

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
        self._locks: list[FileLock] = []
        self.enable()

    def holds(self, sig: Any, target_context: Any) -> bool:
        """Return whether the folder has an entry of a signature, without loading it."""
        return self._entry(sig, target_context).exists()

    def is_locked(self, sig: Any, target_context: Any) -> bool:
        """Return whether a process has locked the entry of a signature."""
        return lock_path(self._entry(sig, target_context)).exists()

    def _entry(self, sig: Any, target_context: Any) -> Path:
        return self._cache_file.path(self._index_key(sig, target_context.codegen()))

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Return Numba's key, equal in all processes though factories define device functions.

        Numba tells these apart by a number, which each process draws.
        """
        code = hashlib.sha256(self._py_func.__code__.co_code).hexdigest()
        cells = hashlib.sha256(dumps(_cells(self._py_func))).hexdigest()
        return sig, codegen.magic_tuple(), (code, cells)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the entry of a signature; None if it is absent or unusable.

        If it is absent, the entry is locked until `save_overload` or `unlock`.  If another process
        is compiling it, wait for that.
        """
        found = self._load(sig, target_context)
        if found is not None:
            return found
        lock = self._cache_file.lock(self._index_key(sig, target_context.codegen()))
        if lock is not None and lock.acquire():
            found = self._load(sig, target_context)
        if lock is not None and found is None:
            self._locks.append(lock)
        elif lock is not None:
            lock.release()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the entry of a signature and unlock it; warn once if the folder is read-only."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_not_stored(cache_root(), error.strerror)
        finally:
            self.unlock()

    def load_entry(self, compiled: Any) -> Any:
        """Return the library of a compiled kernel's entry point for Python; None if absent."""
        codegen = compiled.target_context.codegen()
        found = self._cache_file.load(self._entry_key(compiled))
        try:
            return found and codegen.unserialize_library(found)
        except Exception:  # foreign bytes can raise anything
            return None

    def save_entry(self, compiled: Any, library: Any) -> None:
        """Write the library of a compiled kernel's entry point for Python."""
        with contextlib.suppress(OSError):  # `save_overload` warned
            self._impl.locator.ensure_cache_path()
            self._cache_file.save(self._entry_key(compiled), library.serialize_using_object_code())

    def _entry_key(self, compiled: Any) -> EntryKey:
        key = self._index_key(compiled.signature.args, compiled.target_context.codegen())
        return EntryKey(key, compiled.fndesc.mangled_name)

    def unlock(self) -> None:
        """Release the lock of the entry that was being compiled, if any."""
        if self._locks:
            self._locks.pop().release()

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # foreign bytes can raise anything
            return None


def _cells(function: Any) -> Any:
    """Return the values of a function's closure, this package's functions by their source."""
    if function.__closure__ is None:
        return ()
    return tuple(map(_by_source, (cell.cell_contents for cell in function.__closure__)))


def _by_source(value: Any) -> Any:
    """Return what identifies a compiled function of this package; any other value as it is."""
    function = getattr(value, "py_func", None)
    if function is None:
        return value
    path = Path(function.__code__.co_filename)
    if not is_ours(path) or not is_as_imported(path):
        return value
    # a factory may define functions of one name in several branches
    place = function.__qualname__, function.__code__.co_firstlineno
    return place, source_digest(path), function.__defaults__, _cells(function)


@functools.cache
def _warn_not_stored(folder: Path, reason: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be written to {folder} ({reason}), so each process compiles "
        "those that are missing there; set NUMBA_CACHE_DIR to a writable folder, or fill this one "
        "with `nbflow warm MODEL --to FOLDER`",
        stacklevel=2,
    )
