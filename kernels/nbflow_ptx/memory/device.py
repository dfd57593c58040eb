"""Emulated global memory: named allocations with a shadow byte for every byte."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_ptx.errors import LaunchError, OutOfMemory, position
from nbflow_ptx.parsing.syntax import Module

#: Where the address windows of the memory spaces begin in generic addresses.
SHARED_BASE = 1 << 40
LOCAL_BASE = 2 << 40
GLOBAL_BASE = 0x7E << 40
#: Shared memory has a window for the thread's own block, and one for each block of its cluster.
WINDOW_BYTES = 1 << 24
#: Bits of a shadow byte.
LIVE, WRITTEN, FREED, PENDING, READING = 1, 2, 4, 8, 16
#: Unallocated bytes between allocations.
RED_ZONE = 512
_ALIGN = 256


def views(memory: NDArray[np.uint8]) -> dict[int, np.ndarray]:
    """Return `memory` seen as unsigned integers of 1, 2, 4 and 8 bytes, and 16-byte pieces."""
    kinds: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    kinds[16] = np.complex128  # only ever moved, never computed with
    return {n: memory[: memory.size // n * n].view(kind) for n, kind in kinds.items()}


@dataclass
class Allocation:
    """A piece of global memory: `start` is its offset in the heap."""

    start: int
    nbytes: int
    name: str
    freed: bool = False
    capacity: int = 0
    mapped: bool = False
    """True for pinned host memory, which kernels access over the bus."""

    @property
    def address(self) -> int:
        """The pointer a kernel gets."""
        return GLOBAL_BASE + self.start


class Device:
    """The memory of one emulated GPU.

    Parameters
    ----------
    memory_bytes : int
        Most that can be allocated.  Only what is used costs real memory.
    host_bytes : int
        Maximum of mapped host memory, in addition.
    """

    def __init__(self, memory_bytes: int = 1 << 30, host_bytes: int = 1 << 28) -> None:
        self.memory_bytes, self.host_bytes = memory_bytes, host_bytes
        between = (memory_bytes + host_bytes) // 8 + (1 << 20)  # for the gaps between arrays
        size = -(-(memory_bytes + host_bytes + between) // 4096) * 4096
        self.heap: NDArray[np.uint8] = np.zeros(size, np.uint8)
        self.shadow: NDArray[np.uint8] = np.zeros(size, np.uint8)

        self.allocations: list[Allocation] = []  # ordered by start
        self.top = RED_ZONE
        self.device_bytes = self.mapped_bytes = 0
        """Bytes allocated at present: of the device, and of the host's memory that is mapped."""
        self.peak_device_bytes = 0
        """Most `device_bytes` there have been."""
        self.variables: dict[Module, dict[str, Allocation]] = {}
        self.histories: dict[tuple[int, bool], Any] = {}
        """Access histories (`races.Cells`) of launches, by granule and width of a cluster."""
        self._workspace: Allocation | None = None
        self._parameters: Allocation | None = None

    def allocate(
        self, nbytes: int, name: str = "", *, written: bool = False, mapped: bool = False
    ) -> Allocation:
        """Reserve `nbytes`; `written` says that its contents count as initialised.

        `mapped` memory is the host's: it counts by itself.
        """
        if nbytes < 0:
            raise LaunchError(f"cannot allocate {nbytes} bytes")
        self._check_room(nbytes, mapped)
        step = -(-(nbytes + RED_ZONE) // _ALIGN) * _ALIGN
        if self.top + step > self.heap.size:
            found = self._reuse(nbytes)
        else:
            found = Allocation(self.top, nbytes, name, capacity=nbytes)
            self.allocations.append(found)
            self.top += step
        found.name, found.freed = name or f"allocation {len(self.allocations)}", False
        found.mapped = mapped
        self._count(found, 1)
        shadow = LIVE | (WRITTEN if written else 0)
        self.shadow[found.start : found.start + nbytes] = shadow
        return found

    def _reuse(self, nbytes: int) -> Allocation:
        """Reuse freed memory, only when no other is left; the remainder stays free."""
        for k, a in enumerate(self.allocations):
            if a.freed and a.capacity >= nbytes:
                self.shadow[a.start : a.start + a.capacity] = 0
                step = -(-(nbytes + RED_ZONE) // _ALIGN) * _ALIGN
                left = a.capacity - step
                if left > 0:
                    a.capacity = nbytes
                    self.allocations.insert(
                        k + 1, Allocation(a.start + step, 0, "", freed=True, capacity=left)
                    )
                a.nbytes = nbytes
                self.heap[a.start : a.start + nbytes] = 0
                return a
        raise OutOfMemory(f"no piece of the emulated memory that is free has {nbytes} bytes")

    def _check_room(self, nbytes: int, mapped: bool) -> None:
        """Raise if the free memory, contiguous or not, is less."""
        used, most = (
            (self.mapped_bytes, self.host_bytes)
            if mapped
            else (self.device_bytes, self.memory_bytes)
        )
        if used + nbytes > most:
            raise OutOfMemory(
                f"the emulated device has {most} bytes{' of the host' if mapped else ''}, of "
                f"which {used} are taken; {nbytes} more do not fit; make a Device with more"
            )

    def free(self, a: Allocation) -> None:
        """Give memory back; later accesses to it are reported."""
        a.freed = True
        self._count(a, -1)
        self.shadow[a.start : a.start + a.nbytes] = FREED

    def _count(self, a: Allocation, sign: int) -> None:
        if a.mapped:
            self.mapped_bytes += sign * a.nbytes
        else:
            self.device_bytes += sign * a.nbytes
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def bytes_of(self, a: Allocation) -> NDArray[np.uint8]:
        """Return the memory of an allocation (a view)."""
        return self.heap[a.start : a.start + a.nbytes]

    def copy_in(self, array: np.ndarray, name: str, *, written: bool = True) -> Allocation:
        """Allocate and fill memory with an array's contents in C order."""
        a = self.allocate(array.nbytes, name, written=written)
        if written and array.nbytes:
            self.bytes_of(a)[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return a

    def grid_workspace(self) -> int:
        """Return the address of the words cooperative groups' grid barrier counts in."""
        if self._workspace is None:
            self._workspace = self.allocate(64, "grid barrier", written=True)
        return self._workspace.address

    def parameters(self, data: NDArray[np.uint8]) -> Allocation:
        """Return the memory of kernel parameters, filled with those of the next launch."""
        if self._parameters is None or self._parameters.capacity < data.size:
            self._parameters = self.allocate(
                max(data.size, 4096), "kernel parameters", written=True
            )
        self.heap[self._parameters.start : self._parameters.start + data.size] = data
        return self._parameters

    def nearest(self, offset: int) -> Allocation | None:
        """Return the allocation that contains a heap offset, else the closest one."""
        k = bisect_right([a.start for a in self.allocations], offset) - 1
        near = [a for a in self.allocations[max(k, 0) : k + 2]]
        if not near:
            return None
        return min(near, key=lambda a: max(a.start - offset, offset - (a.start + a.nbytes - 1), 0))

    def describe(self, offset: int) -> str:
        """Describe a heap offset: in, before or after which array."""
        a = self.nearest(offset)
        if a is None:
            return "no array exists"
        kind = "freed array" if a.freed else "array"
        return position(offset - a.start, f"{kind} {a.name!r}", a.nbytes)
