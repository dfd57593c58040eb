"""Partition of a model over ranks (`plan`), and communicators between them (`comm`, `mpi`).

Names are imported on first use: launchers and the command line need neither models nor kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbflow.distributed.comm import Comm, SelfComm
    from nbflow.distributed.mpi import world
    from nbflow.distributed.partition_notation import parse_partition, ranks_of, split_replicas
    from nbflow.distributed.plan import Plan, RankPlan, make_plan

_WHERE = {
    "Comm": "comm",
    "Plan": "plan",
    "RankPlan": "plan",
    "SelfComm": "comm",
    "make_plan": "plan",
    "parse_partition": "partition_notation",
    "ranks_of": "partition_notation",
    "split_replicas": "partition_notation",
    "world": "mpi",
}

__all__ = [
    "Comm",
    "Plan",
    "RankPlan",
    "SelfComm",
    "make_plan",
    "parse_partition",
    "ranks_of",
    "split_replicas",
    "world",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
