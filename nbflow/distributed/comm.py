"""Communicator interface of the engine, and the communicator of a single process.

Names follow mpi4py: capital names move arrays, lower-case names move Python objects.  Sums are in
rank order, so that every rank and every host transport gets the same bits.  `sent` counts payload
bytes of the capital names; a message to k ranks counts k times.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.distributed.plan import Plan
from nbflow.distributed.quantized_all_reduce import q8_add, q8_error, q8_pack
from nbflow_kernels.cpu.graph import GraphNode
from nbflow_kernels.errors import UsageError


class RankError(UsageError):
    """Error of one rank within a step, after which the other ranks cannot continue."""


class Comm(ABC):
    """Communicator: ranks that exchange arrays and objects."""

    rank: int
    """Number of this rank, from 0."""
    size: int
    """Number of ranks."""
    on_stream = False
    """Collectives run on the current stream of a device, so that CUDA graphs can hold them."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self._captures = True
        self._scratch: dict[tuple[int, ...], np.ndarray] = {}
        self._signal = self._noise = 0.0

    @abstractmethod
    def _allgatherv(self, part: np.ndarray, whole: np.ndarray, counts: Sequence[int]) -> None:
        """Gather flat float32 `part` of every rank, in rank order, into `whole` on every rank."""

    @abstractmethod
    def _send(self, array: np.ndarray, dest: int) -> None:
        """Send an array, which may be overwritten afterwards; not counted."""

    @abstractmethod
    def _bcast(self, array: np.ndarray, root: int) -> None:
        """Broadcast an array; not counted."""

    @abstractmethod
    def Recv(self, array: np.ndarray, source: int) -> None:
        """Receive into a C-contiguous array from rank `source`."""

    @abstractmethod
    def bcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the object of rank `root` on every rank."""

    @abstractmethod
    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks, in rank order, on rank `root`; None elsewhere."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank calls it."""

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> Comm | None:
        """Return a communicator of these ranks in this order; None on other ranks.

        Collective: every rank must call it with the same ranks.
        """

    def hosts(self) -> list[int]:
        """Return the host of every rank, named by the lowest rank on it; collective.

        Ranks of one process are on one host.
        """
        return [0] * self.size

    def _start(self, array: np.ndarray, dest: int) -> None:
        """Send as `_send`, where possible without waiting for the receiver."""
        self._send(array, dest)

    def Send(self, array: np.ndarray, dest: int) -> None:
        """Send a C-contiguous array to rank `dest`."""
        self._send(array, dest)
        self.sent["send"] += array.nbytes

    def Send_later(self, array: np.ndarray, dest: int) -> None:
        """Send a copy of a C-contiguous array to rank `dest` without waiting for it."""
        self._start(array, dest)
        self.sent["send"] += array.nbytes

    def send_all(self, array: np.ndarray, ranks: Sequence[int]) -> None:
        """Send a copy of a C-contiguous array to several ranks (`Send_later`)."""
        for rank in ranks:
            self.Send_later(array, rank)

    def Post(self, array: np.ndarray, dest: int) -> None:
        """Send a copy of a small C-contiguous array without waiting; counts as broadcast."""
        self._start(array, dest)
        self.sent["broadcast"] += array.nbytes

    def Bcast(self, array: np.ndarray, root: int) -> None:
        """Copy the C-contiguous `array` of rank `root` to every rank."""
        self._bcast(array, root)
        if self.rank == root and self.size > 1:
            self.sent["broadcast"] += array.nbytes * (self.size - 1)

    def Allreduce(self, array: np.ndarray) -> None:
        """Replace the C-contiguous float32 `array` by its sum over all ranks."""
        if self.size == 1:
            return
        gathered = self._buffer((self.size, array.size))
        flat = array.reshape(-1)
        self._allgatherv(flat, gathered.reshape(-1), [array.size] * self.size)
        flat[:] = gathered[0]
        for r in range(1, self.size):
            flat += gathered[r]
        self.sent["all_reduce"] += array.nbytes * (self.size - 1)

    def captured_all_reduce(self, array: np.ndarray) -> GraphNode | None:
        """Return `Allreduce` of an array as a call of a graph; None if it must be Python.

        All ranks capture alike (`agree_to_capture`), and each runs one graph at a time.
        """
        return None

    def captured_all_gather(
        self, part: np.ndarray, whole: np.ndarray, widths: Sequence[int]
    ) -> GraphNode | None:
        """Return `Allgather_columns` as `captured_all_reduce` returns `Allreduce`."""
        return None

    def agree_to_capture(self, can_capture: bool) -> None:
        """Let exchanges be captured if every rank can: those of a GPU run in Python."""
        self._captures = can_capture

    def bytes_sent(self) -> Counter[str]:
        """Return `sent` with the bytes of captured calls."""
        return self.sent

    def Allreduce_q8(self, array: np.ndarray) -> None:
        """Replace the C-contiguous float32 `array` by the sum of all ranks' q8-quantized arrays.

        Blocks of 32 numbers have a float32 scale: 9 bits per number.  Every rank, the sender too,
        adds the quantized arrays in rank order, so that all get the same bits.  `rounding_error`
        measures the loss.
        """
        if self.size == 1:
            return
        flat = array.reshape(-1)
        packed = q8_pack(flat)
        gathered = self._buffer((self.size, packed.size))
        self._allgatherv(packed, gathered.reshape(-1), [packed.size] * self.size)
        signal, noise = q8_error(flat, packed)
        self._signal, self._noise = self._signal + signal, self._noise + noise
        flat[:] = 0
        for part in gathered:
            q8_add(part, flat)
        self.sent["all_reduce"] += packed.nbytes * (self.size - 1)

    @property
    def rounding_error(self) -> float:
        """Relative RMS quantization error of this rank's arrays in `Allreduce_q8`."""
        return math.sqrt(self._noise / self._signal) if self._signal else 0.0

    def Allgather_columns(self, part: np.ndarray, whole: np.ndarray, widths: Sequence[int]) -> None:
        """Concatenate the columns of all ranks, on every rank.

        Parameters
        ----------
        part : array of float32, shape (R, widths[rank])
            This rank's columns, C-contiguous.
        whole : array of float32, shape (R, sum(widths))
            Output.
        widths : sequence of int
            Columns of each rank.
        """
        rows = part.shape[0]
        flat = self._buffer((rows * sum(widths),))
        self._allgatherv(part.reshape(-1), flat, [rows * w for w in widths])
        start = column = 0
        for width in widths:
            block = flat[start : start + rows * width].reshape(rows, width)
            whole[:, column : column + width] = block
            start, column = start + rows * width, column + width
        self.sent["all_gather"] += part.nbytes * (self.size - 1)

    def _buffer(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return a float32 scratch array, reused by shape."""
        buffer = self._scratch.get(shape)
        if buffer is None:
            if len(self._scratch) > 16:
                self._scratch.clear()
            buffer = self._scratch[shape] = np.empty(shape, np.float32)
        return buffer


class DeviceComm(Comm):
    """Communicator of device arrays; Python objects go through a host communicator."""

    def __init__(self, host: Comm, xp: Any) -> None:
        super().__init__()
        self._host: Any = host
        self._xp = xp
        self.rank, self.size = host.rank, host.size

    def _synchronize(self) -> None:
        """Wait for the current stream of the device."""
        self._xp.cuda.get_current_stream().synchronize()

    def _buffer(self, shape: tuple[int, ...]) -> Any:
        """Return a new array: CuPy's pool is ordered by stream, and a graph has a pool."""
        return self._xp.empty(shape, "float32")

    def Allreduce_q8(self, array: Any) -> None:
        raise UsageError("all_reduce='q8' needs arrays on the host; use 'f32'")

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        return self._host.bcast_object(value, root)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        found: list[Any] | None = self._host.gather_object(value, root)
        return found

    def hosts(self) -> list[int]:
        found: list[int] = self._host.hosts()
        return found

    def barrier(self) -> None:
        self._synchronize()
        self._host.barrier()


class SelfComm(Comm):
    """Communicator of a single rank."""

    rank, size = 0, 1

    def _allgatherv(self, part: np.ndarray, whole: np.ndarray, counts: Sequence[int]) -> None:
        np.copyto(whole, part)

    def _send(self, array: np.ndarray, dest: int) -> None:
        raise RuntimeError("cannot send: this communicator has one rank")

    def Recv(self, array: np.ndarray, source: int) -> None:
        raise RuntimeError("cannot receive: this communicator has one rank")

    def _bcast(self, array: np.ndarray, root: int) -> None:
        """Do nothing: one rank."""

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        return value

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        return [value]

    def barrier(self) -> None:
        """Do nothing: one rank."""

    def split(self, ranks: Sequence[int]) -> Comm | None:
        return SelfComm() if 0 in ranks else None


def make_groups(plan: Plan, comm: Comm) -> dict[tuple[int, ...], Comm]:
    """Return the communicators of this rank's stages; collective over `comm`."""
    groups: dict[tuple[int, ...], Comm] = {}
    for group in dict.fromkeys(r.group for r in plan.ranks):
        if len(group) > 1:
            part = comm.split([plan.numbers.index(rank) for rank in group])
            if part is not None:
                groups[group] = part
    return groups
