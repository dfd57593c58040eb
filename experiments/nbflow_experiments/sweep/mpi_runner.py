"""Execution of points in subprocesses, or on MPI ranks started by this process.

The parent starts ``nbflow sweep --group JOB``, under mpirun for points with ``ranks``, and follows
it in the results folder.  All points of one number of ranks run on the same ranks; isolated points
run one by one.  If the process dies, the point that it measured becomes a row with the last lines
of its output, and another process continues with the rest.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nbflow.distributed.launch import PROGRAM as NBFLOW
from nbflow.distributed.launch import find_mpirun
from nbflow_experiments.config.points import Point
from nbflow_experiments.store import provenance
from nbflow_experiments.store.json_files import read_object, write_json
from nbflow_experiments.store.results_folder import ResultsFolder
from nbflow_experiments.sweep.point_lock import PointLocks
from nbflow_experiments.sweep.progress import Reporter
from nbflow_experiments.sweep.rank_barrier import StopRequest
from nbflow_experiments.sweep.resume_loop import End, Policy
from nbflow_experiments.sweep.subprocess_runner import ProcessEnd, record_death, run_process
from nbflow_kernels.errors import MissingExtraError, UsageError

PROGRAM = (*NBFLOW, "sweep")
"""The command of each process."""
START_S = 120.0
"""Time that the start of a process may take in addition to its point's time limit."""


@dataclass(frozen=True)
class Job:
    """Job file: points for one process or one group of ranks."""

    folder: Path
    launch: str
    ranks: int
    """Number of MPI ranks; 0: a subprocess without MPI, part of its parent's launch."""
    points: tuple[Point, ...]
    plugins: tuple[str, ...]
    policy: Policy
    before: Mapping[str, str | None]
    """Launch that wrote the earlier result of each point (`PointLocks`)."""
    tried: Mapping[str, int]
    """Earlier attempts, by the name of the point's folder, where there were any."""

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        data = asdict(self) | {"folder": str(self.folder), "plugins": list(self.plugins)}
        for point in data["points"]:
            point["text"] = None if point["text"] is None else str(point["text"])
        write_json(path, data)

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job written by `write`."""
        data = read_object(path)
        points = []
        for point in data.pop("points"):
            text = None if point["text"] is None else Path(point["text"])
            lists = {name: tuple(point[name]) for name in ("measures", "plugins_sha256")}
            points.append(Point(**point | {"text": text, **lists}))
        return cls(**data | {
            "folder": Path(data["folder"]), "points": tuple(points),
            "plugins": tuple(data["plugins"]), "policy": Policy(**data["policy"]),
        })  # fmt: skip


def command_of(launcher: str | None, ranks: int) -> list[str]:
    """Return the command prefix that starts a program on MPI ranks.

    Parameters
    ----------
    launcher : str, optional
        A command with ``{ranks}`` in place of their number, for example
        ``"srun -n {ranks}"``; by default mpirun.
    ranks : int
        Number of ranks.
    """
    if launcher is None:
        try:
            return [find_mpirun(), "-n", str(ranks)]
        except MissingExtraError as error:
            raise UsageError(
                f"points with ranks = {ranks} need mpirun: {error}; or name a launcher: "
                f"--launcher 'srun -n {{ranks}}'"
            ) from None
    words = [word.replace("{ranks}", str(ranks)) for word in shlex.split(launcher)]
    if "{ranks}" not in launcher:
        raise UsageError(
            f"--launcher must say where the number of ranks goes, for example 'srun -n {{ranks}}'; "
            f"got {launcher!r}"
        )
    if shutil.which(words[0]) is None:
        raise UsageError(f"--launcher: the program {words[0]!r} does not exist")
    return words


@dataclass
class ProcessRunner:
    """Runs points in subprocesses or on new MPI ranks."""

    folder: ResultsFolder
    reporter: Reporter
    launch: str
    """Name of the launch for points without MPI ranks; each start of ranks is a launch."""
    plugins: tuple[str, ...]
    before: dict[str, str | None]
    """See `PointLocks`."""
    policy: Policy
    launcher: str | None
    """See `command_of`."""
    stop: StopRequest = field(default_factory=StopRequest)

    def run(self, points: Sequence[Point]) -> End:
        """Run points, grouped by number of ranks; return the reason of the end."""
        groups: dict[object, list[Point]] = {}
        for point in points:
            key = point.id if self.policy.isolates else point.config["ranks"]
            groups.setdefault(key, []).append(point)
        with self.stop.listen():
            for group in groups.values():
                end = self._run_group(group)
                if end != "all":
                    return end
        return "all"

    def _run_group(self, waiting: list[Point]) -> End:
        """Run points of one number of ranks, restarting the process after each crash."""
        tried = dict[str, int]()
        while waiting:
            if self.stop.asked:
                return "interrupted"
            job = self._job(waiting, tried)
            end = self._run_job(job)
            results = [self._result(p, job) for p in waiting]
            waiting = [p for p, result in zip(waiting, results, strict=True) if result is None]
            if end.code in (0, 130):  # another launch measures the remaining points
                failed = any(r and r["status"] != "done" for r in results)
                stopped = self.stop.asked or end.code == 130
                return (
                    "interrupted" if stopped
                    else "failed" if failed and self.policy.fail_fast
                    else "all"
                )  # fmt: skip
            if self.stop.asked and not end.late:
                return "interrupted"
            locks = PointLocks(self.folder, job.launch, {})
            for point in [p for p in waiting if locks.was_measuring(p)] or list(waiting):
                if not self._record(point, job, end, tried):
                    waiting.remove(point)
                    if self.policy.fail_fast:
                        return "failed"
        return "all"

    def _record(self, point: Point, job: Job, end: ProcessEnd, tried: dict[str, int]) -> bool:
        """Record a point whose process died; return whether to retry it."""
        before = self.folder.result(point.short) or {}
        counted = before["attempt"] if before.get("launch") == job.launch else 0
        attempt = tried[point.short] = max(counted, tried.get(point.short, 0)) + 1
        last = attempt > self.policy.retries
        subject = f"the job of {job.ranks} MPI ranks" if job.ranks else "the process of the point"
        cause = end.cause(subject, self.policy.timeout_s)
        ranks = range(job.ranks or 1)
        recorded = record_death(self.folder, point, job.launch, attempt, end, cause, ranks)
        self.before[point.short] = job.launch
        self.reporter.ends(point, recorded, last=last)
        return not last

    def _job(self, points: Sequence[Point], tried: Mapping[str, int]) -> Job:
        ranks = int(points[0].config["ranks"])
        policy = self.policy
        return Job(
            self.folder.path.absolute(),
            provenance.launch_name() if ranks else self.launch,
            ranks,
            tuple(points),
            self.plugins,
            Policy(policy.retries, policy.fail_fast, timeout_s=policy.timeout_s),
            {p.short: self.before.get(p.short) for p in points},
            dict(tried),
        )

    def _run_job(self, job: Job) -> ProcessEnd:
        """Run a job to its end and report recorded points."""
        locks = PointLocks(self.folder, job.launch, {})
        shown: set[str] = set()
        running: Point | None = None

        def poll() -> None:
            nonlocal running
            for point in [p for p in job.points if p.short not in shown]:
                if point != running and locks.was_measuring(point):
                    running = point
                    self.reporter.begins(point)
                result = self._result(point, job)
                if result is not None:
                    shown.add(point.short)
                    self.reporter.ends(point, result)

        limit = self.policy.timeout_s
        with tempfile.TemporaryDirectory(prefix="nbflow-") as temporary:
            path = Path(temporary) / "job.json"
            job.write(path)
            ranks = command_of(self.launcher, job.ranks) if job.ranks else []
            words = [*ranks, *PROGRAM, "--group", str(path)]
            limit_s = None if limit is None else START_S + limit * (1 + self.policy.retries)
            return run_process(words, path.parent, self.stop, poll, limit_s)

    def _result(self, point: Point, job: Job) -> dict[str, Any] | None:
        """Return the result of the last attempt that a job made at a point."""
        result = self.folder.result(point.short)
        if not result or result["launch"] != job.launch:
            return None
        if result["attempt"] <= job.tried.get(point.short, 0):
            return None
        final = result["status"] == "done" or result["attempt"] > self.policy.retries
        return result if final else None
