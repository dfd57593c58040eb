"""Points that need MPI ranks of their own: ``ranks`` in the sweep.

The launcher, one process without MPI, starts ``mpirun -n N`` for all points of N ranks and records
nothing itself as long as that goes well: the ranks are a launch of the sweep of their own
(`nbflow_experiments.sweep.sweep.run_group`), and the results folder is all that both look at.  If they
die, the point that was being run becomes a row with the last lines of their output, and they are
started again for the rest.  The end of their standard input asks them to stop after the present
step: so they also stop when the launcher is killed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nbflow.launch import PROGRAM as NBFLOW
from nbflow.supervise import LAUNCHERS
from nbflow_experiments.config.points import Point
from nbflow_experiments.files import read_object, write_json
from nbflow_experiments.store import provenance
from nbflow_experiments.store.results_folder import ResultsFolder
from nbflow_experiments.sweep.progress import Reporter
from nbflow_experiments.sweep.rank_barrier import StopRequest
from nbflow_experiments.sweep.resume_loop import End, Policy
from nbflow_experiments.sweep.subprocess_runner import START_S, oom_kills, record_death, tail_of
from nbflow_kernels.errors import UsageError, install_command

PROGRAM = (*NBFLOW, "sweep")
"""What each rank runs."""
POLL_S = 0.2
END_S = 3.0
"""Time between a polite signal and the last one."""
STOP_S = 60.0
"""How long ranks that were asked to stop may go on before they are ended."""


@dataclass(frozen=True)
class GroupJob:
    """What the ranks of a group are told, in a file."""

    folder: Path
    """The results folder."""
    launch: str
    """Name of their launch."""
    ranks: int
    """How many they are: ``ranks`` of their points."""
    points: tuple[Point, ...]
    """What to run, as it was frozen when the sweep began."""
    formats: tuple[Path, ...]
    """Files of weight formats, which every rank executes."""
    policy: Policy
    """What is done about points that fail."""
    tried: dict[str, int] = field(default_factory=dict)
    """How often points were tried before, by the name of their folder, where that is not 0."""

    def write(self, path: Path) -> None:
        """Write it for the ranks."""
        data = asdict(self) | {
            "folder": str(self.folder),
            "formats": [str(f) for f in self.formats],
        }
        for point in data["points"]:
            point["text"] = None if point["text"] is None else str(point["text"])
        write_json(path, data)

    @classmethod
    def read(cls, path: Path) -> GroupJob:
        """Return the job that a launcher has written."""
        data = read_object(path)
        points = []
        for point in data["points"]:
            text = None if point["text"] is None else Path(point["text"])
            points.append(Point(**point | {"text": text, "measures": tuple(point["measures"])}))
        return cls(
            Path(data["folder"]), data["launch"], data["ranks"], tuple(points),
            tuple(map(Path, data["formats"])), Policy(**data["policy"]), data["tried"],
        )  # fmt: skip


def command_of(launcher: str | None, ranks: int) -> list[str]:
    """Return the words that start a program on so many ranks.

    Parameters
    ----------
    launcher : str, optional
        What the user wants, with ``{ranks}`` in the place of the number, for example
        ``"srun -n {ranks}"``; by default the mpirun beside Python, or that of the PATH.
    ranks : int
        How many ranks.

    Raises
    ------
    UsageError
        If there is no such program, or `launcher` does not say how many ranks.
    """
    if launcher is None:
        beside = Path(sys.executable).with_name("mpirun")
        program = str(beside) if beside.is_file() else shutil.which("mpirun")
        if program is None:
            raise UsageError(
                f"points with ranks = {ranks} need mpirun, which is not installed: "
                f"{install_command('mpi')}; or name a launcher: --launcher 'srun -n {{ranks}}'"
            )
        return [program, "-n", str(ranks)]
    words = [word.replace("{ranks}", str(ranks)) for word in shlex.split(launcher)]
    if "{ranks}" not in launcher:
        raise UsageError(
            f"--launcher must say where the number of ranks goes, for example 'srun -n {{ranks}}'; "
            f"got {launcher!r}"
        )
    if shutil.which(words[0]) is None:
        raise UsageError(f"--launcher: there is no program {words[0]!r}")
    return words


def stop_at_end_of_input(stop: StopRequest) -> None:
    """Ask for a stop when standard input ends: the launcher closes it, or is gone."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        stop.asked = True

    threading.Thread(target=wait, name="launcher", daemon=True).start()


class GroupLauncher:
    """Starts the ranks of the points that need some.

    Parameters
    ----------
    folder : ResultsFolder
        Where the points are recorded.
    reporter : Reporter
        Shows progress.
    launcher : str, optional
        See `command_of`.
    policy : Policy
        What is done about failures.
    formats : sequence of Path
        Files of weight formats, which every rank executes.
    """

    def __init__(
        self,
        folder: ResultsFolder,
        reporter: Reporter,
        launcher: str | None,
        policy: Policy,
        formats: Sequence[Path],
    ) -> None:
        self.stop = StopRequest()
        self._folder = folder
        self._reporter = reporter
        self._launcher = launcher
        self._policy = policy
        self._formats = tuple(formats)

    def run(self, points: Sequence[Point]) -> End:
        """Run points, those of one number of ranks together; return why it ended."""
        numbers = list(dict.fromkeys(int(point.config["ranks"]) for point in points))
        groups = [[p for p in points if p.config["ranks"] == n] for n in numbers]
        if self._policy.isolates:
            groups = [[point] for group in groups for point in group]
        with self.stop.listen():
            for group in groups:
                end = self._run_group(group)
                if end != "all":
                    return end
        return "all"

    def _run_group(self, points: list[Point]) -> End:
        """Run points of one number of ranks, as often as their ranks die."""
        waiting, tried = list(points), dict[str, int]()
        while waiting:
            if self.stop.asked:
                return "interrupted"
            run = _Run(self._folder, self._reporter, self._job(waiting, tried), self._policy)
            run.watch(self._launcher, self.stop)
            waiting = run.missing()
            if run.ended_in_order:  # what is missing then is held by others, or not wanted any more
                failed = self._policy.fail_fast and run.has_failures
                return "interrupted" if self.stop.asked else "failed" if failed else "all"
            if self.stop.asked:
                return "interrupted"
            for point in run.blamed(waiting):
                attempt = tried[point.short] = tried.get(point.short, 0) + 1
                last = attempt > self._policy.retries
                run.record(point, attempt, last=last)
                if last:
                    waiting.remove(point)
                    if self._policy.fail_fast:
                        return "failed"
        return "all"

    def _job(self, points: Sequence[Point], tried: dict[str, int]) -> GroupJob:
        """Return what the ranks are told; time and isolation are this process's business."""
        return GroupJob(
            self._folder.path.absolute(),
            provenance.launch_name(),
            int(points[0].config["ranks"]),
            tuple(points),
            self._formats,
            Policy(self._policy.retries, self._policy.fail_fast),
            dict(tried),
        )


class _Run:
    """One start of the ranks of a group."""

    def __init__(
        self, folder: ResultsFolder, reporter: Reporter, job: GroupJob, policy: Policy
    ) -> None:
        self._folder = folder
        self._reporter = reporter
        self._job = job
        self._points = job.points
        self._timeout_s = policy.timeout_s
        self._begun_before = {p.short: self._begun(p) for p in job.points}
        self._running: Point | None = None
        self._told: set[str] = set()
        self._since = 0.0
        self._late = False
        self._kills = oom_kills()
        self._code = 0
        self._tail = ""

    @property
    def ended_in_order(self) -> bool:
        """Whether the ranks came to the end of their work, whatever became of the points."""
        path = self._folder.path / "launches" / f"{self._job.launch}.json"
        launch = self._folder.launch(path)
        return not self._late and launch is not None and bool(launch.get("finished"))

    @property
    def has_failures(self) -> bool:
        """Whether some of the points that were run did not succeed."""
        results = [self._result(p) for p in self._points]
        return any(r is not None and r["status"] != "done" for r in results)

    def missing(self) -> list[Point]:
        """Return the points that the ranks have not recorded."""
        return [p for p in self._points if self._result(p) is None]

    def blamed(self, missing: Sequence[Point]) -> list[Point]:
        """Return the point that was being run when the ranks died; all if none had begun."""
        begun = [p for p in missing if self._begun(p) != self._begun_before[p.short]]
        return begun or list(missing)

    def record(self, point: Point, attempt: int, *, last: bool) -> None:
        """Record a point whose ranks have died."""
        ranks = self._job.ranks
        who = f"the {ranks} ranks of the point"
        if self._late:
            kind, message = "Timeout", f"ended after {self._timeout_s:g} s (--timeout)"
        elif oom_kills() > self._kills:
            kind, message = "OutOfMemory", "the system ended a rank: memory ran out"
        elif self._code < 0:
            name = signal.Signals(-self._code).name
            kind, message = "ProcessDied", f"{who} were ended by {name}"
        else:
            kind, message = "ProcessDied", f"{who} ended with exit code {self._code}"
        told = record_death(
            self._folder, point, self._job.launch, attempt, kind, message, self._tail,
            time.monotonic() - self._since, list(range(ranks)),
        )  # fmt: skip
        self._reporter.ends(point, told, last=last)

    def watch(self, launcher: str | None, stop: StopRequest) -> None:
        """Start the ranks and wait for their end, showing what they have recorded."""
        environment = {k: v for k, v in os.environ.items() if k not in sum(LAUNCHERS, ())}
        with tempfile.TemporaryDirectory(prefix="nbflow-") as temporary:
            job, output = Path(temporary) / "job.json", Path(temporary) / "output"
            self._job.write(job)
            words = [*command_of(launcher, self._job.ranks), *PROGRAM, "--group", str(job)]
            self._since = time.monotonic()
            with output.open("wb") as stream:
                process = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.STDOUT,
                    env=environment, start_new_session=True,
                )  # fmt: skip
                try:
                    self._wait(process, stop)
                finally:
                    _end(process)
            self._code, self._tail = process.returncode, tail_of(output)
        self._look()

    def _wait(self, process: subprocess.Popen[bytes], stop: StopRequest) -> None:
        """Wait for the end of the ranks; see to it where it does not come."""
        assert process.stdin is not None
        seconds = float("inf") if self._timeout_s is None else self._timeout_s
        asked_at = 0.0
        while process.poll() is None:
            self._look()
            now = time.monotonic()
            start = 0.0 if self._running is not None else START_S
            is_over = self._running is not None and self._running.short in self._told
            if now - self._since > seconds + start and not is_over:
                self._late = True
                return
            if stop.asked and not asked_at:
                asked_at = now
                process.stdin.close()
            if asked_at and now - asked_at > STOP_S:
                return
            try:
                process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue

    def _look(self) -> None:
        """Show which points have begun or been recorded since the last look."""
        for point in self._points:
            if point.short in self._told:
                continue
            if self._begun(point) != self._begun_before[point.short] and point != self._running:
                self._running, self._since = point, time.monotonic()
                self._reporter.begins(point)
            result = self._result(point)
            if result is not None:
                self._told.add(point.short)
                self._reporter.ends(point, result)

    def _begun(self, point: Point) -> int:
        """Return when a point was begun last, by the clock of the file system; 0 if never."""
        path = self._folder.folder(point.short) / "config.json"
        return path.stat().st_mtime_ns if path.is_file() else 0

    def _result(self, point: Point) -> dict[str, Any] | None:
        """Return what these ranks have recorded of a point."""
        result = self._folder.result(point.short)
        return result if result and result["launch"] == self._job.launch else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher of ranks, and with it the ranks, if it has not ended."""
    if process.stdin is not None:
        process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                continue
    process.wait()
