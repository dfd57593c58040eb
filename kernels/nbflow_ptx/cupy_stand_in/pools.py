"""Memory pools and pinned host memory of `cupy_stand_in`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbflow_ptx.cupy_stand_in.state import State
from nbflow_ptx.errors import LaunchError
from nbflow_ptx.memory.device import LIVE, WRITTEN, Allocation

_STEP = 512  # bytes that CuPy's pools round to


class MemoryPool:
    """Memory of arrays that are gone is kept for others of its size."""

    def __init__(self) -> None:
        self._free: list[Allocation] = []
        self._total = 0

    def malloc(self, nbytes: int) -> Any:
        """Stand for CuPy's allocator: for `using_allocator`."""
        raise NotImplementedError("the stand-in's arrays ask the pool themselves")

    def take(self, nbytes: int, name: str, *, written: bool) -> Allocation:
        """Return memory for an array."""
        rounded = -(-nbytes // _STEP) * _STEP
        for place in self._free:
            if place.capacity == rounded:
                self._free.remove(place)
                place.name = name
                break
        else:
            place = State.device.allocate(rounded, name)
            self._total += rounded
        shadow = LIVE | (WRITTEN if written else 0)
        State.device.shadow[place.start : place.start + rounded] = shadow
        return place

    def give(self, place: Allocation) -> None:
        """Take memory back."""
        self._free.append(place)

    def total_bytes(self) -> int:
        """Return the bytes that the pool has taken from the device."""
        return self._total


@contextmanager
def using_allocator(allocator: Any = None) -> Iterator[None]:
    """Let arrays be made by the pool whose `malloc` is given."""
    before = State.here.pool
    State.here.pool = getattr(allocator, "__self__", None)
    try:
        yield
    finally:
        State.here.pool = before


class PinnedMemory:
    """Host memory that a device copies from and to by itself: a buffer of bytes."""

    _places: dict[int, int] = {}  # noqa: RUF012 - what is pinned, of all

    def __new__(cls, nbytes: int) -> Any:
        """Return an array of bytes; NumPy's ``frombuffer`` takes it."""
        memory = (ctypes.c_uint8 * max(nbytes, 1))()
        cls._places[ctypes.addressof(memory)] = nbytes
        return memory

    @classmethod
    def check(cls, address: int, nbytes: int) -> None:
        """Raise if bytes are not pinned."""
        if not any(at <= address and address + nbytes <= at + n for at, n in cls._places.items()):
            raise LaunchError(
                "an asynchronous copy of host memory that is not pinned; take it from "
                "cuda.alloc_pinned_memory (on a GPU the copy would wait)"
            )
