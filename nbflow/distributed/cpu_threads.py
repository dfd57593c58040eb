"""Number of CPU threads per rank: all cores busy, none oversubscribed."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from nbflow.distributed.comm import Comm
from nbflow_kernels.cpu.cpu_quota import cpu_quota
from nbflow_kernels.cpu.thread_pool import available_cores


def fair_threads(comm: Comm, numbers: Sequence[int]) -> int:
    """Return the threads for this rank; every rank of `comm` must call it.

    Parameters
    ----------
    comm : Comm
        All ranks of the launch.
    numbers : sequence of int
        Ranks that take part; without mpirun, threads of this process.

    Returns
    -------
    int
        Ranks share each core evenly with the other ranks that may run on it: bound ranks use their
        own cores, unbound ranks their share of the machine.  Ranks of a host share its CPU quota
        (of a container).
    """
    if comm.size == 1:
        return max(1, available_cores() // len(numbers))
    mine = platform.node(), _cores()
    affinities = comm.bcast_object(comm.gather_object(mine))
    ranks = [affinities[rank] for rank in numbers]
    return within_quota(shared_cores(mine, ranks), cpu_quota(), [host for host, _ in ranks])


def shared_cores(
    mine: tuple[str, frozenset[int]], ranks: Sequence[tuple[str, frozenset[int]]]
) -> int:
    """Return a rank's share of its cores.

    Examples
    --------
    >>> bound = [("a", frozenset({0, 1})), ("a", frozenset({2, 3}))]
    >>> shared_cores(bound[0], bound)
    2
    >>> free = [("a", frozenset(range(4)))] * 2
    >>> shared_cores(free[0], free)
    2
    """
    host, cores = mine
    parts = (
        1 / max(1, sum(other == host and core in theirs for other, theirs in ranks))
        for core in cores
    )
    return max(1, int(sum(parts) + 1e-9))


def within_quota(threads: int, quota: int | None, hosts: Sequence[str]) -> int:
    """Limit the threads of a rank by the host's CPU quota.

    Examples
    --------
    >>> here = platform.node()
    >>> within_quota(32, 8, [here, here, "another"])
    4
    >>> within_quota(32, None, [here, here])
    32
    """
    if quota is None:
        return threads
    return max(1, min(threads, quota // max(1, hosts.count(platform.node()))))


def _cores() -> frozenset[int]:
    """Return the CPU affinity of this process."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(available_cores()))
