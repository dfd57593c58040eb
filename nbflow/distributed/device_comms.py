"""Transport of device arrays between ranks: NCCL, CUDA-aware MPI, or host memory.

Ranks gather their capabilities and make the same choice, for each stage and for the whole model.
NCCL needs one device per rank; MPI must report CUDA support
(`nbflow.distributed.mpi_cuda_aware.cuda_aware`); host memory always works, also for ranks on
different kinds of devices and for several ranks on one GPU.
"""

from __future__ import annotations

import os
import platform
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
class DeviceComms:
    """Communicators of device arrays; missing ones go through host memory."""

    comm: Comm | None = None
    """All ranks of the model."""
    groups: Mapping[tuple[int, ...], Comm] = field(default_factory=dict)
    """Stages of this rank, by rank numbers."""
    overlap: bool = False
    """Overlap all-reduce and compute (`nbflow.executor.overlap`); the same on all ranks."""

    @property
    def comms(self) -> list[Comm]:
        """All communicators."""
        return [c for c in (self.comm, *self.groups.values()) if c is not None]


def choose_transport(ranks: Sequence[RankCapabilities], requested: str | None = None) -> str:
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
    >>> choose_transport(four)
    'nccl'
    >>> choose_transport([four[0], four[0]])
    'host'
    """
    if requested is not None and requested not in TRANSPORTS:
        raise unknown_name(VARIABLE, requested, TRANSPORTS)
    obstacles = {"nccl": _no_nccl(ranks), "mpi": _no_mpi(ranks), "host": ""}
    if requested is None:
        return next(name for name in TRANSPORTS if not obstacles[name])
    if obstacles[requested]:
        raise UsageError(f"{VARIABLE}={requested}: {obstacles[requested]}")
    return requested


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
    transport = choose_transport(ranks, requested)
    of_groups = {
        members: _make(
            choose_transport([ranks[numbers.index(r)] for r in members], requested), group
        )
        for members, group in groups.items()
    }
    stages = [[numbers.index(r) for r in group] for group in {r.group for r in plan.ranks}]
    made = {members: c for members, c in of_groups.items() if c is not None}
    return DeviceComms(_make(transport, comm), made, should_overlap(ranks, stages))


def _make(transport: str, host: Comm) -> Comm | None:
    if transport == "nccl":
        return NcclComm(host)
    return CudaAwareMpiComm(host) if transport == "mpi" else None
