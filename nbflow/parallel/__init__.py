"""Ranks: who holds what (`plan`) and how they talk (`comm`, `threads`, `mpi`)."""

from nbflow.parallel.comm import Alone, Comm
from nbflow.parallel.mpi import world
from nbflow.parallel.plan import Plan, RankPlan, make_plan, parse_partition

__all__ = ["Alone", "Comm", "Plan", "RankPlan", "make_plan", "parse_partition", "world"]
