"""Ranks with a GPU each, through an MPI library that takes arrays on devices.

Such a library is never assumed: mpi4py passes the addresses of device arrays on in any case, and
one that cannot use them ends with a segmentation fault.  `cuda_aware` asks.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

from nbflow.distributed.comm import Alone, Comm
from nbflow.distributed.mpi import Mpi
from nbflow_kernels.errors import UsageError


def cuda_aware() -> bool:
    """Return whether the MPI library says that it takes arrays on a CUDA device.

    Without mpi4py, and where the library has no answer (``MPIX_Query_cuda_support``), it does not.
    """
    try:
        from mpi4py import MPI

        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (ImportError, OSError, AttributeError):
        return False


class DeviceMpi(Comm):
    """One rank with its current CUDA device; sums are those of `Mpi`, in the order of the ranks.

    Parameters
    ----------
    host : Comm
        The same ranks on the host, an `Mpi`.
    xp : module, optional
        CuPy, or what stands for it.
    """

    def __init__(self, host: Comm, xp: Any = None) -> None:
        super().__init__()
        assert isinstance(host, Mpi), "ranks that are threads have no MPI library"
        self._host, self._xp = host, xp or importlib.import_module("cupy")
        self.rank, self.size = host.rank, host.size

    def _ready(self) -> None:
        """Wait until what the device was given is done: MPI knows nothing of streams."""
        self._xp.cuda.get_current_stream().synchronize()

    def _exchange(self, part: Any, whole: Any, counts: Sequence[int]) -> None:
        self._ready()
        self._host._exchange(part, whole, counts)

    def _buffer(self, shape: tuple[int, ...]) -> Any:
        buffer = self._scratch.get(shape)
        if buffer is None:
            buffer = self._scratch[shape] = self._xp.empty(shape, "float32")
        return buffer

    def Allreduce_q8(self, array: Any) -> None:
        raise UsageError("exchange 'q8' is for arrays on the host")

    def Send(self, array: Any, dest: int) -> None:
        self._ready()
        self._host.send_now(array, dest)
        self.sent["send"] += array.nbytes

    def Recv(self, array: Any, source: int) -> None:
        self._ready()
        self._host.Recv(array, source)

    def Bcast(self, array: Any, root: int) -> None:
        self._ready()
        self._host.bcast_now(array, root)
        if self.rank == root:
            self.sent["broadcast"] += array.nbytes * (self.size - 1)

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        return self._host.bcast_object(value, root)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        return self._host.gather_object(value, root)

    def barrier(self) -> None:
        self._ready()
        self._host.barrier()

    def split(self, ranks: Sequence[int]) -> Comm | None:
        part = self._host.split(ranks)
        if part is None:
            return None
        return Alone() if part.size == 1 else DeviceMpi(part, self._xp)
