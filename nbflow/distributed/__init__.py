"""Partition of a model over ranks (`plan`), and communicators between them (`comm`, `mpi`)."""

from nbflow.distributed.comm import Comm, SelfComm
from nbflow.distributed.mpi import world
from nbflow.distributed.partition_notation import parse_partition, ranks_of, split_replicas
from nbflow.distributed.plan import Plan, RankPlan, make_plan

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
