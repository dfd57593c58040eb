"""Run under mpirun by test_faults.py: a command of nbflow with a fault on one rank.

mpirun -n N python faults.py FAULT RANK AFTER ARGUMENTS...

At its all-reduce number AFTER, rank RANK is killed (kill), crashes in C code (crash), is stopped
(stop), sleeps for ever (sleep), runs out of memory (memory) or refuses (usage); with "load-" before
it, at the weight number AFTER that it loads; with "draw-", at the token number AFTER that it draws.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import time

from nbflow import cli
from nbflow.distributed.mpi import MpiComm
from nbflow_kernels.errors import UsageError


def plant(fault: str, rank: int, after: int) -> None:
    """Inject `fault` before call number `after` of the function that it names."""
    from nbflow.distributed import world
    from nbflow.engine.outputs import StepOutput
    from nbflow.executor.weight_loader import WeightLoader

    where, _, what = fault.rpartition("-")
    owner, name = {
        "": (MpiComm, "Allreduce"), "load": (WeightLoader, "_once"),
        "draw": (StepOutput, "compute"),
    }[where]  # fmt: skip
    count, correct = itertools.count(1), getattr(owner, name)

    def faulty(*arguments):
        if next(count) == after and world().rank == rank:
            strike(what)
        return correct(*arguments)

    setattr(owner, name, faulty)


def strike(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "crash":
        ctypes.string_at(0)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "sleep":
        time.sleep(1e6)
    if fault == "memory":
        raise MemoryError("planted")
    raise UsageError("planted")  # on one rank only


if "FAULTS_PIDS" in os.environ:
    with open(os.environ["FAULTS_PIDS"], "a") as pids:
        pids.write(f"{os.getpid()}\n")
plant(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
cli.main(sys.argv[4:])
