"""A sweep from its file to its results folder."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbflow_experiments import backend
from nbflow_experiments.config.points import Point, check_world, estimate_bytes, make_points
from nbflow_experiments.config.sweep_file import Sweep, load_sweep, sweep_of_lists
from nbflow_experiments.files import write_json
from nbflow_experiments.measures import METRICS_VERSION, needs_reference
from nbflow_experiments.optional_packages import require
from nbflow_experiments.store import provenance
from nbflow_experiments.store.results_folder import SCHEMA_VERSION, ResultsFolder
from nbflow_experiments.store.summary import write_summaries
from nbflow_experiments.sweep.mpi_runner import (
    GroupJob,
    GroupLauncher,
    command_of,
    stop_at_end_of_input,
)
from nbflow_experiments.sweep.point_runner import Runner
from nbflow_experiments.sweep.progress import Reporter, SilentReporter, headline, make_reporter
from nbflow_experiments.sweep.rank_barrier import StepFailed, StopRequest, in_step
from nbflow_experiments.sweep.resume_loop import End, Policy, Worker, run_points
from nbflow_experiments.sweep.shard import Shard
from nbflow_experiments.sweep.subprocess_runner import IsolatedRunner
from nbflow_experiments.table import console, points_table, summary_table
from nbflow_experiments.turns import Turns
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class SweepOptions:
    """What the command line of ``nbflow sweep`` says."""

    file: Path | None
    """The sweep file; None where `lists` says everything."""
    out: Path
    """Folder in which the results folder is made."""
    overrides: tuple[str, ...] = ()
    """Replacements ``section.name=value``."""
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Settings given as options, which replace the file's: name -> texts."""
    dry_run: bool = False
    """Whether to print the points and stop."""
    resume: bool = False
    """Whether to go on with an existing results folder."""
    retry_failed: bool = False
    """Whether to run failed points again."""
    formats: tuple[Path, ...] = ()
    """Files of weight formats to execute, besides those the sweep file names."""
    shard: Shard | None = None
    """Part of the points to run; other launches may run the others at the same time."""
    merge: bool = False
    """Whether to write the tables of what is there and run nothing."""
    policy: Policy = field(default_factory=Policy)
    """What is done about points that fail or hang."""
    launcher: str | None = None
    """Command that starts MPI ranks for points that need some, with ``{ranks}`` in the place of
    their number; by default mpirun."""

    def load(self) -> Sweep:
        """Return the sweep that is asked for, narrowed as the options say."""
        if self.file is None:
            return sweep_of_lists(self.lists, self.overrides, self.formats)
        return load_sweep(self.file, self.overrides, self.formats, self.lists)


@dataclass(frozen=True)
class _Plan:
    """What rank 0 tells the others."""

    folder: Path
    factors: tuple[str, ...]
    points: tuple[Point, ...]
    """All points of this launch, also those that are done."""
    todo: tuple[Point, ...]
    launch: str
    formats: tuple[Path, ...] = ()


def run_sweep(options: SweepOptions, comm: backend.Comm | None = None) -> int:
    """Run a sweep; every rank that mpirun started calls this.

    Parameters
    ----------
    options : SweepOptions
        What to run and where to write.
    comm : Comm, optional
        The ranks; by default all that mpirun started, or this process alone.

    Returns
    -------
    int
        Exit code: 0 if all points succeeded, 1 if some failed, 2 on ranks other than 0 if the sweep
        cannot start, 130 if it was interrupted.

    Raises
    ------
    UsageError
        On rank 0, if the sweep cannot start.
    """
    comm = comm or backend.world()
    if options.dry_run or options.merge:
        code = 0
        if comm.rank == 0:
            code = _merge(options) if options.merge else _print_points(options, comm.size)
        return int(comm.bcast_object(code))
    plan, code = _agree_on_plan(options, comm)
    if plan is None:
        return code
    _load_formats(plan.formats, comm)
    try:
        return _run_plan(plan, options, comm)
    except StepFailed as failure:  # outside of a point's measures: most likely a full disk
        if comm.rank != 0:
            return 2
        raise UsageError(
            f"the sweep stopped, because a result could not be recorded: {failure}; finished "
            f"points are kept in {plan.folder}: mend the cause (free disk space?), then --resume"
        ) from failure


def _run_plan(plan: _Plan, options: SweepOptions, comm: backend.Comm) -> int:
    """Run what a plan has left to do and write the tables; return the exit code."""
    folder = ResultsFolder(plan.folder)
    reporter = make_reporter(plan.factors, len(plan.todo) if comm.rank == 0 else 0)
    # under mpirun `ranks` can only be the number of ranks that are there (`check_world`)
    elsewhere = [p for p in plan.todo if p.config["ranks"] and comm.size == 1]
    here = [p for p in plan.todo if p not in elsewhere]
    holders: list[str] = []
    end: End = "all"
    with contextlib.ExitStack() as stack:
        stack.callback(reporter.close)
        if here or not elsewhere:
            end, holders = _run_here(plan, here, options.policy, comm, reporter)
        if elsewhere and end == "all":
            started = GroupLauncher(
                folder, reporter, options.launcher, options.policy, plan.formats
            )
            end = started.run(elsewhere)
    failed = in_step(comm, StopRequest(), lambda: _conclude_and_print(plan, comm, holders, end))
    failed = comm.bcast_object(failed)
    return 130 if end == "interrupted" else int(failed > 0)


def _conclude_and_print(plan: _Plan, comm: backend.Comm, holders: Sequence[str], end: End) -> int:
    """Write and print the tables on rank 0; return how many points have failed."""
    if comm.rank != 0:
        return 0
    folder = ResultsFolder(plan.folder)
    failed = _conclude(folder, plan.factors, plan.points)
    _print_left(holders, end)
    print(folder.path)
    return failed


def run_group(path: Path, comm: backend.Comm | None = None) -> int:
    """Run the points that a launcher of ranks has written down; every rank calls this.

    Parameters
    ----------
    path : Path
        The file (`nbflow_experiments.sweep.mpi_runner.GroupJob`).
    comm : Comm, optional
        The ranks; by default all that mpirun started.

    Returns
    -------
    int
        Exit code: 0 if there was nothing that kept it from its end, 130 if it was interrupted.
    """
    comm = comm or backend.world()
    job: GroupJob = comm.bcast_object(GroupJob.read(path) if comm.rank == 0 else None)
    if comm.size != job.ranks:
        raise UsageError(f"{job.ranks} ranks were to be started, there are {comm.size}; --launcher")
    _load_formats(job.formats, comm)
    plan = _Plan(job.folder, (), job.points, job.points, job.launch, job.formats)
    end, _ = _run_here(plan, job.points, job.policy, comm, SilentReporter((), 0), job)
    return 130 if end == "interrupted" else 0


def _run_here(
    plan: _Plan,
    points: Sequence[Point],
    policy: Policy,
    comm: backend.Comm,
    reporter: Reporter,
    job: GroupJob | None = None,
) -> tuple[End, list[str]]:
    """Run points on the ranks there are; return why it ended, and who runs what is left.

    With a `job` they were started for these points.
    """
    folder = ResultsFolder(plan.folder)
    launch = provenance.describe_launch(comm, sys.argv)
    stop = StopRequest()

    def begin() -> Turns | None:
        if launch is None:
            return None
        launch.update(_inputs(points) | {"started_for_points": job is not None})
        folder.write_launch(plan.launch, launch)
        return Turns(folder, plan.launch, points)

    def finish() -> list[str]:
        if launch is None or turns is None:
            return []
        folder.write_launch(plan.launch, launch | {"finished": provenance.now()})
        return turns.holders()

    turns = in_step(comm, stop, begin)
    with turns.beating() if turns else contextlib.nullcontext():
        worker = _worker(plan, policy, comm, folder, reporter, turns)
        if job is not None and comm.rank == 0:
            stop_at_end_of_input(worker.stop)
        end = run_points(points, comm, worker, turns, policy, job.tried if job else {})
    return end, in_step(comm, stop, finish)


def _worker(
    plan: _Plan,
    policy: Policy,
    comm: backend.Comm,
    folder: ResultsFolder,
    reporter: Reporter,
    turns: Turns | None,
) -> Worker:
    """Return what runs the points."""
    if policy.isolates:
        return IsolatedRunner(folder, reporter, plan.launch, plan.formats, policy.timeout_s)
    return Runner(comm, folder, reporter, plan.launch, turns)


def _agree_on_plan(options: SweepOptions, comm: backend.Comm) -> tuple[_Plan | None, int]:
    """Return the plan that rank 0 makes; where it cannot, rank 0 raises and the others get 2."""
    message: _Plan | None = None
    problem: Exception | None = None
    if comm.rank == 0:
        try:
            message = _make_plan(options, comm.size)
        except Exception as error:  # told to the others first, then raised
            problem = error
    plan: _Plan | None = comm.bcast_object(message)
    if problem is not None:
        raise problem
    return plan, 2 if plan is None else 0


def _load_formats(files: Sequence[Path], comm: backend.Comm) -> None:
    """Register the sweep's weight formats on every rank, or raise on every rank."""
    failure: UsageError | None = None
    try:
        for file in files:
            backend.load_formats(file)
    except UsageError as error:
        failure = error
    failures = comm.bcast_object(comm.gather_object(failure))
    for rank, other in enumerate(failures):
        if other is not None:
            raise UsageError(f"rank {rank}: {other}") from failure


def _make_plan(options: SweepOptions, size: int) -> _Plan:
    """Read the sweep, look at what is done already and open the results folder; rank 0 only."""
    for package in ("h5py", "rich"):
        require(package)
    if options.policy.isolates and size > 1:
        raise UsageError(
            f"--isolate and --timeout are for launches without mpirun, which started {size} ranks: "
            f"there NBFLOW_HANG_S ends a launch that hangs, and --resume goes on; or let nbflow "
            f"start the ranks of each point: --ranks auto"
        )
    sweep = options.load()
    points = make_points(sweep)
    check_world(points, size)
    for ranks in {int(point.config["ranks"]) for point in points} - {0, size if size > 1 else 0}:
        command_of(options.launcher, ranks)  # raises if there is none
    folder = ResultsFolder(options.out.absolute() / sweep.name)
    joins = options.resume or options.retry_failed or options.shard is not None
    if folder.exists and not joins:
        raise UsageError(
            f"{folder.path} holds results already ({len(folder.finished())} finished points); go "
            f"on with --resume, or write elsewhere with --out"
        )
    folder.refuse_links(points)
    with _alone(folder.path):
        folder.set_damaged_aside(points)
        _check_ranks(folder, size)
        _write_sweep(folder, sweep, points)
    mine = (options.shard or Shard()).select(points)
    todo = tuple(p for p in mine if not folder.is_finished(p, options.retry_failed))
    part = f"{len(mine)} of {len(points)}" if options.shard else f"{len(points)}"
    print(f"{sweep.name}: {part} points, {len(mine) - len(todo)} of them done already", flush=True)
    return _Plan(
        folder.path, sweep.factors, tuple(mine), todo, provenance.launch_name(), sweep.formats
    )


def _check_ranks(folder: ResultsFolder, size: int) -> None:
    """Raise if the folder's speeds were measured with another number of ranks."""
    launches = [x for x in folder.launches() if not x.get("started_for_points")]
    if launches and launches[-1]["world_size"] != size:
        raise UsageError(
            f"{folder.path} was begun with {launches[-1]['world_size']} MPI ranks, now there are "
            f"{size}; their speeds cannot be compared: start as many, or write elsewhere with --out"
        )


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other launches waiting while the block runs, where the system has such locks."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".lock").open("w") as stream:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX)  # let go when the file is closed
        yield


def _write_sweep(folder: ResultsFolder, sweep: Sweep, points: Sequence[Point]) -> None:
    """Describe the sweep; points and factors of an earlier launch are kept."""
    before = folder.sweep()
    if before.get("metrics_version", METRICS_VERSION) != METRICS_VERSION:
        raise UsageError(
            f"{folder.path} was written with version {before['metrics_version']} of the measures, "
            f"this is version {METRICS_VERSION}; write elsewhere with --out"
        )
    names = dict.fromkeys([*before.get("points", []), *(point.short for point in points)])
    factors = dict.fromkeys([*before.get("factors", []), *sweep.factors])
    write_json(
        folder.path / "sweep.json",
        {
            "schema_version": SCHEMA_VERSION,
            "metrics_version": METRICS_VERSION,
            "name": sweep.name,
            "description": sweep.description,
            "factors": list(factors),
            "measures": list(sweep.measures),
            "points": list(names),
        },
    )


def _inputs(points: Sequence[Point]) -> dict[str, Any]:
    """Return the inputs of a launch, for its provenance."""
    return {
        "metrics_version": METRICS_VERSION,
        "models_sha256": {str(p.config["model"]): p.model_digest for p in points},
        "datasets_sha256": {str(p.text): p.dataset_digest for p in points if p.text},
        "formats_digest": {
            str(p.config["weights"]): p.format_digest for p in points if p.format_digest
        },
        "seeds": sorted({int(p.config["seed"]) for p in points}),
        "threads": sorted({int(p.config["threads"]) for p in points}),
        "points": len(points),
    }


def _conclude(folder: ResultsFolder, factors: Sequence[str], points: Sequence[Point]) -> int:
    """Write and print the tables; return how many of `points` have failed."""
    write_summaries(folder)
    rows = []
    for name in folder.finished():
        result = folder.result(name) or {}
        row = {**folder.config(name)["config"], **result}
        for reading in result["readings"]:
            if reading["rank"] is None and reading["repeat"] is None:
                row[reading["metric"]] = reading["value"]
                row[f"{reading['metric']}_stderr"] = reading["stderr"]
        rows.append(row)
    if rows:
        console().print(summary_table(rows, factors))
    ours = {point.id for point in points}
    failed = [row for row in rows if row["status"] != "done" and row["id"] in ours]
    for text, n in Counter(headline(row["error"]) for row in failed).items():
        print(f"failed: {n} points with {text}")
    if failed:
        print(f"{len(failed)} points failed (points/*/log.txt); run them again with --retry-failed")
    return len(failed)


def _print_left(holders: Sequence[str], end: End) -> None:
    """Say what this launch has not done, and why."""
    for who, n in Counter(holders).items():
        print(f"{n} points are being run by another launch ({who})")
    if end == "failed":
        print("stopped at the first failure (--fail-fast); go on with --resume")
    if end == "interrupted":
        print("interrupted; go on with --resume")


def _merge(options: SweepOptions) -> int:
    """Write and print the tables of what is there; return the exit code."""
    sweep = options.load()
    points = (options.shard or Shard()).select(make_points(sweep))
    folder = ResultsFolder(options.out.absolute() / sweep.name)
    if not folder.exists:
        raise UsageError(
            f"{folder.path} holds no results to merge; run the sweep, or give its --out"
        )
    failed = _conclude(folder, sweep.factors, points)
    missing = sum(folder.result(point.short) is None for point in points)
    print(f"{len(points) - missing} of {len(points)} points are finished")
    print(folder.path)
    return int(failed + missing > 0)


def _print_points(options: SweepOptions, size: int) -> int:
    """Print what a sweep would run."""
    sweep = options.load()
    points = (options.shard or Shard()).select(make_points(sweep))
    check_world(points, size)
    identities = {p.config["model"]: backend.identify(str(p.config["model"])) for p in points}
    estimates = [estimate_bytes(p, identities[p.config["model"]]) for p in points]
    console().print(points_table(points, sweep.factors, estimates))
    print(f"{len(points)} points, {sweep.excluded} excluded; measures: {', '.join(sweep.measures)}")
    largest = max((e["weight_bytes"] + e["kv_bytes"] for e in estimates), default=0)
    print(
        f"largest point: about {largest / 1e6:.1f} MB of weights and key/value cache in all ranks"
    )
    if needs_reference(sweep.measures):
        references = {
            (p.config["model"], p.dataset_digest, p.key(_EVALUATION)): p for p in points
        }.values()
        size_bytes = sum(_reference_bytes(p, identities[p.config["model"]]) for p in references)
        print(f"logits of the reference: about {size_bytes / 1e6:.1f} MB on disk")
    print(options.out.absolute() / sweep.name)
    return 0


_EVALUATION = ("eval_tokens", "eval_window", "eval_context", "seed")


def _reference_bytes(point: Point, identity: backend.ModelIdentity) -> int:
    """Return the size of the float32 logits of the scored tokens."""
    tokens, window, context = (int(v) for v in point.key(_EVALUATION[:3]))
    return tokens // window * (window - context) * identity.vocab_size * 4
