"""Race detection: the last accesses of each byte, and whether they happen before a new one.

Every memory or synchronisation instruction executed gets a *stamp*, a growing number.  For each
cell of memory the last write (thread, stamp) and the reads since are kept.  An earlier access is
ordered before mine when

* the same thread made it;
* a thread of my warp made it, and we both took part in a warp-level synchronisation since, or it
  arrived at an mbarrier and I waited for one;
* a thread of my block made it, and barriers or phases of mbarriers since lead from its warp to
  mine (vector clocks), or
  that thread issued a fence since, and I have read something with a strong access since;
* a thread of another block of my cluster made it, and ``barrier.cluster`` or phases of mbarriers
  since lead from its warp to mine (the same clocks, of all warps of a cluster);
* a thread of another block made it, its block issued a fence since, and mine has read something
  with an atomic or another strong access since (or the whole grid met at a barrier).

Atomics and strong accesses (volatile, relaxed, acquire, release) do not race with each other.
Writing the value that is already there is not a race.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nbflow_ptx.threads.numbering import Threads

_SEVERAL = -1
#: Bytes of noted reads after which they are entered into the cells.
_MAX_NOTES = 64 << 20


class _Read(NamedTuple):
    """Recorded read: range, threads, addresses, stamp, and clocks of its threads."""

    low: int
    high: int
    nbytes: int
    lanes: Any
    offsets: Any
    stamp: int
    oldest: Any


def _overlap(ranges: dict[int, tuple[int, int]], array: int, low: int, high: int) -> bool:
    """Return whether a range of bytes meets one recorded for its array or for several."""
    keys = list(ranges) if array < 0 else (array, -1)
    return any(k in ranges and ranges[k][0] < high and low < ranges[k][1] for k in keys)


def _extend(ranges: dict[int, tuple[int, int]], array: int, low: int, high: int) -> None:
    old_low, old_high = ranges.get(array, (low, high))
    ranges[array] = min(low, old_low), max(high, old_high)


class Cells:
    """The access history of one memory: shared memory of a group of blocks, or the heap.

    One cell covers `granule` bytes, the narrowest access the kernel makes.  `across` says that
    several clusters see this memory; `starts` are then the beginnings of the arrays in it.  A
    cluster may have `warps`, of which each has a bit.

    Reads are only recorded, and entered into the cells when a thread writes to the same array:
    most arrays are never written, and most shared memory is written behind a barrier, which makes
    earlier reads and writes irrelevant.
    """

    def __init__(
        self,
        nbytes: int,
        granule: int,
        *,
        across: bool,
        starts: Sequence[int] = (),
        warps: int = 32,
    ) -> None:
        n = nbytes // granule + 1
        self.nbytes = nbytes
        self.shift, self.across = granule.bit_length() - 1, across
        self.starts = list(starts)
        self.w_who: NDArray[np.int32] = np.zeros(n, np.int32)
        self.w_at: NDArray[np.int32] = np.zeros(n, np.int32)
        self.r_who: NDArray[np.int32] = np.zeros(n, np.int32)
        self.r_at: NDArray[np.int32] = np.zeros(n, np.int32)
        self.r_warps: NDArray[Any] = np.zeros(n, np.uint32 if warps <= 32 else np.uint64)
        self.r_cluster: NDArray[np.int32] = np.zeros(n if across else 0, np.int32)
        self.written: dict[int, tuple[int, int]] = {}  # array -> range of bytes written
        self.entered: dict[int, tuple[int, int]] = {}  # array -> range of reads in the cells
        self.notes: dict[int, list[_Read]] = {}
        self.noted_bytes = 0

    def barrier_of_all(self) -> None:
        """Forget what a barrier of all threads ordered (the memory of one cluster only)."""
        if not self.across:
            self._forget()

    def renew(self, starts: Sequence[int]) -> None:
        """Empty the history, for the next launch: only what this one touched is zeroed."""
        self.starts = list(starts)
        for ranges, arrays in (
            (self.written, (self.w_who, self.w_at)),
            (self.entered, (self.r_who, self.r_at, self.r_warps, self.r_cluster)),
        ):
            for low, high in ranges.values():
                for array in arrays:
                    array[low >> self.shift : (high >> self.shift) + 1] = 0
        self._forget()

    def _forget(self) -> None:
        self.written.clear()
        self.entered.clear()
        self.notes.clear()
        self.noted_bytes = 0

    def _array(self, low: int, high: int) -> int:
        """Return the index of the array that contains a range of bytes; -1 for several."""
        k = bisect_right(self.starts, low) - 1
        return k if k + 1 >= len(self.starts) or high < self.starts[k + 1] else -1

    def read(
        self, m: Threads, lanes: Any, offsets: Any, nbytes: int, *, mark: bool = True
    ) -> list[tuple[int, int, int]]:
        """Record a read; return ``(j, other thread, other stamp)`` of each race."""
        low, high = int(offsets.min()), int(offsets.max()) + nbytes
        array = self._array(low, high)
        if _overlap(self.written, array, low, high):
            for c in self.cells_of(offsets, nbytes):
                at = self.w_at.take(c)
                if np.count_nonzero(at):
                    found = self._races(m, lanes, self.w_who.take(c), at, c)
                    if found:
                        return found
        if mark:
            note = _Read(low, high, nbytes, lanes, offsets, m.stamp, m.oldest_of(lanes))
            self.notes.setdefault(array, []).append(note)
            self.noted_bytes += 8 * len(lanes)
            if self.noted_bytes > _MAX_NOTES:
                for k in list(self.notes):
                    self._enter(m, k, 0, 1 << 62)
        return []

    def write(
        self, m: Threads, lanes: Any, offsets: Any, nbytes: int, *, mark: bool = True
    ) -> list[tuple[int, int, int]]:
        """Record a write; return ``(j, other thread, other stamp)`` of possible races.

        They are races only if the written value differs from the old one, which the caller checks.
        """
        low, high = int(offsets.min()), int(offsets.max()) + nbytes
        array = self._array(low, high)
        for k in list(self.notes) if array < 0 else (array, -1):
            self._enter(m, k, low, high)
        after_write = _overlap(self.written, array, low, high)
        after_read = _overlap(self.entered, array, low, high)
        found = []
        for c in self.cells_of(offsets, nbytes):
            for who, at, wanted in (
                (self.w_who, self.w_at, after_write),
                (self.r_who, self.r_at, after_read),
            ):
                if wanted and np.count_nonzero(when := at.take(c)):
                    found += self._races(m, lanes, who.take(c), when, c)
            if mark:
                self.w_who[c], self.w_at[c] = m.of(m.thread_id, lanes), m.stamp
        if mark:
            _extend(self.written, array, low, high)
        return found

    def _enter(self, m: Threads, array: int, low: int, high: int) -> None:
        """Enter the noted reads of an array that touch a range of bytes into the cells."""
        notes = self.notes.get(array, [])
        touched = [r for r in notes if r.low < high and low < r.high]
        if not touched:  # the usual case, with hundreds of notes
            return
        self.notes[array] = [r for r in notes if r.low >= high or low >= r.high]
        for r in touched:
            for c in self.cells_of(r.offsets, r.nbytes):
                self._mark_read(m, r, c)
            _extend(self.entered, array, r.low, r.high)
            self.noted_bytes -= 8 * len(r.lanes)

    def _races(
        self, m: Threads, lanes: Any, who: Any, at: Any, cells: Any
    ) -> list[tuple[int, int, int]]:
        doubt = (at > m.oldest_of(lanes)) & (who != m.of(m.thread_id, lanes))
        if self.across:
            doubt |= (np.maximum(who, 1) - 1) // m.threads_per_cluster != m.cluster_id[lanes]
        doubt &= at != 0
        if not np.count_nonzero(doubt):
            return []
        j = np.flatnonzero(doubt)
        ok = self._ordered(m, lanes[j], who[j], at[j])
        many = np.flatnonzero(who[j] == _SEVERAL)
        if many.size:  # cells with the same readers have the same answer
            c = cells[j[many]]
            cluster = self.r_cluster[c] if self.across else 0 * c
            same = np.stack(
                [lanes[j[many]], self.r_at[c], self.r_warps[c].astype(np.int64), cluster]
            )
            _, first, which = np.unique(same, axis=1, return_index=True, return_inverse=True)
            answers = [
                self._ordered_after_many(m, int(lanes[j[many[k]]]), int(c[k])) for k in first
            ]
            ok[many] = np.array(answers)[which.ravel()]
        return [(int(k), int(who[k]), int(at[k])) for k in j[~ok]]

    def _mark_read(self, m: Threads, r: _Read, c: Any) -> None:
        lanes = r.lanes
        me, bit = m.of(m.thread_id, lanes), m.of(m.warp_bit, lanes)
        old_who = self.r_who.take(c)
        several = self.r_at.take(c) > r.oldest
        cluster = None
        if self.across:
            cluster, old_cluster = m.of(m.cluster_id, lanes), self.r_cluster.take(c)
            several |= old_cluster != cluster
        several &= (old_who != 0) & (old_who != me)
        if m.strong_accesses and several.any():  # under a lock the earlier read may be ordered
            j = np.flatnonzero(several & (old_who != _SEVERAL))
            several[j[self._ordered(m, lanes[j], old_who[j], self.r_at[c][j])]] = False
        if cluster is not None:
            cluster = np.where(several & (old_cluster != cluster), _SEVERAL, cluster)
            self.r_cluster[c] = cluster
        if np.count_nonzero(several):
            me = np.where(several, _SEVERAL, me)
            bit = np.where(several, self.r_warps[c] | bit, bit)
        self.r_who[c], self.r_warps[c], self.r_at[c] = me, bit, r.stamp
        again = (self.r_who[c] != me) | ((self.r_warps[c] & bit) != bit)
        if np.count_nonzero(again):  # several lanes read one place in this very instruction
            d = c[again]
            np.bitwise_or.at(self.r_warps, d, bit[again])
            self.r_who[d] = _SEVERAL
        if cluster is not None:
            self.r_cluster[c[self.r_cluster[c] != cluster]] = _SEVERAL

    def cells_of(self, offsets: Any, nbytes: int) -> list[Any]:
        """Return the numbers of the cells that accesses touch, the first, second.. of each."""
        first = offsets >> self.shift
        n = max(nbytes >> self.shift, 1)
        return [first] if n == 1 else [first + j for j in range(n)]

    def _ordered(self, m: Threads, lanes: Any, who: Any, at: Any) -> Any:
        """Return for each pair whether the access `who`, `at` happened before mine."""
        clocks, warps = m.clocks, m.clocks.warps
        other = who.astype(np.int64) - 1 - m.first_thread  # its lane, if it is in this group
        here = (other >= 0) & (other < m.lanes) & (who > 0)
        o = np.where(here, other, 0)
        same_block = here & (m.block_of[o] == m.block_of[lanes])
        cluster, mine = np.divmod(m.warp_id[lanes], warps)
        its_cluster, its = np.divmod(m.warp_id[o], warps)
        ok = clocks.known[cluster, mine, its] >= at
        same_warp = same_block & (m.warp_id[o] == m.warp_id[lanes])
        met = (clocks.lane[lanes] >= at) & (clocks.lane[o] >= at)
        passed = (clocks.taken[lanes] >= at) & (clocks.given[o] >= at)
        told = here & (its_cluster == cluster) & ok
        ok = np.where(same_warp, met | passed, ok)
        ok = ok | ((clocks.fence[o] >= at) & (clocks.acquire[lanes] >= at))
        grid = clocks.grid
        block = np.maximum(who.astype(np.int64) - 1, 0) // m.threads_per_block
        far = (grid.fence[block] >= at) & (grid.acquire[m.block_id[lanes]] >= at)
        return np.where(same_block, ok, told | far | (at <= grid.met))

    def _ordered_after_many(self, m: Threads, lane: int, cell: int) -> bool:
        """Return whether all reads of a cell that several threads read came before mine."""
        clocks, at = m.clocks, int(self.r_at[cell])
        grid, acquired = clocks.grid, bool(clocks.grid.acquire[m.block_id[lane]] >= at)
        if self.across and int(self.r_cluster[cell]) != int(m.cluster_id[lane]):
            if self.r_cluster[cell] == _SEVERAL:
                return at <= grid.met or acquired
            first = int(self.r_cluster[cell]) * m.blocks_per_cluster
            fence = int(grid.fence[first : first + m.blocks_per_cluster].max())
            return at <= grid.met or (fence >= at and acquired)
        known = clocks.known[divmod(int(m.warp_id[lane]), clocks.warps)]
        for w in range(clocks.warps):
            if int(self.r_warps[cell]) >> w & 1:
                own = w == int(m.warp_id[lane]) % clocks.warps
                if (self._met(m, lane) if own else known[w]) < at:
                    return False
        return True

    def _met(self, m: Threads, lane: int) -> int:
        """Return the stamp up to which a thread is ordered after all lanes of its warp."""
        clocks = m.clocks
        warp = m.warp_id == m.warp_id[lane]
        passed = min(int(clocks.taken[lane]), int(clocks.given[warp].min()))
        return max(int(clocks.lane[lane]), passed)
