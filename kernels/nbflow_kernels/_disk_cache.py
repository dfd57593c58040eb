"""Compiled kernels on disk, a file for each, so that processes cannot mix them up.

Numba keeps an index beside the numbered files of a function.  Two processes that compile the same
function for different types at the same time both take the next number; afterwards the index may
name a file that holds the other's machine code, which then runs on the wrong types.  MPI ranks and
parallel tests do just that.  Here a file is named by what it was compiled for, says so inside, and
is put in its place by a rename; there is no index.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core import caching


class KeyedFiles(caching.IndexDataCacheFile):
    """The files of one function, in place of Numba's index and numbered files.

    Parameters
    ----------
    like : numba.core.caching.IndexDataCacheFile
        Numba's.
    may_save : callable
        Says whether the sources are still those that the folder is named after.
    folder : Path, optional
        A folder named after all sources.  Without it that of Numba is used, which looks at where
        the source is and when it was written: another checkout, or an installed wheel, would find
        nothing of what there is.
    """

    def __init__(
        self,
        like: caching.IndexDataCacheFile,
        may_save: Callable[[], bool] = lambda: True,
        folder: Path | None = None,
    ) -> None:
        self._may_save = may_save
        self._cache_path = like._cache_path if folder is None else str(folder)
        self._index_path = like._index_path
        self._base = Path(like._index_name).stem
        self._stamp = like._version, like._source_stamp if folder is None else None

    def flush(self) -> None:
        """Forget everything."""
        for path in Path(self._cache_path).glob(f"{self._base}.*.nbc"):
            path.unlink(missing_ok=True)

    def save(self, key: Any, data: Any) -> None:
        """Write what was compiled for a key."""
        if not self._may_save():
            return
        content = self._dump((self._stamp, key, self._dump(data)))  # type: ignore[no-untyped-call]
        with self._open_for_write(str(self._path(key))) as file:
            file.write(content)

    def load(self, key: Any) -> Any:
        """Return what was compiled for a key, or None; a file that is broken counts as absent."""
        try:
            stamp, found, data = pickle.loads(self._path(key).read_bytes())
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            return None
        return pickle.loads(data) if (stamp, found) == (self._stamp, key) else None

    def _path(self, key: Any) -> Path:
        digest = hashlib.sha256(repr((self._stamp, key)).encode()).hexdigest()[:24]
        return Path(self._cache_path) / f"{self._base}.{digest}.nbc"


def use_keyed_files(
    dispatcher: Any, may_save: Callable[[], bool], folder: Path | None = None
) -> Any:
    """Return a cached function of Numba after changing where its cache keeps its files."""
    cache = dispatcher._cache
    cache._cache_file = KeyedFiles(cache._cache_file, may_save, folder)
    return dispatcher
