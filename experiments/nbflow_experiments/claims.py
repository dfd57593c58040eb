"""Who runs which point, where several launches write to one results folder.

A launch claims a point before it runs it, with a file ``claims/<point>.<n>.json`` that only one
launch can create.  It says which process on which host holds it, and the holder touches it every
few seconds.  A claim whose process is gone, or that nobody has touched for long, is taken over by
creating the file with the next number: of two launches that try, one succeeds.  Claims are never
deleted, so a number is never given twice.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nbflow_experiments.files import DamagedFileError, read_object, write_json
from nbflow_experiments.store.provenance import now

HEARTBEAT_S = 10.0
"""Pause between two signs of life."""
STALE_S = 120.0
"""Age of the last sign of life at which a claim of another machine counts as abandoned."""


_CLAIM = {"host": str, "scope": str, "pid": int, "started": str, "released": bool}


@dataclass(frozen=True)
class Holder:
    """A process that holds claims."""

    launch: str
    """Name of its launch."""
    host: str
    """Its machine, for people."""
    scope: str
    """Where `pid` means something: the machine since it was started, and the container on it."""
    pid: int
    """Its number."""
    started: str
    """When the system started it, in the system's own words: numbers are used again."""


def this_process(launch: str) -> Holder:
    """Return the present process as the holder of the claims of a launch."""
    host = socket.gethostname()
    return Holder(launch, host, _scope(host), os.getpid(), _started(os.getpid()))


def _scope(host: str) -> str:
    """Return the machine, its present run and the process namespace, as far as they can be told."""
    parts = [host]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: int) -> str:
    """Return when a process was started, in ticks since the machine was.

    Empty if that is unknown, or the process has ended and only waits for its parent to notice.
    """
    with contextlib.suppress(OSError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()  # from the third on; names may hold brackets
        return "" if fields[0] in "ZX" else fields[19]
    return ""


class Claims:
    """The claims of one launch on the points of a results folder.

    Parameters
    ----------
    folder : Path
        ``<results>/claims``.
    launch : str
        Name of the launch, unique in the folder.
    """

    def __init__(self, folder: Path, launch: str) -> None:
        self._folder = folder
        self._me = this_process(launch)
        self._held: Path | None = None

    def take(self, point: str) -> bool:
        """Claim a point; return whether it is ours now.

        False means that another launch holds it, or was quicker.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        last = self._last(point)
        if last is not None and self._is_held(last):
            return False
        number = 0 if last is None else _number(last) + 1
        path = self._folder / f"{point}.{number}.json"
        handle, name = tempfile.mkstemp(prefix=".claim.", suffix=".part", dir=self._folder)
        os.close(handle)
        try:
            write_json(Path(name), {**asdict(self._me), "claimed": now(), "released": False})
            os.link(name, path)  # fails where the name exists, also on network file systems
        except FileExistsError:
            return False
        finally:
            Path(name).unlink(missing_ok=True)
        self._held = path
        return True

    def release(self) -> None:
        """Give the claim that is held back."""
        path, self._held = self._held, None
        if path is not None:
            claim = self._claim(path) or asdict(self._me)
            try:
                write_json(path, {**claim, "released": True})
            except OSError:  # a full disk, on which a file can still be deleted
                path.unlink(missing_ok=True)

    def touch(self) -> None:
        """Give a sign of life."""
        path = self._held
        if path is not None:
            with contextlib.suppress(OSError):  # the folder may be away for a moment
                os.utime(path)

    def is_ours(self, point: str) -> bool:
        """Return whether nobody has taken the point over in the meantime."""
        return self._held is not None and self._last(point) == self._held

    def holder(self, point: str) -> str | None:
        """Return ``host, process N`` of the other launch that holds a point, None if none does."""
        last = self._last(point)
        if last is None or not self._is_held(last):
            return None
        claim = self._claim(last)
        return f"{claim['host']}, process {claim['pid']}" if claim else f"{last} is damaged"

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Give signs of life from a thread while the block runs."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(HEARTBEAT_S):
                self.touch()

        thread = threading.Thread(target=beat, name="claims", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _last(self, point: str) -> Path | None:
        """Return the claim on a point that counts: the one with the highest number."""
        return max(self._folder.glob(f"{point}.*.json"), key=_number, default=None)

    def _is_held(self, path: Path) -> bool:
        """Return whether the process behind a claim still works on it."""
        data = self._claim(path)
        if data is None:  # who holds it is unknown: signs of life count
            return self._age_s(path) < STALE_S
        if data["released"]:
            return False
        if data["scope"] == self._me.scope:
            started = _started(data["pid"])
            if started or Path("/proc/self/stat").exists():
                return bool(started == data["started"])
        return self._age_s(path) < STALE_S

    def _claim(self, path: Path) -> dict[str, Any] | None:
        """Return what a claim says, None if it is damaged."""
        try:
            return read_object(path, _CLAIM)
        except DamagedFileError:
            return None

    def _age_s(self, path: Path) -> float:
        """Return how long ago a file was touched, by the clock of the file system."""
        with tempfile.NamedTemporaryFile(prefix=".now.", dir=self._folder) as fresh:
            return os.stat(fresh.name).st_mtime - path.stat().st_mtime


def _number(path: Path) -> int:
    """Return the number of a claim."""
    match = re.search(r"\.(\d+)\.json$", path.name)
    assert match is not None
    return int(match[1])
