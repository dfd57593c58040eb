"""Run under mpirun by test_faults.py: a command of nbflow in which one rank goes wrong.

mpirun -n N python faults.py FAULT RANK AFTER ARGUMENTS...

At its all-reduce number AFTER, rank RANK is killed, stands still, runs out of memory or raises.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time

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
    if fault == "hang":
        time.sleep(1e6)
    if fault == "memory":
        raise MemoryError("planted")
    if fault == "usage":  # found by one rank alone
        raise UsageError("planted")
    raise RuntimeError("planted")


plant(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
cli.main(sys.argv[4:])
