"""Threads that wait at ``mbarrier.try_wait``.

The first try of a phase that is not complete fails, as it may on hardware: a kernel must try
again.  At the second the thread is parked until no other can run: then the copies in flight to its
mbarrier land, as late as allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_ptx.execution.program import Control
from nbflow_ptx.machine.machine import Machine

#: Times that all parked threads are let go unsuccessfully, with nothing happening in between,
#: before they count as waiting forever; once is needed for a kernel that tries several in turn.
_PATIENCE = 3


@dataclass
class _Group:
    """Threads parked together: where, and for which mbarriers."""

    control: Control
    lanes: NDArray[np.int64]
    at: NDArray[np.int64]


class Parked:
    """The threads of one machine that wait for mbarriers."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.groups: list[_Group] = []
        self.refused: dict[int, NDArray[np.int64]] = {}  # by instruction: the phase refused
        self.idle, self.events = 0, 0

    def try_wait(self, c: Control, lanes: Any) -> Any:
        """Return results to threads or park them; return those that continue."""
        assert c.wait is not None
        at, phase, done = c.wait.poll(self.m, lanes, deliver=False)
        asked = at << 32 | phase & 0xFFFFFFFF
        before = self.refused.setdefault(c.pc, np.full(self.m.lanes, -1, np.int64))
        park = ~done & (before[lanes] == asked)
        before[lanes] = np.where(done, -1, asked)
        if park.any():
            self.groups.append(_Group(c, lanes[park], at[park]))
        go = ~park
        if go.any():
            c.wait.finish(self.m, lanes[go], at[go], done[go])
        return lanes[go]

    def wake(self) -> list[tuple[int, Any]]:
        """Land the copies that parked threads wait for; return (instruction, threads) released."""
        m = self.m
        for g in self.groups:
            m.pc = g.control.pc
            m.mbarriers.deliver(g.at)
        waiting, self.groups, found = self.groups, [], []
        for g in waiting:
            assert g.control.wait is not None
            m.pc = g.control.pc
            at, _, done = g.control.wait.poll(m, g.lanes, deliver=False)
            if done.any():
                g.control.wait.finish(m, g.lanes[done], at[done], done[done])
                found.append((g.control.pc, g.lanes[done]))
            if not done.all():
                self.groups.append(_Group(g.control, g.lanes[~done], at[~done]))
        return found or self._refuse_all()

    def _refuse_all(self) -> list[tuple[int, Any]]:
        """Let all tries fail and resume the threads, unless that led to nothing before."""
        self.idle = self.idle + 1 if self.m.mbarriers.events == self.events else 0
        self.events = self.m.mbarriers.events
        if self.idle >= _PATIENCE:
            return []
        waiting, self.groups = self.groups, []
        for g in waiting:
            assert g.control.wait is not None
            self.m.pc = g.control.pc
            g.control.wait.finish(self.m, g.lanes, g.at, np.zeros(len(g.lanes), np.bool_))
        return [(g.control.pc, g.lanes) for g in waiting]

    def places(self) -> list[tuple[int, Any]]:
        """Return (instruction, threads) of those that wait."""
        return [(g.control.pc, g.lanes) for g in self.groups]

    def describe(self, block: int) -> list[str]:
        """Say of each mbarrier that threads of a block wait for what it waits for."""
        m = self.m
        at = {int(k) for g in self.groups for k in g.at[m.block_of[g.lanes] == block]}
        size = m.layout.shared_bytes
        return [
            f"the mbarrier at {m.layout.describe('shared', k % size)[1]}: "
            f"{m.mbarriers.found[k].describe()}"
            for k in sorted(at)
            if k in m.mbarriers.found
        ]
