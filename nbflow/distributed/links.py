"""How ranks with CUDA devices hand each other arrays: over NCCL, through MPI, or by the host.

Every rank says what it has, and all come to the same choice, for each stage and for the whole
model.  NCCL needs a device of its own for every rank; an MPI library must say that it takes device
arrays (`nbflow.distributed.mpi_cuda_aware.cuda_aware`); the host's memory goes with everything,
also with ranks on different kinds of devices, and with several ranks on one GPU.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbflow.distributed.comm import Comm
from nbflow.distributed.mpi_cuda_aware import DeviceMpi, cuda_aware
from nbflow.distributed.nccl import Nccl, has_nccl
from nbflow_kernels.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from nbflow.distributed.device import Device
    from nbflow.distributed.plan import Plan

WAYS = ("nccl", "mpi", "host")
VARIABLE = "NBFLOW_DEVICE_EXCHANGE"
"""Environment variable that asks for one of `WAYS`; left out, the first that is possible."""
OVERLAP = "NBFLOW_OVERLAP"
"""Environment variable that says whether exchanges run beside computing: 0, 1, or left out."""


@dataclass(frozen=True)
class Facts:
    """What a rank says of itself."""

    host: str
    """Its machine."""
    device: str | None
    """Identity of its CUDA device there; None if it has none of its own."""
    nccl: bool
    """Whether NCCL is installed."""
    mpi: bool
    """Whether its MPI library takes device arrays."""
    on_host: bool = True
    """Whether its arrays are in the host's memory."""
    overlap: str = "auto"
    """What ``NBFLOW_OVERLAP`` says."""


@dataclass(frozen=True)
class Links:
    """The communicators for arrays on devices; what is not in it goes through the host."""

    comm: Comm | None = None
    """That of all ranks of the model."""
    groups: Mapping[tuple[int, ...], Comm] = field(default_factory=dict)
    """Those of this rank's stages, by rank numbers."""
    far: bool = False
    """Whether large steps are run in two halves, exchanges beside computing
    (`nbflow.executor.overlap`); the same on all ranks."""

    @property
    def comms(self) -> list[Comm]:
        """Return all of them."""
        return [c for c in (self.comm, *self.groups.values()) if c is not None]


def choose(facts: Sequence[Facts], wish: str | None = None) -> str:
    """Return the way for arrays between some ranks.

    Parameters
    ----------
    facts : sequence of Facts
        What each of them has.
    wish : str, optional
        The way that the user wants.

    Raises
    ------
    UsageError
        If it is none, or impossible.

    Examples
    --------
    >>> four = [Facts("a", f"gpu {i}", nccl=True, mpi=False) for i in range(4)]
    >>> choose(four)
    'nccl'
    >>> choose([four[0], four[0]])
    'host'
    """
    if wish is not None and wish not in WAYS:
        raise unknown_name(VARIABLE, wish, WAYS)
    obstacles = {"nccl": _no_nccl(facts), "mpi": _no_mpi(facts), "host": ""}
    if wish is None:
        return next(way for way in WAYS if not obstacles[way])
    if obstacles[wish]:
        raise UsageError(f"{VARIABLE}={wish}: {obstacles[wish]}")
    return wish


def _no_nccl(facts: Sequence[Facts]) -> str:
    """Return why NCCL cannot be used; empty if it can."""
    if any(f.device is None for f in facts):
        return "not every rank is on a CUDA device"
    if len({(f.host, f.device) for f in facts}) < len(facts):
        return "NCCL needs a device for every rank, and some share one"
    if not all(f.nccl for f in facts):
        return "CuPy finds no NCCL library: pip install nvidia-nccl-cu12 (or -cu13)"
    return ""


def _no_mpi(facts: Sequence[Facts]) -> str:
    """Return why MPI cannot be given device arrays; empty if it can."""
    if any(f.device is None for f in facts):
        return "not every rank is on a CUDA device"
    if not all(f.mpi for f in facts):
        return "the MPI library does not say that it takes arrays on CUDA devices"
    return ""


def is_far(facts: Sequence[Facts], groups: Sequence[Sequence[int]]) -> bool:
    """Return whether ranks that add up are so far apart that they should compute meanwhile.

    That is so where some stage has ranks on several hosts, and all ranks are processors: on one
    host an exchange is work for the same cores.  ``NBFLOW_OVERLAP=0`` or ``1`` on rank 0 decides
    otherwise.

    Parameters
    ----------
    facts : sequence of Facts
        What each rank of the model has.
    groups : sequence of sequences of int
        The ranks of each stage, as positions in `facts`.

    Raises
    ------
    UsageError
        If the variable says something else.

    Examples
    --------
    >>> facts = [Facts(host, None, nccl=False, mpi=False) for host in "ab"]
    >>> is_far(facts, [(0, 1)]), is_far(facts, [(0,), (1,)])
    (True, False)
    """
    wish = facts[0].overlap
    if wish not in ("auto", "0", "1"):
        raise UsageError(f"{OVERLAP} must be 0 or 1, got {wish!r}")
    if not all(f.on_host for f in facts):
        return False
    apart = any(len({facts[i].host for i in group}) > 1 for group in groups)
    return apart if wish == "auto" else wish == "1"


def make_links(
    comm: Comm, plan: Plan, groups: Mapping[tuple[int, ...], Comm], place: Device
) -> Links:
    """Return the communicators for device arrays; every rank of `comm` must call it.

    Parameters
    ----------
    comm : Comm
        All ranks of a model, on the host.
    plan : Plan
        Who holds what; its ranks in the order of `comm`.
    groups : mapping
        The communicators of this rank's stages, by rank numbers.
    place : Place
        Where this rank's arrays live; its device must be the current one.

    Raises
    ------
    UsageError
        If ``NBFLOW_DEVICE_EXCHANGE`` asks for what cannot be.
    """
    if comm.size == 1:
        return Links()
    identity, numbers = place.identity, plan.numbers
    mine = Facts(
        platform.node(),
        identity,
        identity is not None and has_nccl(),
        identity is not None and cuda_aware(),
        place.on_host,
        os.environ.get(OVERLAP, "auto"),
    )
    everyone: list[Facts] = comm.bcast_object(comm.gather_object(mine))
    wish = os.environ.get(VARIABLE) if identity is not None else None
    way = choose(everyone, wish)
    of_groups = {
        ranks: _made(choose([everyone[numbers.index(r)] for r in ranks], wish), group)
        for ranks, group in groups.items()
    }
    stages = [[numbers.index(r) for r in group] for group in {r.group for r in plan.ranks}]
    made = {ranks: c for ranks, c in of_groups.items() if c is not None}
    return Links(_made(way, comm), made, is_far(everyone, stages))


def _made(way: str, host: Comm) -> Comm | None:
    if way == "nccl":
        return Nccl(host)
    return DeviceMpi(host) if way == "mpi" else None
