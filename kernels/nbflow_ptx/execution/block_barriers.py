"""Barriers of a thread block: ``bar.sync``, ``bar.arrive`` and ``bar.red``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_ptx.execution.program import Barrier
from nbflow_ptx.instructions.binder import full
from nbflow_ptx.machine.machine import Machine

#: Barriers of a block.
_NUMBERS = 16


class BlockBarriers:
    """The threads of one machine that wait at barriers of their block.

    `describe` returns the lines of a report about the waiting threads of a block.
    """

    def __init__(self, m: Machine, describe: Callable[[int], list[str]]) -> None:
        self.m, self.describe = m, describe
        self.pc = np.full(m.lanes, -1, np.int64)  # the barrier a lane waits at
        self.key = np.zeros(m.lanes, np.int64)  # block * 16 + number
        self.count = np.zeros(m.lanes, np.int64)
        self.value = np.zeros(m.lanes, np.bool_)
        self.arrived: dict[int, tuple[int, set[int]]] = {}  # of bar.arrive: count and warps
        self.found: dict[int, Barrier] = {}  # by instruction

    def waiting(self) -> bool:
        """Return whether threads wait."""
        return bool((self.pc >= 0).any())

    def places(self) -> list[tuple[int, Any]]:
        """Return (instruction, threads) of those that wait."""
        pcs = np.unique(self.pc[self.pc >= 0]).tolist()
        return [(pc, np.flatnonzero(self.pc == pc)) for pc in pcs]

    def pass_together(self, bar: Barrier) -> bool:
        """Pass a barrier at once that all threads of all blocks have reached together."""
        m = self.m
        if bar.mode != "sync" or self.arrived:
            return False
        number = bar.number(m, None)
        count = bar.count(m, None) if bar.count is not None else np.uint32(0)
        if number.ndim or count.ndim or int(count) not in (0, m.threads_per_block):
            return False
        m.met()
        return True

    def come(self, bar: Barrier, pc: int, lanes: Any) -> bool:
        """Process threads that reach a barrier; return whether they continue."""
        m = self.m
        number = full(m, lanes, bar.number(m, lanes)).astype(np.int64) % _NUMBERS
        count = np.zeros(len(lanes), np.int64)
        if bar.count is not None:
            count = full(m, lanes, bar.count(m, lanes)).astype(np.int64)
        if (count % 32).any() and m.checks.barrier:
            why = f"a thread count of {int(count.max())} is not a multiple of 32"
            raise m.error("barrier", why, int(lanes[0]))
        key = m.block_of[lanes] * _NUMBERS + number
        if bar.mode == "arrive":
            m.touch()
            for k in np.unique(key).tolist():
                who = lanes[key == k]
                n, warps = self.arrived.get(k, (0, set()))
                # an arrival stands for its whole warp, as the hardware counts
                self.arrived[k] = n + len(who), warps | self._warps(who)
            return True
        self.found[pc] = bar
        self.pc[lanes], self.key[lanes], self.count[lanes] = pc, key, count
        if bar.value is not None:
            self.value[lanes] = bar.value(m, lanes)
        return False

    def _warps(self, lanes: Any) -> set[int]:
        """Return the warps of threads, as numbered in their cluster."""
        return set((self.m.warp_id[lanes] % self.m.clocks.warps).tolist())

    def release(self, *, others_run: bool) -> list[tuple[int, Any]]:
        """Complete barriers; return (instruction, threads) released."""
        m = self.m
        waiting = np.flatnonzero(self.pc >= 0)
        if not len(waiting):
            return []
        keys = self.key[waiting]
        n_keys = m.n_blocks * _NUMBERS
        here = np.bincount(keys, minlength=n_keys)
        wanted = np.zeros(n_keys, np.int64)
        np.maximum.at(wanted, keys, self.count[waiting])
        for k, (n, _) in self.arrived.items():
            here[k] += n
        whole = wanted == 0
        left = np.bincount(m.block_of[m.alive], minlength=m.n_blocks).repeat(_NUMBERS)
        done = np.where(whole, here >= m.threads_per_block, here >= wanted) & (here > 0)
        short = whole & (here >= left) & (here > 0) & ~done
        if short.any() and not m.checks.barrier:
            done |= short
        elif short.any() and not done.any() and not others_run:
            self._left_without(int(short.argmax()))
        go = waiting[done[keys]]
        return self._open(go) if len(go) else []

    def _open(self, lanes: Any) -> list[tuple[int, Any]]:
        """End the wait of the threads of completed barriers."""
        m = self.m
        m.pc = int(self.pc[lanes[0]])
        m.touch()
        pcs, keys = self.pc[lanes], self.key[lanes]
        if m.checks.barrier and (pcs != pcs[0]).any():
            self._check_aligned(lanes, pcs)
        self._order(lanes, keys)
        groups = [(pc, lanes[pcs == pc]) for pc in np.unique(pcs).tolist()]
        for pc, some in groups:
            if self.found[pc].result is not None:
                self._reduce(self.found[pc], some, lanes, keys)
        self.pc[lanes] = -1
        return groups

    def _order(self, lanes: Any, keys: Any) -> None:
        """Synchronize the vector clocks of the lanes that met."""
        m = self.m
        if len(lanes) == m.lanes:
            m.met()
            return
        for k in np.unique(keys).tolist():
            who = lanes[keys == k]
            warps = self._warps(who) | self.arrived.pop(k, (0, set()))[1]
            cluster = int(m.warp_id[who[0]]) // m.clocks.warps
            m.clocks.barrier(cluster, who, np.array(sorted(warps)), m.stamp)

    def _reduce(self, bar: Barrier, lanes: Any, all_lanes: Any, keys: Any) -> None:
        m = self.m
        n_keys = m.n_blocks * _NUMBERS
        yes = np.bincount(keys[self.value[all_lanes]], minlength=n_keys)
        total = np.bincount(keys, minlength=n_keys)
        result: Any = {"popc": yes.astype(np.uint32), "and": yes == total, "or": yes > 0}
        assert bar.result is not None
        i = None if len(lanes) == m.lanes else lanes
        bar.result(m, i, result[bar.reduce][self.key[lanes]])

    def _check_aligned(self, lanes: Any, pcs: Any) -> None:
        """Report lanes of one warp that wait at different barriers: it executes them as one."""
        m = self.m
        low, high = np.full(m.n_warps, 1 << 62), np.full(m.n_warps, -1)
        np.minimum.at(low, m.warp_id[lanes], pcs)
        np.maximum.at(high, m.warp_id[lanes], pcs)
        split = np.flatnonzero((high > low) & (high >= 0))
        if len(split):
            lane = int(lanes[m.warp_id[lanes] == split[0]][0])
            raise self._error(lane, "lanes of one warp wait at different barriers")

    def _left_without(self, key: int) -> None:
        lane = int(np.flatnonzero((self.pc >= 0) & (self.key == key))[0])
        raise self._error(
            lane, "threads of the block left the kernel without reaching this barrier"
        )

    def _error(self, lane: int, why: str) -> Exception:
        """Return the error of a failed check at the barrier that a thread waits at."""
        self.m.pc = int(self.pc[lane])
        return self.m.error("barrier", why, lane, notes=self.describe(int(self.m.block_of[lane])))
