"""All-reduce between threads of one process, as a kernel of a captured graph.

In Python an all-reduce of thread ranks costs some 0.1 ms: a rank that waits falls asleep, and those
that wake up wait for the interpreter's lock.  As a call of the step's graph it holds no lock and
spins.  The sums are those of `Comm.Allreduce` to the bit: in rank order.

A rank copies its numbers to its *staging* memory, publishes the address, counts itself as arrived,
waits for the others, and adds what all have published.  Two staging buffers take turns: a rank that
begins exchange k + 2 has seen all ranks arrive at k + 1, so none still reads the buffers of k.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from nbflow.utils.rank_status import hang_seconds
from nbflow_kernels.cpu import atomics, interpreter, jit, simd
from nbflow_kernels.cpu.graph import GraphNode
from nbflow_kernels.cpu.simd_memory import load_first, read_i64, store_first, write_i64

# Indices of int64 cells, a cache line apart; `_RANKS` is the first line of rank 0.
_ARRIVED, _FAILED, _YIELD, _SLEEP, _SLEEPS, _RANKS = 0, 8, 16, 17, 18, 24
_DONE, _SENT, _STAGING, _CAPACITY, _PUBLISHED = 0, 1, 2, 3, 4
"""Cells of a rank: exchanges done, bytes sent, its memory and number of floats, two addresses."""
LINE = 8
SPINS, YIELDS, SLEEP_US = 50, 500, 50
"""Polls of a waiting rank with a pause, then with a yield; then microseconds of a sleep.  With as
many spins as in `nbflow_kernels.cpu.thread_pool`, generation was three times slower beside other
programs."""
LANES = 16


@jit.device_function
def _wait(cells: Any, target: Any) -> Any:
    """Wait until `target` ranks have arrived in all; False if a rank has failed or is too late."""
    for _ in range(SPINS):
        if atomics.load(cells + 8 * _ARRIVED) >= target:
            return True
        atomics.pause()
    give_way, sleep = read_i64(cells + 8 * _YIELD), read_i64(cells + 8 * _SLEEP)
    for i in range(YIELDS + read_i64(cells + 8 * _SLEEPS)):
        if atomics.load(cells + 8 * _ARRIVED) >= target:
            return True
        if atomics.load(cells + 8 * _FAILED) != 0:
            return False
        atomics.call_int(give_way if i < YIELDS else sleep, SLEEP_US)
    atomics.store(cells + 8 * _FAILED, 1)
    return False


@jit.kernel
def _all_reduce(cells: Any, rank: Any, size: Any, numbers: Any, start: Any, stop: Any) -> None:
    """Replace flat float32 `numbers` by their sums over all ranks; unchanged if one has failed."""
    mine = cells + 8 * (_RANKS + LINE * rank)
    done = read_i64(mine + 8 * _DONE)
    write_i64(mine + 8 * _DONE, done + 1)
    slot, n, own = done % 2, len(numbers), simd.address(numbers)
    staging = read_i64(mine + 8 * _STAGING) + 4 * slot * read_i64(mine + 8 * _CAPACITY)
    for i in range(0, n, LANES):
        simd.store_f32(staging + 4 * i, load_first(own + 4 * i, min(LANES, n - i), 0.0))
    atomics.store(mine + 8 * (_PUBLISHED + slot), staging)
    atomics.add(cells + 8 * _ARRIVED, 1)
    if not _wait(cells, size * (done + 1)):
        return
    for i in range(0, n, LANES):
        total = simd.load_f32(read_i64(cells + 8 * (_RANKS + _PUBLISHED + slot)) + 4 * i)
        for other in range(1, size):
            at = read_i64(cells + 8 * (_RANKS + LINE * other + _PUBLISHED + slot))
            total = simd.add(total, simd.load_f32(at + 4 * i))
        store_first(own + 4 * i, min(LANES, n - i), total)
    write_i64(mine + 8 * _SENT, read_i64(mine + 8 * _SENT) + 4 * n * (size - 1))


class SharedSums:
    """Memory of the all-reduces of a communicator of `size` threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        memory = np.zeros(_RANKS + LINE * (size + 1), np.int64)
        self._memory = memory
        self._cells = memory[-memory.ctypes.data % 64 // 8 :]  # starts with a cache line
        self._stagings: list[np.ndarray] = []
        """Memory that ranks read from, kept while they may; sizes at least double."""
        self._cells[_YIELD], self._cells[_SLEEP] = map(_address, ("sched_yield", "usleep"))
        self._cells[_SLEEPS] = round(3e6 * hang_seconds() / SLEEP_US)

    @property
    def can_capture(self) -> bool:
        """False where all-reduces must stay in Python: without compiling, or such C functions."""
        return not interpreter.is_on() and bool(self._cells[_YIELD] and self._cells[_SLEEP])

    def all_reduce(self, numbers: np.ndarray, rank: int) -> GraphNode:
        """Return the call that sums a C-contiguous float32 array over the ranks.

        `rank` is the calling one; only its own calls, in one graph at a time, use its memory.
        """
        flat = numbers.reshape(-1)
        mine = self._cells[_RANKS + LINE * rank :]
        if flat.size > mine[_CAPACITY]:
            capacity = LANES * -(-max(flat.size, 2 * int(mine[_CAPACITY])) // LANES)
            staging = np.zeros((2, capacity), np.float32)
            self._stagings.append(staging)
            mine[_STAGING], mine[_CAPACITY] = staging.ctypes.data, capacity
        args = self._cells.ctypes.data, rank, self._size, flat
        return GraphNode(_all_reduce, args, 1, float(flat.size), self)

    def bytes_sent(self, rank: int) -> int:
        """Return the bytes that a rank has sent, those to several ranks several times."""
        return int(self._cells[_RANKS + LINE * rank + _SENT])

    @property
    def has_failed(self) -> bool:
        """True after `fail`, and after a rank has waited too long, until `clear`."""
        return bool(self._cells[_FAILED])

    def fail(self) -> None:
        """End every wait, now and later."""
        self._cells[_FAILED] = 1

    def clear(self) -> None:
        """Undo `fail` while no rank runs."""
        ranks = self._cells[_RANKS : _RANKS + LINE * self._size].reshape(-1, LINE)
        ranks[:, _DONE] = self._cells[_ARRIVED] = self._cells[_FAILED] = 0


def _address(name: str) -> int:
    """Return the address of a C function ``int f(int)``, or 0."""
    try:
        return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0
