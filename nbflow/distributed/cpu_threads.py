"""Number of CPU threads per rank: all cores busy, none oversubscribed."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import NamedTuple

from nbflow.distributed.comm import Comm
from nbflow_kernels.cpu import pinning
from nbflow_kernels.cpu.cpu_quota import available_cores, cpu_quota
from nbflow_kernels.errors import UsageError

Affinity = tuple[str, frozenset[int]]
"""Host and processors that a rank may use."""


class CpuThreads(NamedTuple):
    """Arguments of `set_num_threads`."""

    n: int
    cores: tuple[int, ...] = ()
    """Processors to which they are pinned; empty: not pinned."""
    crowded: bool = False
    """The ranks have more threads than cores."""


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
    mine, ranks = _affinities(comm, numbers)
    return within_quota(shared_cores(mine, ranks), cpu_quota(), [host for host, _ in ranks])


def cpu_threads(
    comm: Comm, numbers: Sequence[int], threads: int, pin_threads: bool
) -> dict[int, CpuThreads]:
    """Return the threads of each rank and, if they are pinned, where; every rank must call it.

    Parameters
    ----------
    comm, numbers : Comm, sequence of int
        As in `fair_threads`.
    threads : int
        Threads of each rank.
    pin_threads : bool
        Pin them to processors that no other rank of the host uses.  `pinning.VARIABLE` in the
        environment of rank 0 does the same.

    Raises
    ------
    UsageError
        If `pin_threads` is True on a system that cannot pin.
    """
    if pin_threads and not pinning.can_pin():
        raise UsageError("pin_threads needs Linux; bind ranks with the launcher instead")
    mine, ranks = _affinities(comm, numbers)
    crowded = threads * _sharing(mine, ranks) > available_cores()
    dealt: Sequence[Sequence[int]] = [()] * len(numbers)
    if comm.bcast_object(pin_threads or pinning.is_requested()) and pinning.can_pin():
        known = pinning.places(frozenset().union(*(cores for _, cores in ranks)))
        dealt = pinning.deal(ranks, known)
    return {
        number: CpuThreads(threads, tuple(cores), crowded)
        for number, cores in zip(numbers, dealt, strict=True)
    }


def _affinities(comm: Comm, numbers: Sequence[int]) -> tuple[Affinity, list[Affinity]]:
    """Return host and processors of this rank and of those that take part."""
    mine = platform.node(), _cores()
    if comm.size == 1:
        return mine, [mine] * len(numbers)
    gathered = comm.bcast_object(comm.gather_object(mine))
    return mine, [gathered[rank] for rank in numbers]


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


def _sharing(mine: Affinity, ranks: Sequence[Affinity]) -> int:
    """Return the number of ranks that may run on a processor of this one."""
    host, cores = mine
    return sum(other == host and bool(cores & theirs) for other, theirs in ranks)


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
