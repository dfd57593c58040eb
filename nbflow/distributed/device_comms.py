"""Transport of device arrays between ranks: NCCL, CUDA-aware MPI, or host memory.

Ranks gather their capabilities and make the same choice, for each stage and for the whole model.
NCCL needs one device per rank; MPI must report CUDA support
(`nbflow.distributed.mpi_cuda_aware.cuda_aware`); host memory always works, also for ranks on
different kinds of devices and for several ranks on one GPU.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbflow.distributed.comm import Comm
from nbflow.distributed.mpi_cuda_aware import CudaAwareMpiComm, cuda_aware
from nbflow.distributed.nccl import NcclComm, has_nccl
from nbflow_kernels.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from nbflow.distributed.device import Device
    from nbflow.distributed.plan import Plan

TRANSPORTS = ("nccl", "mpi", "host")
VARIABLE = "NBFLOW_DEVICE_EXCHANGE"
"""Environment variable that selects one of `TRANSPORTS`; the first possible one by default."""
OVERLAP = "NBFLOW_OVERLAP"
"""Environment variable that switches the overlap of all-reduce and compute: 0 or 1."""


@dataclass(frozen=True)
class RankCapabilities:
    """Capabilities of a rank."""

    host: str
    """Host name."""
    device: str | None
    """Identity of its CUDA device on the host; None without one."""
    nccl: bool
    """NCCL is installed."""
    mpi: bool
    """The MPI library is CUDA-aware."""
    on_host: bool = True
    """The arrays of the rank are in host memory."""
    overlap: str = "auto"
    """Value of ``NBFLOW_OVERLAP``."""


@dataclass(frozen=True)
class Transport:
    """Transport of device arrays between ranks."""

    name: str
    """Transport, of `TRANSPORTS`."""
    reason: str = ""
    """Reason that rules out a faster transport; empty for the fastest and for a selected one."""


@dataclass(frozen=True)
class DeviceComms:
    """Communicators of device arrays; missing ones go through host memory."""

    comm: Comm | None = None
    """All ranks of the model, for messages between stages."""
    groups: Mapping[tuple[int, ...], Comm] = field(default_factory=dict)
    """Stages of this rank, by rank numbers."""
    transports: Mapping[tuple[int, ...], Transport] = field(default_factory=dict)
    """Transports of all stages and, with several stages, of the model, by rank numbers."""
    transport: Transport | None = None
    """Transport of this rank's stage, of the model if it is alone in its stage."""
    fallback: str = ""
    """Reason why ranks on CUDA devices do not use NCCL; empty where they do, or need not."""
    overlap: bool = False
    """Overlap all-reduce and compute (`nbflow.executor.overlap`); the same on all ranks."""

    @property
    def described(self) -> dict[str, str]:
        """``transport`` of this rank and the ``reason`` why it is not a faster one."""
        found = self.transport
        name, reason = ("", "") if found is None else (found.name, found.reason)
        return {"transport": name, "reason": reason}

    @property
    def comms(self) -> list[Comm]:
        """All communicators."""
        return [c for c in (self.comm, *self.groups.values()) if c is not None]


def choose_transport(ranks: Sequence[RankCapabilities], requested: str | None = None) -> Transport:
    """Choose the transport of device arrays between ranks.

    Parameters
    ----------
    ranks : sequence of RankCapabilities
        Capabilities of the ranks.
    requested : str, optional
        Transport that the user selects.

    Raises
    ------
    UsageError
        If `requested` is unknown or impossible.

    Examples
    --------
    >>> four = [RankCapabilities("a", f"gpu {i}", nccl=True, mpi=False) for i in range(4)]
    >>> choose_transport(four).name
    'nccl'
    >>> choose_transport([four[0], four[0]])  # doctest: +NORMALIZE_WHITESPACE
    Transport(name='host', reason='NCCL needs a device for every rank, and some share one;
    the MPI library does not report CUDA support')
    """
    if requested is not None and requested not in TRANSPORTS:
        raise unknown_name(VARIABLE, requested, TRANSPORTS)
    obstacles = {"nccl": _no_nccl(ranks), "mpi": _no_mpi(ranks), "host": ""}
    if requested is None:
        name = next(name for name in TRANSPORTS if not obstacles[name])
        faster = [obstacles[other] for other in TRANSPORTS[: TRANSPORTS.index(name)]]
        return Transport(name, "; ".join(dict.fromkeys(faster)))
    if obstacles[requested]:
        raise UsageError(f"{VARIABLE}={requested}: {obstacles[requested]}")
    return Transport(requested)


def _no_nccl(ranks: Sequence[RankCapabilities]) -> str:
    """Return the reason why NCCL is impossible; empty if it is possible."""
    if any(f.device is None for f in ranks):
        return "not every rank is on a CUDA device"
    if len({(f.host, f.device) for f in ranks}) < len(ranks):
        return "NCCL needs a device for every rank, and some share one"
    if not all(f.nccl for f in ranks):
        return "CuPy finds no NCCL library: pip install nvidia-nccl-cu12 (or -cu13)"
    return ""


def _no_mpi(ranks: Sequence[RankCapabilities]) -> str:
    """Return the reason why MPI cannot send device arrays; empty if it can."""
    if any(f.device is None for f in ranks):
        return "not every rank is on a CUDA device"
    if not all(f.mpi for f in ranks):
        return "the MPI library does not report CUDA support"
    return ""


def should_overlap(ranks: Sequence[RankCapabilities], groups: Sequence[Sequence[int]]) -> bool:
    """Return True if all-reduces should overlap with compute.

    By default for CPU ranks with a stage on several hosts: on one host an all-reduce needs the same
    cores.  ``NBFLOW_OVERLAP=0`` or ``1`` on rank 0 overrides it.

    Parameters
    ----------
    ranks : sequence of RankCapabilities
        Capabilities of the ranks of the model.
    groups : sequence of sequences of int
        Ranks of each stage, as indices into `ranks`.

    Raises
    ------
    UsageError
        If the variable has another value.

    Examples
    --------
    >>> ranks = [RankCapabilities(host, None, nccl=False, mpi=False) for host in "ab"]
    >>> should_overlap(ranks, [(0, 1)]), should_overlap(ranks, [(0,), (1,)])
    (True, False)
    """
    requested = ranks[0].overlap
    if requested not in ("auto", "0", "1"):
        raise UsageError(f"{OVERLAP} must be 0 or 1, got {requested!r}")
    if not all(f.on_host for f in ranks):
        return False
    apart = any(len({ranks[i].host for i in group}) > 1 for group in groups)
    return apart if requested == "auto" else requested == "1"


def make_device_comms(
    comm: Comm, plan: Plan, groups: Mapping[tuple[int, ...], Comm], device: Device
) -> DeviceComms:
    """Make the communicators of device arrays; every rank of `comm` must call it.

    The ranks of `comm` are in the plan's order, and the device of this rank is the current one.

    Raises
    ------
    UsageError
        If ``NBFLOW_DEVICE_EXCHANGE`` selects an impossible transport.
    """
    if comm.size == 1:
        return DeviceComms()
    identity, numbers = device.identity, plan.numbers
    mine = RankCapabilities(
        platform.node(),
        identity,
        identity is not None and has_nccl(),
        identity is not None and cuda_aware(),
        device.on_host,
        os.environ.get(OVERLAP, "auto"),
    )
    ranks: list[RankCapabilities] = comm.bcast_object(comm.gather_object(mine))
    requested = os.environ.get(VARIABLE) if identity is not None else None
    stages = list(dict.fromkeys(r.group for r in plan.ranks))

    def capabilities(members: Sequence[int]) -> list[RankCapabilities]:
        return [ranks[numbers.index(r)] for r in members]

    teams = [stage for stage in stages if len(stage) > 1]
    if len(stages) > 1:
        teams.append(numbers)
    transports = {team: choose_transport(capabilities(team), requested) for team in teams}
    made = {
        members: c
        for members, group in groups.items()
        if (c := _make(transports[members], group)) is not None
    }
    world = _make(transports[numbers], comm) if len(stages) > 1 else None
    indices = [[numbers.index(r) for r in stage] for stage in stages]
    on_cuda = {
        team: found
        for team, found in transports.items()
        if all(f.device is not None for f in capabilities(team))
    }
    return DeviceComms(
        world, made, transports, transports.get(next(iter(groups), numbers)),
        describe_fallback(on_cuda), should_overlap(ranks, indices),
    )  # fmt: skip


def describe_fallback(transports: Mapping[tuple[int, ...], Transport]) -> str:
    """Return what ranks on CUDA devices use instead of NCCL, and why; empty without a fallback.

    Examples
    --------
    >>> describe_fallback({(0, 1): Transport("host", "some share a device")})
    'ranks 0, 1 exchange arrays through host memory, not over NCCL: some share a device'
    """
    ways = {"mpi": "through MPI", "host": "through host memory"}
    return "; ".join(
        f"ranks {', '.join(map(str, team))} exchange arrays {ways[found.name]}, not over NCCL: "
        f"{found.reason}"
        for team, found in transports.items()
        if found.reason
    )


def warn_of_fallback(comms: DeviceComms, rank: int) -> None:
    """Warn on the first rank of a model if its ranks do not use NCCL."""
    if comms.fallback and rank == 0:
        warnings.warn(
            f"{comms.fallback}; {VARIABLE}=host selects host memory without this message",
            RuntimeWarning,
            stacklevel=4,
        )


def _make(transport: Transport, host: Comm) -> Comm | None:
    if transport.name == "nccl":
        return NcclComm(host)
    return CudaAwareMpiComm(host) if transport.name == "mpi" else None
