"""Ranks: who holds what (`notation`, `plan`) and how they talk (`comm`, `threads`, `mpi`)."""

from nbflow.distributed.comm import Alone, Comm
from nbflow.distributed.mpi import world
from nbflow.distributed.partition_notation import parse_partition, ranks_of, split_replicas
from nbflow.distributed.plan import Plan, RankPlan, make_plan

__all__ = [
    "Alone",
    "Comm",
    "Plan",
    "RankPlan",
    "make_plan",
    "parse_partition",
    "ranks_of",
    "split_replicas",
    "world",
]
