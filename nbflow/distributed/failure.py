"""Failure handling of an MPI rank: one report, then MPI_Abort ends all ranks.

An error that nothing catches is reported by `sys.excepthook`, a rank that hangs by a watchdog
thread, a crash in C code by `faulthandler`.  A rank killed by a signal cannot report: the launcher
does, and ends the others.

A rank hangs when it sends no heartbeat within a step, or while it loads its shard, for
``NBFLOW_HANG_S`` seconds (300).  Heartbeats are each communication op, each tensor read, and each
poll of a waiting rank, whose limit is three times as long.  Idle ranks have no limit.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
import threading
import time
import traceback
from types import TracebackType

from nbflow.distributed.launch import launched_as
from nbflow.utils.rank_status import WAITING, RankStatus, hang_seconds, status

FORWARD_S = 2.0
"""Pause after a report: launchers drop output in their pipes when a rank aborts."""
MAX_POLL_S = 1.0


def install() -> None:
    """Handle the failures of this process if it is one of several ranks; call it once, early.

    Raises
    ------
    UsageError
        If ``NBFLOW_HANG_S`` is not a positive number.
    """
    sys.excepthook = _excepthook
    launched = launched_as()
    if launched is None or launched[1] == 1:
        return
    limit = hang_seconds()
    faulthandler.enable()
    threading.Thread(
        target=_watch, args=(status, limit, *launched), name="nbflow-watchdog", daemon=True
    ).start()


def stop_all(text: str) -> None:
    """Report the failure of this rank with a traceback or a line of text, and end all ranks."""
    from mpi4py import MPI

    state = status.activity
    status.failed()  # the pause is not a hang
    world = MPI.COMM_WORLD
    where = f"nbflow: rank {world.rank} of {world.size} failed {state} (see above)"
    sys.stdout.flush()
    sys.stderr.write(f"{text}{where}; stopping all ranks\n")  # one write, or ranks mix lines
    sys.stderr.flush()
    time.sleep(FORWARD_S)
    world.Abort(1)


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    from nbflow.distributed import world
    from nbflow.distributed.mpi import MpiComm

    if isinstance(world(), MpiComm):
        stop_all("".join(traceback.format_exception(kind, error, trace)))
    sys.__excepthook__(kind, error, trace)


def _watch(status: RankStatus, limit: float, rank: int, size: int) -> None:
    """Poll until the rank hangs; then report it and end all ranks."""
    found, n_found = "", 0
    while n_found < 2:  # a resumed process may send a heartbeat before the second poll
        time.sleep(min(MAX_POLL_S, limit / 20))
        found = status.overdue(limit)
        n_found = n_found + 1 if found else 0
    if status.activity.state == WAITING:  # like others: the lowest rank reports and aborts
        time.sleep(rank * (FORWARD_S + MAX_POLL_S))
    needed = status.is_needed
    others = "stopping all ranks" if needed else "the other replicas continue"
    faulthandler.dump_traceback()
    sys.stderr.write(
        f"nbflow: rank {rank} of {size} on {platform.node()} has {found}; {others}; "
        f"if it is only slow, set NBFLOW_HANG_S higher ({limit:g})\n"
    )
    sys.stderr.flush()
    time.sleep(FORWARD_S)
    if needed:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)
    os._exit(1)
