"""Ranks as MPI processes, through mpi4py with host buffers.

Every operation is non-blocking and waited for here: first by asking again, then by giving the
processor away, then by sleeping, so that more ranks than cores do not spin each other out, and a
rank that is not part of the present partition costs next to nothing while it waits.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.distributed.comm import Alone, Comm
from nbflow.utils.rank_status import status
from nbflow_kernels.cpu.thread_pool import available_cores
from nbflow_kernels.errors import MissingExtraError, install_command

# Set by the launchers of MPICH and Intel MPI, of Open MPI, and by PMIx (Slurm).
_LAUNCHER_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK")


@functools.cache
def world() -> Comm:
    """Return the communicator of all ranks that mpirun started, or of this process alone.

    Raises
    ------
    MissingExtraError
        If a launcher started several ranks but mpi4py is not installed.
    """
    launched = [name for name in _LAUNCHER_VARIABLES if name in os.environ]
    if not launched:
        return Alone()
    try:
        from mpi4py import MPI
    except ImportError as error:
        if os.environ.get(launched[0]) == "1":
            return Alone()
        raise MissingExtraError(
            f"{launched[0]} is set, so a launcher started several ranks, but mpi4py cannot be "
            f"imported ({error}); install it: {install_command('mpi')}"
        ) from error
    return Alone() if MPI.COMM_WORLD.size == 1 else Mpi(MPI.COMM_WORLD.Dup())


BUSY_POLLS = 200
"""How often a rank asks before it gives its core away, where every rank has a core."""
MOST_POSTED = 32
"""Most messages of a rank that are on their way."""
SMALL_BYTES = 16 << 10
"""Messages up to this size are on their way at once."""
PUSH_S = 1e-4
"""How often larger ones are pushed."""


@functools.cache
def _is_threaded() -> bool:
    """Return whether several threads may call MPI."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


class Mpi(Comm):
    """One rank of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py communicator
        The ranks.
    polls : int, optional
        How often to ask before giving the core away; None for the world, whose ranks may be idle.
    """

    def __init__(self, comm: Any, polls: int | None = None) -> None:
        super().__init__()
        self._comm = comm
        self._polls = polls
        self.rank = comm.rank
        self.size = comm.size
        self._groups: dict[tuple[int, ...], Comm | None] = {}
        self._posted: list[tuple[Any, np.ndarray]] = []  # kept until they have been received
        self._lock = threading.Lock()
        self._pusher: threading.Thread | None = None

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

    def _exchange(self, part: np.ndarray, whole: np.ndarray, counts: Sequence[int]) -> None:
        self._wait(self._comm.Iallgatherv(part, (whole, list(counts))))

    def send_now(self, array: Any, dest: int) -> None:
        """Send an array, on the host or a device, and wait until it may be changed; not counted."""
        self._wait(self._comm.Isend(array, dest))

    def bcast_now(self, array: Any, root: int) -> None:
        """Copy an array of rank `root`, on the host or a device, to every rank; not counted."""
        self._wait(self._comm.Ibcast(array, root))

    def Send(self, array: np.ndarray, dest: int) -> None:
        self.send_now(array, dest)
        self.sent["send"] += array.nbytes

    def Send_later(self, array: np.ndarray, dest: int) -> None:
        self._start(array, dest)
        self.sent["send"] += array.nbytes

    def Post(self, array: np.ndarray, dest: int) -> None:
        self._start(array, dest)
        self.sent["broadcast"] += array.nbytes

    def _start(self, array: np.ndarray, dest: int) -> None:
        """Send a copy, which is kept until it has been received."""
        while True:
            with self._lock:
                self._drop_received()
                if len(self._posted) < MOST_POSTED:
                    break
            status.heartbeat()
            time.sleep(PUSH_S)
        kept = array.copy()
        with self._lock:
            self._posted.append((self._comm.Isend(kept, dest), kept))
            on_its_way = array.nbytes > SMALL_BYTES and not self._posted[-1][0].Test()
            if on_its_way and self._pusher is None and _is_threaded():
                self._pusher = threading.Thread(target=self._push, daemon=True, name="nbflow-mpi")
                self._pusher.start()

    def _drop_received(self) -> None:
        """Forget what has been received; the lock is held."""
        self._posted = [(request, kept) for request, kept in self._posted if not request.Test()]

    def _push(self) -> None:
        """Keep large messages moving while this rank computes: MPI works only when it is called."""
        while True:
            time.sleep(PUSH_S)
            with self._lock:
                self._drop_received()
                if not self._posted:
                    self._pusher = None
                    return

    def Recv(self, array: np.ndarray, source: int) -> None:
        self._wait(self._comm.Irecv(array, source))

    def Bcast(self, array: np.ndarray, root: int) -> None:
        self.bcast_now(array, root)
        if self.rank == root:
            self.sent["broadcast"] += array.nbytes * (self.size - 1)

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        self.barrier()  # waits without spinning; the broadcast itself is then quick
        return self._comm.bcast(value, root)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        self.barrier()
        return self._comm.gather(value, root)  # type: ignore[no-any-return]

    def barrier(self) -> None:
        self._wait(self._comm.Ibarrier())

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
                # Ranks outside a part of the world sleep; those of a part all work at once.
                polls = self._polls
                if polls is None:
                    polls = BUSY_POLLS if len(key) <= available_cores() else 0
                self._groups[key] = Alone() if len(key) == 1 else Mpi(comm, polls)
        return self._groups[key]

    def all_end(self, patience_s: float = 1.0) -> bool:
        """Return whether every rank of the world calls this within some time."""
        from mpi4py import MPI

        request = MPI.COMM_WORLD.Ibarrier()  # the messages of the model are on a duplicate
        until = time.monotonic() + patience_s
        while not request.Test():
            if time.monotonic() > until:
                return False
            time.sleep(1e-3)
        return True
