"""Advisory locks of files between the processes of a machine."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]

LONGEST_WAIT_S = 120.0
"""Longest wait for another process; a stopped one would hold its lock for ever."""
_POLL_S = 0.005


class FileLock:
    """Lock that one process at a time holds; the file exists while it is held.

    Locks are best effort: without file locks, or in a read-only folder, everybody proceeds.

    Parameters
    ----------
    path : Path
        File to make; missing folders are made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def acquire(self) -> bool:
        """Acquire the lock, or give up after `LONGEST_WAIT_S`; return True after a wait."""
        if fcntl is None:
            return False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return False
        try:
            return self._wait()
        except BaseException:
            self._close()
            raise

    def _wait(self) -> bool:
        end, waited = time.monotonic() + LONGEST_WAIT_S, False
        while time.monotonic() < end:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return waited
            except BlockingIOError:
                waited = True
            except OSError:  # a file system without locks
                break
            time.sleep(_POLL_S)
        self._close()
        return waited

    def release(self) -> None:
        """Release the lock; a lock that is not held stays as it is."""
        if self._file >= 0:
            # A process that waits for the removed file acquires it, apart from later ones.
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
