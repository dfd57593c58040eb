"""Bytes of weights that this process has read while it loads models, for progress bars."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class LoadProgress:
    """Sums over the ranks of this process that read weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, tuple[int, Callable[[], int]]] = {}
        self._finished = 0
        self._next = 0

    def bytes(self) -> tuple[int, int]:
        """Return the bytes that have been read, and the bytes to read in all."""
        with self._lock:
            running = [(total, min(total, done())) for total, done in self._running.values()]
        read = self._finished + sum(done for _, done in running)
        return read, self._finished + sum(total for total, _ in running)

    @contextlib.contextmanager
    def reading(self, total: int, done: Callable[[], int]) -> Iterator[None]:
        """Count `total` bytes, of which ``done()`` have been read, until the block ends."""
        with self._lock:
            key = self._next = self._next + 1
            self._running[key] = total, done
        try:
            yield
        finally:
            with self._lock:
                del self._running[key]
                self._finished += total

    def reset(self) -> None:
        """Forget the finished ones: another model begins."""
        with self._lock:
            self._finished = 0


progress = LoadProgress()
"""Progress of this process."""
