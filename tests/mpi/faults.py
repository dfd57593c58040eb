"""Run under mpirun by test_faults.py: a command of nbflow in which one rank goes wrong.

mpirun -n N python faults.py FAULT RANK AFTER ARGUMENTS...

At its all-reduce number AFTER, rank RANK is killed, stands still, runs out of memory or refuses.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

from nbflow import cli
from nbflow.parallel.mpi import Mpi
from nbflow_kernels.errors import UsageError


def plant(fault: str, rank: int, after: int) -> None:
    from nbflow.parallel import world

    count = itertools.count(1)
    correct = Mpi.Allreduce

    def faulty(comm: Mpi, array) -> None:
        if next(count) == after and world().rank == rank:
            strike(fault)
        correct(comm, array)

    Mpi.Allreduce = faulty


def strike(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "memory":
        raise MemoryError("planted")
    raise UsageError("planted")  # found by one rank alone


plant(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
cli.main(sys.argv[4:])
