"""File locks on points, so that two launches on one results folder never measure the same point.

A launch holds ``locks/<point>.lock`` while it measures the point; the system releases the lock when
the process ends, however it ends.  ``locks/<point>.json`` names the holder: it is written after the
lock was acquired and removed before the release, so a file without a lock is that of a crash.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbflow_experiments.config.points import Point
from nbflow_experiments.optional_packages import require
from nbflow_experiments.store import provenance
from nbflow_experiments.store.json_files import DamagedFileError, read_object, write_json
from nbflow_experiments.store.results_folder import ResultsFolder


class PointLocks:
    """Point locks of one launch; rank 0 only."""

    def __init__(
        self, folder: ResultsFolder, launch: str, before: Mapping[str, str | None]
    ) -> None:
        self._folder = folder
        self._launch = launch
        self._before = before
        self._held: tuple[Any, Path] | None = None

    def acquire(self, point: Point) -> bool:
        """Lock a point, unless another launch measures it or has finished it since planning."""
        lock = self._lock(point)
        try:
            lock.acquire()
        except require("filelock").Timeout:
            return False
        if result_launch(self._folder, point) != self._before.get(point.short):
            lock.release()
            return False
        holder = self._path(point, "json")
        self._held = lock, holder
        facts = {"launch": self._launch, "host": socket.gethostname(), "pid": os.getpid()}
        write_json(holder, facts | {"since": provenance.now()})
        return True

    def release(self) -> None:
        """Release the held lock."""
        held, self._held = self._held, None
        if held is not None:
            held[1].unlink(missing_ok=True)
            held[0].release()

    def was_measuring(self, point: Point) -> bool:
        """Return whether this launch holds the point, or died while it measured it."""
        return self._holder(point).get("launch") == self._launch

    def other_holders(self, points: Sequence[Point]) -> list[str]:
        """Return ``host, process N`` for each point that another launch measures now."""
        holders = [self._holder(point) for point in points if self._is_locked(point)]
        return [f"{h.get('host', '?')}, process {h.get('pid', '?')}" for h in holders]

    def _holder(self, point: Point) -> dict[str, Any]:
        """Return the content of the holder's file; empty without one."""
        try:
            return read_object(self._path(point, "json"))
        except (DamagedFileError, OSError):
            return {}

    def _is_locked(self, point: Point) -> bool:
        if not self._path(point, "lock").exists():
            return False
        lock = self._lock(point)
        try:
            lock.acquire()
        except require("filelock").Timeout:
            return True
        lock.release()
        return False

    def _lock(self, point: Point) -> Any:
        path = self._path(point, "lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        return require("filelock").FileLock(path, timeout=0)

    def _path(self, point: Point, suffix: str) -> Path:
        return self._folder.path / "locks" / f"{point.short}.{suffix}"


def result_launch(folder: ResultsFolder, point: Point) -> str | None:
    """Return the launch that wrote the result of a point, None without a result."""
    result = folder.result(point.short)
    return None if result is None else str(result["launch"])
