"""Ranks: who holds what (`notation`, `plan`) and how they talk (`comm`, `threads`, `mpi`)."""

from nbflow.parallel.comm import Alone, Comm
from nbflow.parallel.mpi import world
from nbflow.parallel.notation import parse_partition, ranks_of, split_replicas
from nbflow.parallel.plan import Plan, RankPlan, make_plan

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
