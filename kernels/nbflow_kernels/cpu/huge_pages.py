"""Memory for weights in huge pages, where the system has them.

Weights are read once per step from end to end, some 600 MB of them in a step of 1.1 billion at
4 bits.  In pages of 4 KB every page costs a walk through the page tables, at which reading ahead
stops: matrices of 2 to 7 MB were multiplied at 0.7 to 0.9 of the speed of those in pages of 2 MB.
NumPy asks for huge pages too, but for each array of 4 MB or more by itself, of which the part
before the first and behind the last multiple of 2 MB has small ones.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.fork import in_child

ALIGNMENT = 64
"""Of what `zeros` returns: a cache line, a vector."""
PAGE = 2 << 20
LEAST = 256 << 10
"""Less is NumPy's: it stays in the caches, or is not much of what is read."""
CHUNK = 4 * PAGE
"""Smaller arrays share pieces of memory of this size; those of half of it have one of their own."""

_lock = threading.Lock()


class _Chunk:
    """Memory of which arrays take one part after the other; it goes with the last of them."""

    def __init__(self) -> None:
        self._whole: weakref.ref[NDArray[np.uint8]] = weakref.ref(np.zeros(0, np.uint8))
        self._next = self._end = 0

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return the next part, of this memory or of new one."""
        whole = self._whole()
        if whole is None or self._next + n_bytes > self._end:
            whole, self._next = _mapped(CHUNK)
            self._whole, self._end = weakref.ref(whole), self._next + CHUNK
        start = self._next
        self._next = -(-(start + n_bytes) // ALIGNMENT) * ALIGNMENT
        return whole[start : start + n_bytes]


_chunk = _Chunk()


@in_child
def _drop_chunk() -> None:
    """Use memory of this process's own: another thread may have been about to take a part."""
    global _chunk, _lock
    _chunk, _lock = _Chunk(), threading.Lock()


def zeros(n_bytes: int) -> NDArray[np.uint8]:
    """Return zero bytes that start at a multiple of `ALIGNMENT`, in huge pages if they are many.

    The system gives real memory to a page when it is first written; of a chunk that several arrays
    share, what lies behind the last of them in its page is given too, less than 2 MB.

    Raises
    ------
    MemoryError
        If there is not so much memory.

    Examples
    --------
    >>> a = zeros(3 << 20)
    >>> len(a), int(a.max()), a.ctypes.data % ALIGNMENT
    (3145728, 0, 0)
    """
    if n_bytes < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        room = np.zeros(n_bytes + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        return room[start : start + n_bytes]
    if 2 * n_bytes >= CHUNK:
        whole, start = _mapped(n_bytes)
        return whole[start : start + n_bytes]
    with _lock:
        return _chunk.take(n_bytes)


def _mapped(n_bytes: int) -> tuple[NDArray[np.uint8], int]:
    """Return new memory, and where in it `n_bytes` begin with as many huge pages as they fill."""
    try:
        memory = mmap.mmap(-1, n_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"no memory for {n_bytes} bytes of weights") from error
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % PAGE
    with contextlib.suppress(OSError):  # the system has none
        memory.madvise(mmap.MADV_HUGEPAGE, start, n_bytes // PAGE * PAGE)
    return whole, start
