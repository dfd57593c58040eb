"""``cp.async`` copies in flight."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_ptx.memory.spaces import Memory


class Copies:
    """Asynchronous copies in flight, and the open group of each thread."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.group = np.zeros(memory.m.lanes, np.int64)
        self.pending: list[tuple[Any, Any, Any, Any, int]] = []

    def commit(self, lanes: Any) -> None:
        """Close the group of these threads."""
        self.group[lanes] += 1

    def start(self, lanes: Any, to: Any, source: Any, n: int, size: Any) -> None:
        """Read the source now, and mark the destination as not to be read."""
        data = np.zeros((len(lanes), n), np.uint8)
        some = np.flatnonzero(size > 0)
        step = min(n, 8)
        if some.size:
            got = self.memory.load(
                lanes[some], source[some], "global", step, n // step, what="cp.async source"
            )
            data[some] = np.stack(got, axis=1).view(np.uint8).reshape(len(some), n)
            data[np.arange(n) >= size[:, None]] = 0
        keep, at = self.memory.begin_copy(lanes, to, n)
        self.pending.append(
            (lanes[keep], self.group[lanes[keep]], at, data[keep], self.memory.m.stamp)
        )

    def wait(self, lanes: Any, left: int | None, *, before: int | None = None) -> None:
        """Land the copies of these threads, all but the latest `left` groups.

        `before` is the stamp before which they must have been started instead: of an mbarrier,
        that orders the threads that started them before the waiting one.
        """
        waiting = np.zeros(self.memory.m.lanes, np.bool_)
        waiting[lanes] = True
        keep = []
        for t, group, at, data, stamp in self.pending:
            done = waiting[t]
            if before is not None:
                done = done & (stamp <= before)
            elif left is not None:
                done = done & (group < self.group[t] - left)
            if done.any():
                self.memory.end_copy(t[done], at[done], data[done], mark=before is None)
            if not done.all():
                keep.append((t[~done], group[~done], at[~done], data[~done], stamp))
        self.pending = keep
