"""Communicator of ranks with a GPU each, through NCCL.

A host communicator (`MpiComm`) carries Python objects and the unique id.  Collectives run on CuPy's
current stream and can be captured into graphs.

NCCL's all-reduce chooses the order of additions by the size of the message.  With more than two
ranks NCCL therefore only moves float32 parts, and a kernel adds them in the order of the ranks: a
row's bits do not depend on its batch, and are those of `MpiComm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from nbflow.distributed.comm import Comm, DeviceComm, SelfComm
from nbflow_kernels.cuda.all_reduce import ONE_SHOT_BYTES, ordered_sum
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command

DTYPES = {"float32": "NCCL_FLOAT32", "float16": "NCCL_FLOAT16", "int32": "NCCL_INT32"}
"""dtype -> name of NCCL's constant in `cupy.cuda.nccl`."""


def has_nccl() -> bool:
    """Return True if CuPy and a matching NCCL library are installed."""
    try:
        _nccl()
    except MissingExtraError:
        return False
    return True


def _nccl() -> tuple[Any, Any]:
    """Return CuPy and its NCCL module."""
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise MissingExtraError(
            f"ranks with GPUs need CuPy, which cannot be imported ({error}); install it: "
            f"{install_command('cuda12')}, or cuda13"
        ) from error
    if not getattr(nccl, "available", False):
        raise MissingExtraError(
            "CuPy finds no NCCL library; install the one of its CUDA version: pip install "
            "nvidia-nccl-cu12 (or -cu13)"
        )
    return cupy, nccl


class NcclComm(DeviceComm):
    """One rank with its current CUDA device; `host` is a communicator of the same ranks."""

    on_stream = True

    def __init__(self, host: Comm) -> None:
        cupy, self._nccl = _nccl()
        super().__init__(host, cupy)
        unique = self._nccl.get_unique_id() if host.rank == 0 else None
        unique = host.bcast_object(unique)
        self._comm = self._nccl.NcclCommunicator(host.size, unique, host.rank)

    def _arguments(self, array: Any) -> tuple[int, int, int]:
        """Return address, number of elements and NCCL's type of a device array."""
        if not hasattr(array, "__cuda_array_interface__"):
            raise TypeError(f"array must be on a CUDA device, got {type(array).__name__}")
        name = str(array.dtype)
        if name not in DTYPES:
            raise TypeError(f"array must be of {', '.join(DTYPES)}, got {name}")
        if not array.flags.c_contiguous:
            raise UsageError("array must be C-contiguous; pass a copy")
        return int(array.data.ptr), int(array.size), int(getattr(self._nccl, DTYPES[name]))

    @property
    def _stream(self) -> int:
        return int(self._xp.cuda.get_current_stream().ptr)

    def Allreduce(self, array: Any) -> None:
        if self.size == 1:
            return
        address, n, kind = self._arguments(array)
        if self.size == 2 or array.dtype != "float32":  # a + b = b + a
            self._comm.allReduce(address, address, n, kind, self._nccl.NCCL_SUM, self._stream)
        elif array.nbytes <= ONE_SHOT_BYTES:
            parts = self._buffer((self.size, n))
            self._comm.allGather(address, int(parts.data.ptr), n, kind, self._stream)
            ordered_sum(parts, array.reshape(-1))
        else:
            self._two_shot(array.reshape(-1), kind)
        self.sent["all_reduce"] += array.nbytes * (self.size - 1)

    def _two_shot(self, flat: Any, kind: int) -> None:
        """Exchange shares, add those of this rank in order, and gather the sums."""
        n, itemsize = flat.size, flat.itemsize
        share = 4 * -(-n // (4 * self.size))  # 16 bytes: aligned loads
        starts = [min(r * share, n) for r in range(self.size + 1)]
        counts = [end - start for start, end in pairwise(starts)]
        mine, address = counts[self.rank], int(flat.data.ptr)
        parts = self._buffer((self.size, mine))
        self._nccl.groupStart()
        for peer, (start, count) in enumerate(zip(starts, counts, strict=False)):
            source, target = address + start * itemsize, int(parts.data.ptr)
            self._comm.send(source, count, kind, peer, self._stream)
            self._comm.recv(target + peer * mine * itemsize, mine, kind, peer, self._stream)
        self._nccl.groupEnd()
        own = flat[starts[self.rank] : starts[self.rank + 1]]
        ordered_sum(parts, own)
        self._allgatherv(own, flat, counts)

    def _allgatherv(self, part: Any, whole: Any, counts: Sequence[int]) -> None:
        address, n, kind = self._arguments(part)
        target, _, _ = self._arguments(whole)
        if len(set(counts)) == 1:
            self._comm.allGather(address, target, n, kind, self._stream)
            return
        self._nccl.groupStart()  # different lengths: one broadcast per rank, grouped
        for root, count in enumerate(counts):
            source = address if root == self.rank else target
            self._comm.broadcast(source, target, count, kind, root, self._stream)
            target += count * part.dtype.itemsize
        self._nccl.groupEnd()

    def _send(self, array: Any, dest: int) -> None:
        address, n, kind = self._arguments(array)
        self._comm.send(address, n, kind, dest, self._stream)

    def Recv(self, array: Any, source: int) -> None:
        address, n, kind = self._arguments(array)
        self._comm.recv(address, n, kind, source, self._stream)

    def _bcast(self, array: Any, root: int) -> None:
        address, n, kind = self._arguments(array)
        self._comm.broadcast(address, address, n, kind, root, self._stream)

    def split(self, ranks: Sequence[int]) -> Comm | None:
        part = self._host.split(ranks)
        if part is None:
            return None
        return SelfComm() if part.size == 1 else NcclComm(part)
