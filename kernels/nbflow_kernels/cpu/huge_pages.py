"""Allocator of weights and caches in huge pages, where the system has them.

A decoding step reads all weights once, some 600 MB for 1.1 billion at 4 bits, and the keys and
values of its sequences.  With 4 KB pages every page costs a page-table walk, at which hardware
prefetching stops: matrices of 2 to 7 MB ran at 0.7 to 0.9 of their speed in 2 MB pages, and
attention to 3,500 tokens, 2 MB of keys and values in each layer, at 0.75.  NumPy requests huge
pages too, but for each array of 4 MB or more separately, whose start and end outside multiples of
2 MB get small pages.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nbflow_kernels.cpu.fork import in_child

ALIGNMENT = 64
"""Alignment of `zeros` in bytes: a cache line, a vector."""
PAGE = 2 << 20
LEAST = 256 << 10
"""Smaller arrays are allocated by NumPy: they stay in the caches or are read rarely."""
CHUNK = 4 * PAGE
"""Arrays below half of this share chunks of this size; larger ones have their own mapping."""

_lock = threading.Lock()


class _Chunk:
    """Bump allocator of one chunk, which is freed with its last array."""

    def __init__(self) -> None:
        self._whole: weakref.ref[NDArray[np.uint8]] = weakref.ref(np.zeros(0, np.uint8))
        self._next = self._end = 0

    def allocate(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return the next bytes of this chunk, or the first of a new one."""
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
    """Start a new chunk and lock: another thread of the parent may have held the lock."""
    global _chunk, _lock
    _chunk, _lock = _Chunk(), threading.Lock()


def zeros(n_bytes: int) -> NDArray[np.uint8]:
    """Return zeroed bytes aligned to `ALIGNMENT`, in huge pages from `LEAST` bytes on.

    The system commits a page when it is first written; a shared chunk commits up to 2 MB more than
    its arrays have.

    Raises
    ------
    MemoryError
        If the system has not enough memory.

    Examples
    --------
    >>> a = zeros(3 << 20)
    >>> len(a), int(a.max()), a.ctypes.data % ALIGNMENT
    (3145728, 0, 0)
    """
    if n_bytes < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        padded = np.zeros(n_bytes + ALIGNMENT, np.uint8)
        start = -padded.ctypes.data % ALIGNMENT
        return padded[start : start + n_bytes]
    if 2 * n_bytes >= CHUNK:
        whole, start = _mapped(n_bytes)
        return whole[start : start + n_bytes]
    with _lock:
        return _chunk.allocate(n_bytes)


def zeros_array(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of zeros, allocated as in `zeros`.

    Examples
    --------
    >>> zeros_array((2, 3), np.float16).shape
    (2, 3)
    """
    kind = np.dtype(dtype)
    return zeros(math.prod(shape) * kind.itemsize).view(kind).reshape(shape)


def _mapped(n_bytes: int) -> tuple[NDArray[np.uint8], int]:
    """Map memory; return it and the 2 MB aligned offset at which `n_bytes` begin."""
    try:
        memory = mmap.mmap(-1, n_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"cannot allocate {n_bytes} bytes") from error
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % PAGE
    with contextlib.suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, n_bytes // PAGE * PAGE)
    return whole, start
