"""Communicator of MPI processes, through mpi4py with host buffers.

Every operation is non-blocking; waiting first polls, then yields the core, then sleeps, so that
oversubscribed ranks do not spin each other out and idle ranks use almost no CPU time.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.distributed.comm import Comm, SelfComm
from nbflow.distributed.launch import LAUNCHERS, launched_as
from nbflow.utils.rank_status import status
from nbflow_kernels.cpu.cpu_quota import available_cores
from nbflow_kernels.errors import MissingExtraError, install_command


@functools.cache
def world() -> Comm:
    """Return the communicator of all ranks that mpirun started, or of this process.

    Raises
    ------
    MissingExtraError
        If a launcher started several ranks but mpi4py is not installed.
    """
    variable = next((rank for rank, _ in LAUNCHERS if rank in os.environ), None)
    if variable is None:
        return SelfComm()
    try:
        from mpi4py import MPI
    except ImportError as error:
        if launched_as() == (0, 1):
            return SelfComm()
        raise MissingExtraError(
            f"{variable} is set, so a launcher started several ranks, but mpi4py cannot be "
            f"imported ({error}); install it: {install_command('mpi')}"
        ) from error
    return SelfComm() if MPI.COMM_WORLD.size == 1 else MpiComm(MPI.COMM_WORLD.Dup())


BUSY_POLLS = 200
"""Polls before a rank yields its core, where every rank has a core."""
MAX_IN_FLIGHT = 32
"""Asynchronous sends of a rank in flight."""
SMALL_BYTES = 16 << 10
"""Messages up to this size are sent eagerly, without progress calls."""
PROGRESS_S = 1e-4
"""Interval of progress calls for larger messages."""


@functools.cache
def _is_threaded() -> bool:
    """Return True if several threads may call MPI."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


class MpiComm(Comm):
    """One rank of an mpi4py communicator.

    It polls `polls` times before it yields its core; None for the world, whose ranks may be idle.
    """

    def __init__(self, comm: Any, polls: int | None = None) -> None:
        super().__init__()
        self._comm = comm
        self._polls = polls
        self.rank = comm.rank
        self.size = comm.size
        self._groups: dict[tuple[int, ...], Comm | None] = {}
        self._in_flight: list[tuple[Any, np.ndarray]] = []  # copies live until received
        self._lock = threading.Lock()
        self._progress_thread: threading.Thread | None = None

    def _wait(self, request: Any) -> None:
        for _ in range(self._polls or 1):
            if request.Test():
                return
        started = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - started
            if waited < 2e-3:
                os.sched_yield()
            else:
                status.heartbeat()
                time.sleep(5e-5 if waited < 0.5 else 2e-3)

    def _allgatherv(self, part: np.ndarray, whole: np.ndarray, counts: Sequence[int]) -> None:
        self._wait(self._comm.Iallgatherv(part, (whole, list(counts))))

    def _send(self, array: Any, dest: int) -> None:
        self._wait(self._comm.Isend(array, dest))

    def _bcast(self, array: Any, root: int) -> None:
        self._wait(self._comm.Ibcast(array, root))

    def _start(self, array: np.ndarray, dest: int) -> None:
        """Start to send a copy, which lives until it has been received."""
        while True:
            with self._lock:
                self._drop_received()
                if len(self._in_flight) < MAX_IN_FLIGHT:
                    break
            status.heartbeat()
            time.sleep(PROGRESS_S)
        copy = array.copy()
        with self._lock:
            self._in_flight.append((self._comm.Isend(copy, dest), copy))
            in_progress = array.nbytes > SMALL_BYTES and not self._in_flight[-1][0].Test()
            if in_progress and self._progress_thread is None and _is_threaded():
                self._progress_thread = threading.Thread(
                    target=self._make_progress, daemon=True, name="nbflow-mpi"
                )
                self._progress_thread.start()

    def _drop_received(self) -> None:
        """Drop received messages; the caller holds the lock."""
        self._in_flight = [
            (request, copy) for request, copy in self._in_flight if not request.Test()
        ]

    def _make_progress(self) -> None:
        """Progress large messages while this rank computes: MPI works only inside calls."""
        while True:
            time.sleep(PROGRESS_S)
            with self._lock:
                self._drop_received()
                if not self._in_flight:
                    self._progress_thread = None
                    return

    def Recv(self, array: np.ndarray, source: int) -> None:
        self._wait(self._comm.Irecv(array, source))

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        self.barrier()  # waits without spinning, which bcast does not
        return self._comm.bcast(value, root)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        self.barrier()
        return self._comm.gather(value, root)  # type: ignore[no-any-return]

    def barrier(self) -> None:
        self._wait(self._comm.Ibarrier())

    def hosts(self) -> list[int]:
        from mpi4py import MPI

        self.barrier()  # waits without spinning, which the split does not
        local = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        first = local.bcast(self.rank)
        local.Free()
        found: list[int] = self.bcast_object(self.gather_object(first))
        return found

    def split(self, ranks: Sequence[int]) -> Comm | None:
        key = tuple(ranks)
        if key not in self._groups:
            from mpi4py import MPI

            inside = self.rank in key
            color = 0 if inside else MPI.UNDEFINED
            comm = self._comm.Split(color, key.index(self.rank) if inside else 0)
            if not inside:
                self._groups[key] = None
            else:
                # Ranks of a group work at the same time; the world may have idle ranks.
                polls = self._polls
                if polls is None:
                    polls = BUSY_POLLS if len(key) <= available_cores() else 0
                self._groups[key] = SelfComm() if len(key) == 1 else MpiComm(comm, polls)
        return self._groups[key]

    def all_end(self) -> bool:
        """Return True if every rank of the world calls this within a second."""
        from mpi4py import MPI

        request = MPI.COMM_WORLD.Ibarrier()  # the model uses a duplicate communicator
        until = time.monotonic() + 1.0
        while not request.Test():
            if time.monotonic() > until:
                return False
            time.sleep(1e-3)
        return True
