"""Which point is run when, how often, and when a launch stops: the loop around the points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from nbflow_experiments.backend import Comm
from nbflow_experiments.config.points import Point
from nbflow_experiments.sweep.rank_barrier import Interrupted, StopRequest, in_step
from nbflow_experiments.turns import Turn, Turns
from nbflow_kernels.errors import UsageError

End = Literal["all", "interrupted", "failed"]
"""Why a launch ended: nothing was left to do, it was asked to stop, or a point failed."""


@dataclass(frozen=True)
class Policy:
    """What a launch does about points that fail or hang."""

    retries: int = 0
    """How often a point that fails is run again, at once."""
    fail_fast: bool = False
    """Whether the first point that fails ends the launch."""
    isolate: bool = False
    """Whether each point runs in a process of its own."""
    timeout_s: float | None = None
    """After how many seconds a point is ended; the points are isolated then."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise UsageError(f"--retries must be at least 0, got {self.retries}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"--timeout must be more than 0 seconds, got {self.timeout_s}")

    @property
    def isolates(self) -> bool:
        """Return whether points run in processes of their own."""
        return self.isolate or self.timeout_s is not None


class Worker(Protocol):
    """Runs single points."""

    stop: StopRequest
    """Whether this process was asked to stop."""

    def run_point(self, point: Point, attempt: int, *, last: bool) -> str:
        """Measure and record a point; return its status, the same on every rank.

        Raises
        ------
        Interrupted
            If some rank was asked to stop before the point was finished; nothing is recorded then.
        """

    def close(self) -> None:
        """Give back what is held for the points to come."""


def run_points(
    points: Sequence[Point],
    comm: Comm,
    worker: Worker,
    turns: Turns | None,
    policy: Policy,
    tried: Mapping[str, int] = MappingProxyType({}),
) -> End:
    """Run points in order; every rank calls this with the same points.

    Points that other launches hold are passed over, and looked at again as long as there was
    something to do.

    Parameters
    ----------
    points : sequence of Point
        What to run.
    comm : Comm
        All ranks.
    worker : Worker
        Runs one point.
    turns : Turns, optional
        Decides on rank 0 which points this launch may run; None on the other ranks.
    policy : Policy
        What is done about failures.
    tried : mapping
        How often points were tried before, by the name of their folder, where that is not 0.

    Returns
    -------
    str
        Why it ended.
    """
    waiting, n = list(points), len(points) + 1
    with worker.stop.listen():
        try:
            while len(waiting) < n:
                n, passed_over = len(waiting), []
                for point in waiting:
                    turn = _turn(point, comm, worker.stop, turns)
                    if turn == "held":
                        passed_over.append(point)
                    elif turn == "ours" and not _succeeds(
                        point, worker, turns, policy, tried.get(point.short, 0)
                    ):
                        return "failed"
                waiting = passed_over
        except Interrupted:
            return "interrupted"
        finally:
            worker.close()
    return "all"


def _turn(point: Point, comm: Comm, stop: StopRequest, turns: Turns | None) -> Turn | None:
    """Return on every rank whose turn it is to run a point; rank 0 looks and claims."""
    turn = in_step(comm, stop, lambda: turns.begin(point) if turns else None)
    found: Turn | None = comm.bcast_object(turn)
    return found


def _succeeds(
    point: Point, worker: Worker, turns: Turns | None, policy: Policy, tried: int
) -> bool:
    """Run a point until it succeeds or was tried often enough; return whether to go on."""
    try:
        for attempt in range(1 + tried, policy.retries + 2):
            last = attempt > policy.retries
            if worker.run_point(point, attempt, last=last) == "done":
                return True
        return not policy.fail_fast
    finally:
        if turns:
            turns.end()
