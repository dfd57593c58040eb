"""Execution of a sweep, from its file to its results folder."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nbflow_experiments import backend
from nbflow_experiments.config.points import Point, check_world, estimate_bytes, make_points
from nbflow_experiments.config.sweep_file import Sweep, load_sweep, sweep_of_lists
from nbflow_experiments.measures import MEASURES, METRICS_VERSION, needs_reference
from nbflow_experiments.optional_packages import require
from nbflow_experiments.store import provenance
from nbflow_experiments.store.gpu_facts import describe_emulator
from nbflow_experiments.store.json_files import write_json
from nbflow_experiments.store.results_folder import SCHEMA_VERSION, ResultsFolder
from nbflow_experiments.store.summary import write_summaries
from nbflow_experiments.sweep.mpi_runner import Job, ProcessRunner, command_of
from nbflow_experiments.sweep.point_lock import PointLocks, result_launch
from nbflow_experiments.sweep.point_runner import Runner
from nbflow_experiments.sweep.progress import (
    Reporter,
    headline,
    make_reporter,
    print_points,
    print_summary,
)
from nbflow_experiments.sweep.rank_barrier import StepFailed, StopRequest, in_step
from nbflow_experiments.sweep.resume_loop import End, Policy, run_points
from nbflow_experiments.sweep.shard import Shard
from nbflow_experiments.sweep.subprocess_runner import obey_parent
from nbflow_kernels.errors import UsageError
from nbflow_kernels.plugins import load_plugins


@dataclass(frozen=True)
class SweepOptions:
    """Options of ``nbflow sweep``."""

    file: Path | None
    """Sweep file; None if `lists` defines the sweep."""
    out: Path
    """Parent of the results folder."""
    overrides: tuple[str, ...] = ()
    """Replacements ``section.name=value``."""
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Settings of command-line options, which override the file: name -> texts."""
    dry_run: bool = False
    resume: bool = False
    retry_failed: bool = False
    plugins: tuple[str, ...] = ()
    """Plugins to import, besides those the sweep file names."""
    shard: Shard | None = None
    """Shard of the points to run; other launches may run the others concurrently."""
    merge: bool = False
    """Write the tables of the recorded points and run nothing."""
    policy: Policy = field(default_factory=Policy)
    launcher: str | None = None
    """Command that starts MPI ranks for points that need some, with ``{ranks}`` in the place of
    their number; by default mpirun."""

    def load(self) -> Sweep:
        """Return the sweep, restricted by the options."""
        if self.file is None:
            return sweep_of_lists(self.lists, self.overrides, self.plugins)
        return load_sweep(self.file, self.overrides, self.plugins, self.lists)


@dataclass(frozen=True)
class _Plan:
    """Plan of a launch, which rank 0 broadcasts."""

    folder: Path
    factors: tuple[str, ...]
    points: tuple[Point, ...]
    """All points of this launch, finished ones included."""
    todo: tuple[Point, ...]
    before: dict[str, str | None]
    """See `PointLocks`."""
    launch: str
    plugins: tuple[str, ...] = ()


def run_sweep(options: SweepOptions, comm: backend.Comm | None = None) -> int:
    """Run a sweep; collective over the ranks of mpirun.

    Parameters
    ----------
    options : SweepOptions
        The sweep and its results folder.
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
    _load_plugins(plan.plugins, comm)
    try:
        return _run_plan(plan, options, comm)
    except StepFailed as failure:  # outside of a measure: most likely a full disk
        if comm.rank != 0:
            return 2
        raise UsageError(
            f"the sweep stopped, because a result could not be recorded: {failure}; finished "
            f"points are kept in {plan.folder}: mend the cause (free disk space?), then --resume"
        ) from failure


def _run_plan(plan: _Plan, options: SweepOptions, comm: backend.Comm) -> int:
    """Run the remaining points of a plan and write the tables; return the exit code."""
    folder, policy = ResultsFolder(plan.folder), options.policy
    reporter = make_reporter(plan.factors, len(plan.todo) if comm.rank == 0 else 0)
    # under mpirun `ranks` can only be the number of ranks that are there (`check_world`)
    with_ranks = [p for p in plan.todo if p.config["ranks"] and comm.size == 1]
    here = [p for p in plan.todo if p not in with_ranks]
    processes = ProcessRunner(
        folder, reporter, plan.launch, plan.plugins, dict(plan.before), policy, options.launcher
    )
    end: End = "all"
    with contextlib.closing(reporter):
        if here or not with_ranks:
            with _recorded(plan, here, comm):
                if policy.isolates:
                    end = processes.run(here)
                else:
                    end = _run_here(plan, here, policy, comm, reporter)
        if with_ranks and end == "all":
            end = processes.run(with_ranks)
    failed = in_step(comm, StopRequest(), lambda: _finish(plan, end) if comm.rank == 0 else 0)
    failed = comm.bcast_object(failed)
    return 130 if end == "interrupted" else int(failed > 0)


def run_group(path: Path) -> int:
    """Run the points of a job file; entry point of the processes of `ProcessRunner`.

    Returns
    -------
    int
        Exit code: 0 if every point was visited, 130 if it was interrupted.
    """
    comm = backend.world()
    job: Job = comm.bcast_object(Job.read(path) if comm.rank == 0 else None)
    if comm.size != max(job.ranks, 1):
        raise UsageError(f"{job.ranks} ranks were to be started, there are {comm.size}; --launcher")
    stop = StopRequest(announces=comm.rank == 0)
    if comm.rank == 0:
        obey_parent(stop)
    _load_plugins(job.plugins, comm)
    plan = _Plan(job.folder, (), job.points, job.points, dict(job.before), job.launch, job.plugins)
    launch = _recorded(plan, job.points, comm, for_points=True)
    with launch if job.ranks else contextlib.nullcontext():
        reporter = Reporter()
        end = _run_here(plan, job.points, job.policy, comm, reporter, job.tried, stop)
    return 130 if end == "interrupted" else 0


def _run_here(
    plan: _Plan,
    points: Sequence[Point],
    policy: Policy,
    comm: backend.Comm,
    reporter: Reporter,
    tried: Mapping[str, int] = MappingProxyType({}),
    stop: StopRequest | None = None,
) -> End:
    """Run points on the ranks of this launch; return the reason of the end."""
    folder = ResultsFolder(plan.folder)
    locks = PointLocks(folder, plan.launch, plan.before) if comm.rank == 0 else None
    stop = stop or StopRequest(announces=comm.rank == 0)
    runner = Runner(comm, folder, reporter, plan.launch, stop)
    return run_points(points, comm, runner, locks, policy, tried)


@contextlib.contextmanager
def _recorded(
    plan: _Plan, points: Sequence[Point], comm: backend.Comm, *, for_points: bool = False
) -> Iterator[None]:
    """Write the provenance of a launch around the block; collective.

    `for_points`: its ranks were started for these points (`ranks` in the sweep).
    """
    folder = ResultsFolder(plan.folder)
    facts = provenance.describe_launch(comm, sys.argv)

    def write(finished: str | None) -> None:
        if facts is not None:
            launch = facts | _inputs(points) | {"started_for_points": for_points}
            folder.write_launch(plan.launch, launch | {"finished": finished})

    in_step(comm, StopRequest(), lambda: write(None))
    yield
    in_step(comm, StopRequest(), lambda: write(provenance.now()))


def _agree_on_plan(options: SweepOptions, comm: backend.Comm) -> tuple[_Plan | None, int]:
    """Broadcast rank 0's plan; on an error rank 0 raises and the others return 2."""
    message: _Plan | None = None
    problem: Exception | None = None
    if comm.rank == 0:
        try:
            message = _make_plan(options, comm.size)
        except Exception as error:  # broadcast first, then raised
            problem = error
    plan: _Plan | None = comm.bcast_object(message)
    if problem is not None:
        raise problem
    return plan, 2 if plan is None else 0


def _load_plugins(sources: Sequence[str], comm: backend.Comm) -> None:
    """Import the sweep's plugins on every rank, or raise on every rank."""
    failure: UsageError | None = None
    digests: list[str] = []
    try:
        digests = [plugin.sha256 for plugin in load_plugins(sources)]
    except UsageError as error:
        failure = error
    ranks = comm.bcast_object(comm.gather_object((failure, digests)))
    for rank, (other, found) in enumerate(ranks):
        if other is not None:
            raise UsageError(f"rank {rank}: {other}") from failure
        for source, here, there in zip(sources, ranks[0][1], found, strict=True):
            if here != there:
                raise UsageError(f"rank {rank}: {source} is another file there than on rank 0")


def _make_plan(options: SweepOptions, size: int) -> _Plan:
    """Read the sweep, find finished points and open the results folder; rank 0 only."""
    for package in ("h5py", "rich", "filelock"):
        require(package)
    if options.policy.isolates and size > 1:
        raise UsageError(
            f"--isolate and --timeout are for launches without mpirun, which started {size} ranks: "
            f"there NBFLOW_HANG_S ends a launch that hangs, and --resume continues; or let nbflow "
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
            f"{folder.path} holds results already ({len(folder.finished())} finished points); "
            f"continue with --resume, or write elsewhere with --out"
        )
    folder.refuse_links(points)
    with folder.exclusive():
        folder.set_damaged_aside(points)
        _check_ranks(folder, size)
        _write_sweep(folder, sweep, points)
    mine = (options.shard or Shard()).select(points)
    todo = tuple(p for p in mine if not folder.is_finished(p, options.retry_failed))
    part = f"{len(mine)} of {len(points)}" if options.shard else f"{len(points)}"
    print(f"{sweep.name}: {part} points, {len(mine) - len(todo)} of them done already", flush=True)
    before = {point.short: result_launch(folder, point) for point in todo}
    launch = provenance.launch_name()
    return _Plan(folder.path, sweep.factors, tuple(mine), todo, before, launch, sweep.plugins)


def _check_ranks(folder: ResultsFolder, size: int) -> None:
    """Raise if the folder's speeds were measured with another number of ranks."""
    launches = [x for x in folder.launches() if not x.get("started_for_points")]
    if launches and launches[-1]["world_size"] != size:
        raise UsageError(
            f"{folder.path} was begun with {launches[-1]['world_size']} MPI ranks, now there are "
            f"{size}; their speeds cannot be compared: start as many, or write elsewhere with --out"
        )


def _write_sweep(folder: ResultsFolder, sweep: Sweep, points: Sequence[Point]) -> None:
    """Write ``sweep.json``; keeps points and factors of earlier launches."""
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
            "about": {name: MEASURES[name].about for name in sweep.measures},
            "points": list(names),
        },
    )


def _inputs(points: Sequence[Point]) -> dict[str, Any]:
    devices = sorted({str(p.config["device"]) for p in points})
    emulated = any("emulator" in device for device in devices)
    return {
        "metrics_version": METRICS_VERSION,
        "devices": devices,
        "emulator": describe_emulator() if emulated else None,
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
    """Write and print the tables; return the number of failed points."""
    rows = write_summaries(folder)
    if rows:
        print_summary(rows, factors)
    ours = {point.short for point in points}
    failed = [row for row in rows if row["status"] != "done" and row["point"] in ours]
    for text, n in Counter(
        headline(row["error_type"], row["error_message"]) for row in failed
    ).items():
        print(f"failed: {n} points with {text}")
    if failed:
        print(f"{len(failed)} points failed (points/*/log.txt); run them again with --retry-failed")
    return len(failed)


def _finish(plan: _Plan, end: End) -> int:
    """Write and print the tables and the remaining work; return the number of failed points."""
    folder = ResultsFolder(plan.folder)
    failed = _conclude(folder, plan.factors, plan.points)
    left = [p for p in plan.todo if result_launch(folder, p) == plan.before[p.short]]
    holders = PointLocks(folder, plan.launch, plan.before).other_holders(left)
    for holder, n in Counter(holders).items():
        print(f"{n} points are being run by another launch ({holder})")
    if end == "failed":
        print("stopped at the first failure (--fail-fast); continue with --resume")
    if end == "interrupted":
        print("interrupted; continue with --resume")
    print(folder.path)
    return failed


def _merge(options: SweepOptions) -> int:
    """Write and print the tables of finished points; return the exit code."""
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
    """Print the points of a sweep without running them."""
    sweep = options.load()
    points = (options.shard or Shard()).select(make_points(sweep))
    check_world(points, size)
    estimates = [estimate_bytes(p) for p in points]
    print_points(points, sweep.factors, estimates)
    print(f"{len(points)} points, {sweep.excluded} excluded; measures: {', '.join(sweep.measures)}")
    for point in points:
        reason = _refusal(point)
        if reason:
            print(f"{point.short} will fail: {reason}")
    largest = max((sum(each.values()) for each in estimates), default=0)
    states = ", key/value cache and states" if any(e["state_bytes"] for e in estimates) else ""
    print(
        f"largest point: about {largest / 1e6:.1f} MB of weights"
        f"{states or ' and key/value cache'} in all ranks"
    )
    if needs_reference(sweep.measures):
        references = {
            (p.config["model"], p.dataset_digest, p.key(_EVALUATION)): p for p in points
        }.values()
        models = {str(p.config["model"]) for p in references}
        identities = {model: backend.identify(model) for model in models}
        size_bytes = sum(
            _reference_bytes(p, identities[str(p.config["model"])]) for p in references
        )
        print(f"logits of the reference: about {size_bytes / 1e6:.1f} MB on disk")
    print(options.out.absolute() / sweep.name)
    return 0


def _refusal(point: Point) -> str:
    """Return why a point's model cannot be cut into its partition, empty if it can."""
    partition = str(point.config["partition"])
    if partition == backend.AUTO:
        return ""
    try:
        backend.plan_memory(point.config, partition)
    except UsageError as error:
        return str(error)
    return ""


_EVALUATION = ("eval_tokens", "eval_window", "eval_context", "seed")


def _reference_bytes(point: Point, identity: backend.ModelIdentity) -> int:
    """Return the size of the float32 logits of the scored tokens."""
    tokens, window, context = (int(v) for v in point.key(_EVALUATION[:3]))
    return tokens // window * (window - context) * identity.vocab_size * 4
