"""Communicator of ranks with GPUs through a CUDA-aware MPI library.

CUDA support must be queried (`cuda_aware`): mpi4py passes device addresses to any library, and one
without support crashes.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

from nbflow.distributed.comm import Comm, DeviceComm, SelfComm
from nbflow.distributed.mpi import MpiComm


def cuda_aware() -> bool:
    """Return True if the MPI library reports CUDA support (``MPIX_Query_cuda_support``)."""
    try:
        from mpi4py import MPI

        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (ImportError, OSError, AttributeError):
        return False


class CudaAwareMpiComm(DeviceComm):
    """One rank with its current CUDA device; sums in rank order, like the `MpiComm` of the host."""

    def __init__(self, host: Comm, xp: Any = None) -> None:
        assert isinstance(host, MpiComm), "thread ranks have no MPI library"
        super().__init__(host, xp or importlib.import_module("cupy"))

    def _allgatherv(self, part: Any, whole: Any, counts: Sequence[int]) -> None:
        self._synchronize()  # MPI knows nothing of streams
        self._host._allgatherv(part, whole, counts)

    def _send(self, array: Any, dest: int) -> None:
        self._synchronize()
        self._host._send(array, dest)

    def Recv(self, array: Any, source: int) -> None:
        self._synchronize()
        self._host.Recv(array, source)

    def _bcast(self, array: Any, root: int) -> None:
        self._synchronize()
        self._host._bcast(array, root)

    def split(self, ranks: Sequence[int]) -> Comm | None:
        part = self._host.split(ranks)
        if part is None:
            return None
        return SelfComm() if part.size == 1 else CudaAwareMpiComm(part, self._xp)
