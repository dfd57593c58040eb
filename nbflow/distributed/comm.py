"""What the engine needs of a communicator, and the one of a single process.

Names follow mpi4py: capital names move buffers of arrays, lower-case names move Python objects.
Sums are taken in the order of the ranks, whatever the transport, so that every rank gets the same
bits and `Threads` the same as `Mpi`.  `sent` counts the payload bytes that this rank has sent with
the capital names; a message to k ranks counts k times.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.distributed.quantized_all_reduce import q8_add, q8_error, q8_pack
from nbflow_kernels.errors import UsageError


class RankError(UsageError):
    """An error of one rank within a step, from which the ranks beside it cannot go on."""


class Comm(ABC):
    """Ranks that can talk to each other."""

    rank: int
    """Number of this rank, from 0."""
    size: int
    """Number of ranks."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self._scratch: dict[tuple[int, ...], np.ndarray] = {}
        self._signal = self._noise = 0.0

    @abstractmethod
    def _exchange(self, part: np.ndarray, whole: np.ndarray, counts: Sequence[int]) -> None:
        """Gather flat float32 `part` of every rank, in order, into flat `whole` on every rank."""

    @abstractmethod
    def Send(self, array: np.ndarray, dest: int) -> None:
        """Send a C-contiguous array to rank `dest`."""

    @abstractmethod
    def Recv(self, array: np.ndarray, source: int) -> None:
        """Receive into a C-contiguous array from rank `source`."""

    @abstractmethod
    def Bcast(self, array: np.ndarray, root: int) -> None:
        """Copy the C-contiguous `array` of rank `root` to every rank."""

    @abstractmethod
    def bcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the object of rank `root` on every rank."""

    @abstractmethod
    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks, in order, on rank `root`; None elsewhere."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> Comm | None:
        """Return a communicator of these ranks, numbered in this order; None for the others.

        Every rank must call it with the same ranks.
        """

    def Send_later(self, array: np.ndarray, dest: int) -> None:
        """Send a C-contiguous array to rank `dest` without waiting for it.

        The array may be changed afterwards.
        """
        self.Send(array, dest)

    def Post(self, array: np.ndarray, dest: int) -> None:
        """Send a small C-contiguous array to rank `dest` without waiting for it; counted as told.

        The array may be changed afterwards.
        """
        self.Send(array.copy(), dest)
        self.sent["send"] -= array.nbytes
        self.sent["broadcast"] += array.nbytes

    def Allreduce(self, array: np.ndarray) -> None:
        """Replace the C-contiguous float32 `array` by its sum over all ranks, on every rank."""
        if self.size == 1:
            return
        gathered = self._buffer((self.size, array.size))
        flat = array.reshape(-1)
        self._exchange(flat, gathered.reshape(-1), [array.size] * self.size)
        flat[:] = gathered[0]
        for r in range(1, self.size):
            flat += gathered[r]
        self.sent["all_reduce"] += array.nbytes * (self.size - 1)

    def Allreduce_q8(self, array: np.ndarray) -> None:
        """Replace the C-contiguous float32 `array` by the sum of what all ranks round theirs to.

        Each rank sends its part as bytes: blocks of 32 numbers with a float32 scale, 9 bits for
        each number.  Every rank, the sender too, adds up the rounded parts, in the order of the
        ranks, so that all get the same bits.  `rounding_error` says what the rounding costs.
        """
        if self.size == 1:
            return
        flat = array.reshape(-1)
        packed = q8_pack(flat)
        gathered = self._buffer((self.size, packed.size))
        self._exchange(packed, gathered.reshape(-1), [packed.size] * self.size)
        signal, noise = q8_error(flat, packed)
        self._signal, self._noise = self._signal + signal, self._noise + noise
        flat[:] = 0
        for part in gathered:
            q8_add(part, flat)
        self.sent["all_reduce"] += packed.nbytes * (self.size - 1)

    @property
    def rounding_error(self) -> float:
        """Root mean square of what `Allreduce_q8` rounded off, by that of what this rank gave."""
        return math.sqrt(self._noise / self._signal) if self._signal else 0.0

    def Allgather_columns(self, part: np.ndarray, whole: np.ndarray, widths: Sequence[int]) -> None:
        """Put the columns that the ranks hold side by side, on every rank.

        Parameters
        ----------
        part : array of float32, shape (R, widths[rank])
            This rank's columns, C-contiguous.
        whole : array of float32, shape (R, sum(widths))
            Where to write.
        widths : sequence of int
            Columns of each rank.
        """
        rows = part.shape[0]
        flat = self._buffer((rows * sum(widths),))
        self._exchange(part.reshape(-1), flat, [rows * w for w in widths])
        at = column = 0
        for width in widths:
            block = flat[at : at + rows * width].reshape(rows, width)
            whole[:, column : column + width] = block
            at, column = at + rows * width, column + width
        self.sent["all_gather"] += part.nbytes * (self.size - 1)

    def _buffer(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return a float32 scratch array that is reused for the same shape."""
        buffer = self._scratch.get(shape)
        if buffer is None:
            if len(self._scratch) > 16:
                self._scratch.clear()
            buffer = self._scratch[shape] = np.empty(shape, np.float32)
        return buffer


class Alone(Comm):
    """The communicator of a single rank."""

    rank, size = 0, 1

    def _exchange(self, part: np.ndarray, whole: np.ndarray, counts: Sequence[int]) -> None:
        np.copyto(whole, part)

    def Send(self, array: np.ndarray, dest: int) -> None:
        raise RuntimeError("a single rank has nobody to send to")

    def Recv(self, array: np.ndarray, source: int) -> None:
        raise RuntimeError("a single rank has nobody to receive from")

    def Bcast(self, array: np.ndarray, root: int) -> None:
        """Do nothing: the array is there already."""

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        return value

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        return [value]

    def barrier(self) -> None:
        """Do nothing: nobody else is on the way."""

    def split(self, ranks: Sequence[int]) -> Comm | None:
        return Alone() if 0 in ranks else None
