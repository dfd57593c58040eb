"""Loop over the points of a launch: lock, measure, retry, stop."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

from nbflow_experiments.backend import Comm
from nbflow_experiments.config.points import Point
from nbflow_experiments.sweep.point_lock import PointLocks
from nbflow_experiments.sweep.point_runner import Runner
from nbflow_experiments.sweep.rank_barrier import Interrupted, in_step
from nbflow_kernels.errors import UsageError

End = Literal["all", "interrupted", "failed"]
"""Reason of a launch's end: all points visited, stop requested, or a point failed."""


@dataclass(frozen=True)
class Policy:
    """Handling of points that fail or hang."""

    retries: int = 0
    """Immediate retries of a failed point."""
    fail_fast: bool = False
    """True: the first point that fails ends the launch."""
    isolate: bool = False
    """True: each point runs in a subprocess."""
    timeout_s: float | None = None
    """Time limit of a point in seconds; implies `isolate`."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise UsageError(f"--retries must be at least 0, got {self.retries}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"--timeout must be more than 0 seconds, got {self.timeout_s}")

    @property
    def isolates(self) -> bool:
        """Return whether each point runs in a subprocess."""
        return self.isolate or self.timeout_s is not None


def run_points(
    points: Sequence[Point],
    comm: Comm,
    runner: Runner,
    locks: PointLocks | None,
    policy: Policy,
    tried: Mapping[str, int] = MappingProxyType({}),
) -> End:
    """Run points in order, except those that other launches measure or have measured.

    Parameters
    ----------
    points : sequence of Point
        Points to run, the same on every rank.
    comm : Comm
        All ranks.
    runner : Runner
        Measures and records one point.
    locks : PointLocks, optional
        Locks of this launch on rank 0; None on the other ranks.
    policy : Policy
        Handling of failures.
    tried : mapping
        Earlier attempts, by the name of the point's folder, where there were any.
    """
    with runner.stop.listen():
        try:
            for point in points:
                acquire = partial(locks.acquire, point) if locks else bool
                if not comm.bcast_object(in_step(comm, runner.stop, acquire)):
                    continue
                try:
                    succeeded = _succeeds(point, runner, policy, tried.get(point.short, 0))
                finally:
                    if locks is not None:
                        locks.release()
                if policy.fail_fast and not succeeded:
                    return "failed"
        except Interrupted:
            return "interrupted"
        finally:
            runner.close()
    return "all"


def _succeeds(point: Point, runner: Runner, policy: Policy, tried: int) -> bool:
    """Run a point until it succeeds or has no attempts left; return whether it succeeded."""
    for attempt in range(1 + tried, policy.retries + 2):
        with _time_limit(policy.timeout_s):
            status = runner.run_point(point, attempt, last=attempt > policy.retries)
        if status == "done":
            return True
    return False


@contextlib.contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """End this process with a traceback of every thread if the block takes longer."""
    if seconds is None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True)  # works while native code hangs
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
