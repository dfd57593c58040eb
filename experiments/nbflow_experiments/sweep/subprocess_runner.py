"""Points in processes of their own: one that crashes, hangs or eats the memory ends alone.

Each point runs in a fresh interpreter, which records it as always.  If that process dies or is
ended before it has, this one records the point, with the last lines of what the process printed.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from nbflow.supervise import LAUNCHERS
from nbflow_experiments import backend
from nbflow_experiments.config.points import Point
from nbflow_experiments.store import provenance
from nbflow_experiments.store.results_folder import ResultsFolder
from nbflow_experiments.sweep.point_runner import Runner
from nbflow_experiments.sweep.point_status import bits_per_weight, new_result
from nbflow_experiments.sweep.progress import Reporter, SilentReporter
from nbflow_experiments.sweep.rank_barrier import Interrupted, StopRequest

POLL_S = 0.2
START_S = 120.0
"""How long a process may take to start before the time of its point counts all the same."""
TAIL_BYTES = 8192
"""How much of a dead process's output is kept."""


@dataclass(frozen=True)
class _Job:
    """What the process of a point is told."""

    folder: Path
    launch: str
    formats: tuple[Path, ...]
    point: Point
    attempt: int
    output: Path
    """Where its standard output and error go."""


class IsolatedRunner:
    """Runs each point in a process of its own; for launches of one rank.

    Parameters
    ----------
    folder : ResultsFolder
        Where the points are recorded.
    reporter : Reporter
        Shows progress.
    launch : str
        Name of this launch in the provenance.
    formats : sequence of Path
        Files of weight formats, which each process executes.
    timeout_s : float, optional
        After how many seconds a point is ended; the start of its process does not count.
    """

    def __init__(
        self,
        folder: ResultsFolder,
        reporter: Reporter,
        launch: str,
        formats: Sequence[Path],
        timeout_s: float | None,
    ) -> None:
        self.stop = StopRequest()
        self._folder = folder
        self._reporter = reporter
        self._launch = launch
        self._formats = tuple(formats)
        self._timeout_s = timeout_s

    def run_point(self, point: Point, attempt: int, *, last: bool) -> str:
        """Run a point in a new process; return its status."""
        if self.stop.asked:
            raise Interrupted
        self._reporter.begins(point)
        self._folder.write_config(point)
        start, kills = time.perf_counter(), oom_kills()
        with tempfile.TemporaryDirectory(prefix="nbflow-") as temporary:
            output = Path(temporary) / "output"
            job = _Job(
                self._folder.path, self._launch, self._formats, point, attempt, output.absolute()
            )
            told, code, late = self._watch(job)
            tail = tail_of(output)
        if told is None:
            if self.stop.asked and not late:
                raise Interrupted
            out_of_memory = code == -signal.SIGKILL and oom_kills() > kills
            kind, message = self._cause(code, late, out_of_memory)
            seconds = time.perf_counter() - start
            told = record_death(
                self._folder, point, self._launch, attempt, kind, message, tail, seconds, [0]
            )
        self._reporter.ends(point, told, last=last)
        return str(told["status"])

    def close(self) -> None:
        """Do nothing: every process has ended."""

    def _watch(self, job: _Job) -> tuple[dict[str, Any] | None, int, bool]:
        """Run a job; return its result if it lived to tell, its exit code, and whether it was late.

        Asked to stop, it asks the process to, which ends after its present step.
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(theirs, job), daemon=True)
        with _safe_path():
            process.start()
        theirs.close()
        told: dict[str, Any] | None = None
        late = asked = False
        seconds = math.inf if self._timeout_s is None else self._timeout_s
        deadline, alive = time.monotonic() + START_S + seconds, True
        while alive:
            alive = process.is_alive()  # before the look at what it has sent
            with contextlib.suppress(EOFError, OSError):
                while ours.poll():
                    message = ours.recv()
                    if message is None:
                        deadline = time.monotonic() + seconds
                    else:
                        told = message
            if self.stop.asked and not asked:
                asked = True
                process.terminate()
            if time.monotonic() > deadline and told is None:
                late = True
                process.kill()
            if alive:
                wait([process.sentinel], POLL_S)
        process.join()
        ours.close()
        return told, process.exitcode or 0, late and told is None

    def _cause(self, code: int, late: bool, out_of_memory: bool) -> tuple[str, str]:
        """Return what is known about the end of a process: a kind of error and a message."""
        if late:
            return "Timeout", f"ended after {self._timeout_s:g} s (--timeout)"
        if out_of_memory:
            return "OutOfMemory", "the system ended the process: memory ran out"
        if code < 0:
            name = signal.Signals(-code).name
            return "ProcessDied", f"the process of the point was killed by {name}"
        return "ProcessDied", f"the process of the point ended with exit code {code}"


def record_death(
    folder: ResultsFolder,
    point: Point,
    launch: str,
    attempt: int,
    kind: str,
    message: str,
    tail: str,
    seconds: float,
    ranks: list[int],
) -> dict[str, Any]:
    """Record a point whose processes could not do so themselves; return the result.

    `kind` is Timeout, OutOfMemory or ProcessDied; `tail` the end of what they have printed.
    """
    result = new_result(point, launch, attempt)
    result["status"] = {"Timeout": "timeout", "OutOfMemory": "oom"}.get(kind, "failed")
    result["error"] = {"type": kind, "message": message, "traceback": tail, "ranks": ranks}
    result["finished"] = provenance.now()
    result["wall_s"] = seconds
    result["steps_s"] = {}
    result["bits_per_weight"] = bits_per_weight(point, {})
    result["readings"] = []
    folder.write_config(point)
    folder.write_result(point.short, result, f"{result['finished']} {message}\n{tail}", {})
    return result


def _main(connection: Connection, job: _Job) -> None:
    """Run one point; the whole life of its process."""
    with job.output.open("wb") as stream:
        for standard in (1, 2):
            os.dup2(stream.fileno(), standard)
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches the parent only, which tells us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for names in LAUNCHERS:  # one rank that mpirun started is no reason to start MPI here
        for name in names:
            os.environ.pop(name, None)
    folder = ResultsFolder(job.folder)
    for file in job.formats:
        backend.load_formats(file)
    runner = Runner(backend.Alone(), folder, SilentReporter((), 1), job.launch)
    connection.send(None)  # the time begins to count
    with runner.stop.listen():
        try:
            runner.run_point(job.point, job.attempt, last=True)
        except Interrupted:
            sys.exit(130)
        finally:
            runner.close()
    result = folder.result(job.point.short) or {}
    connection.send({name: result[name] for name in ("status", "error", "wall_s")})


def _end_with_parent() -> None:
    """End this process when the one that started it has gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)  # files are whole at any time


def tail_of(path: Path) -> str:
    """Return the end of what a process has printed."""
    if not path.is_file():
        return ""
    return path.read_bytes()[-TAIL_BYTES:].decode(errors="replace")


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Keep the modules of the current folder out of the processes that are started."""
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def oom_kills() -> int:
    """Return how many processes the system has killed for memory; 0 where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
