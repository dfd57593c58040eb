"""All-reduce and all-gather between threads of one process, as kernels of a captured graph.

In Python an exchange of thread ranks costs 0.1 to 0.4 ms: a rank that waits falls asleep, and those
that wake up wait for the interpreter's lock.  As a call of the step's graph it holds no lock and
spins.  The results are those of `Comm.Allreduce` and `Comm.Allgather_columns` to the bit; sums are
in rank order.

A rank copies its numbers to its *staging* memory, publishes the address, counts itself as arrived,
waits for the others, and reads what all have published.  Two staging buffers take turns: a rank
that begins exchange k + 2 has seen all ranks arrive at k + 1, so none still reads the buffers of k.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow.utils.rank_status import hang_seconds
from nbflow_kernels.cpu import atomics, interpreter, jit, simd
from nbflow_kernels.cpu.graph import GraphNode
from nbflow_kernels.cpu.simd_memory import load_first, read_i64, store_first, write_i64

# Indices of int64 cells, a cache line apart; `_RANKS` is the first line of rank 0.
_ARRIVED, _FAILED, _YIELD, _SLEEP, _SLEEPS, _RANKS = 0, 8, 16, 17, 18, 24
_DONE, _REDUCED, _GATHERED, _STAGING, _CAPACITY, _PUBLISHED = 0, 1, 2, 3, 4, 5
"""Cells of a rank: exchanges done, bytes sent by all-reduces and by all-gathers, its memory and
number of floats, two addresses."""
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


@jit.device_function
def _exchange(cells: Any, rank: Any, size: Any, own: Any, n: Any, sent: Any) -> Any:
    """Publish n float32; return the first rank's cell of their address, 0 if a rank has failed."""
    mine = cells + 8 * (_RANKS + LINE * rank)
    done = read_i64(mine + 8 * _DONE)
    write_i64(mine + 8 * _DONE, done + 1)
    slot = done % 2
    staging = read_i64(mine + 8 * _STAGING) + 4 * slot * read_i64(mine + 8 * _CAPACITY)
    copy(own, staging, n)
    atomics.store(mine + 8 * (_PUBLISHED + slot), staging)
    atomics.add(cells + 8 * _ARRIVED, 1)
    if not _wait(cells, size * (done + 1)):
        return 0
    write_i64(mine + 8 * sent, read_i64(mine + 8 * sent) + 4 * n * (size - 1))
    return cells + 8 * (_RANKS + _PUBLISHED + slot)


@jit.device_function
def copy(source: Any, target: Any, n: Any) -> None:
    """Copy n float32 between addresses."""
    for i in range(0, n, LANES):
        few = min(LANES, n - i)
        store_first(target + 4 * i, few, load_first(source + 4 * i, few, 0.0))


@jit.kernel
def _all_reduce(cells: Any, rank: Any, size: Any, numbers: Any, start: Any, stop: Any) -> None:
    """Replace flat float32 `numbers` by their sums over all ranks; unchanged if one has failed."""
    n, own = len(numbers), simd.address(numbers)
    first = _exchange(cells, rank, size, own, n, _REDUCED)
    if first == 0:
        return
    for i in range(0, n, LANES):
        few = min(LANES, n - i)
        total = load_first(read_i64(first) + 4 * i, few, 0.0)
        for other in range(1, size):
            at = read_i64(first + 8 * LINE * other)
            total = simd.add(total, load_first(at + 4 * i, few, 0.0))
        store_first(own + 4 * i, few, total)


@jit.kernel
def _all_gather(
    cells: Any, rank: Any, size: Any, part: Any, widths: Any, whole: Any, start: Any, stop: Any
) -> None:
    """Put the columns of all ranks side by side; `whole` is unchanged if a rank has failed."""
    first = _exchange(cells, rank, size, simd.address(part), part.size, _GATHERED)
    if first == 0:
        return
    to = simd.address(whole)
    for other in range(size):
        width = widths[other]
        at = read_i64(first + 8 * LINE * other)
        for row in range(len(whole)):
            copy(at + 4 * width * row, to + whole.strides[0] * row, width)
        to += 4 * width


class ThreadCollectives:
    """Memory of the exchanges in graphs of a communicator of `size` threads."""

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
        """False where exchanges must stay in Python: without compiling, or such C functions."""
        return not interpreter.is_on() and bool(self._cells[_YIELD] and self._cells[_SLEEP])

    def all_reduce(self, numbers: np.ndarray, rank: int) -> GraphNode:
        """Return the call that sums a C-contiguous float32 array over the ranks.

        `rank` is the calling one; only its own calls, in one graph at a time, use its memory.
        """
        flat = numbers.reshape(-1)
        self._reserve(rank, flat.size)
        args = self._cells.ctypes.data, rank, self._size, flat
        return GraphNode(_all_reduce, args, 1, float(flat.size), self)

    def all_gather(
        self, part: np.ndarray, whole: np.ndarray, widths: Sequence[int], rank: int
    ) -> GraphNode:
        """Return the call that concatenates the columns of all ranks (`Comm.Allgather_columns`)."""
        self._reserve(rank, part.size)
        columns = np.array(widths, np.int64)
        args = self._cells.ctypes.data, rank, self._size, part, columns, whole
        return GraphNode(_all_gather, args, 1, float(whole.size), self)

    def _reserve(self, rank: int, n: int) -> None:
        """Give a rank staging memory for exchanges of n float32."""
        mine = self._cells[_RANKS + LINE * rank :]
        if n > mine[_CAPACITY]:
            capacity = LANES * -(-max(n, 2 * int(mine[_CAPACITY])) // LANES)
            staging = np.zeros((2, capacity), np.float32)
            self._stagings.append(staging)
            mine[_STAGING], mine[_CAPACITY] = staging.ctypes.data, capacity

    def bytes_sent(self, rank: int) -> Counter[str]:
        """Return the bytes that a rank has sent, those to several ranks several times."""
        mine = self._cells[_RANKS + LINE * rank :]
        return +Counter(all_reduce=int(mine[_REDUCED]), all_gather=int(mine[_GATHERED]))

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
