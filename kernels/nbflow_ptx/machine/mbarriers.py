"""Mbarriers of a machine: phases, arrivals, pending bytes, and the clocks they pass on.

A phase is complete when no arrivals and no bytes are pending.  Copies land as late as allowed: when
threads wait for the phase that counts them and no other thread can run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_ptx.memory.spaces import Memory

MAX_COUNT = (1 << 20) - 1
NBYTES = 8


@dataclass
class Mbarrier:
    """One mbarrier; `expected` arrivals make a phase, of which `pending` are still to come.

    ``clock`` is what the warps knew that arrived so far, ``known`` the same when the latest phase
    was completed: what a thread that sees it completed knows.  `landings` bring what is under way.
    """

    expected: int
    maker: int
    made_at: int
    clock: NDArray[np.int32]
    known: NDArray[np.int32]
    pending: int = 0
    bytes_to_come: int = 0
    phase: int = 0
    landings: list[Callable[[], None]] = field(default_factory=list)

    def describe(self) -> str:
        """Describe the pending arrivals and bytes of the current phase."""
        return (
            f"phase {self.phase} waits for {self.pending} of {self.expected} arrivals "
            f"and {self.bytes_to_come} bytes"
        )


class Mbarriers:
    """All mbarriers of the machine, by their place in its shared memory."""

    def __init__(self, memory: Memory) -> None:
        self.m, self.memory = memory.m, memory
        self.found: dict[int, Mbarrier] = {}
        self.events = 0
        """Arrivals and landings so far: whether anything happens while threads wait."""

    # Making and finding ------------------------------------------------------------------------

    def place(self, lanes: Any, address: Any, what: str, *, space: str) -> Any:
        """Return the places of mbarriers in shared memory, checked like 8-byte accesses."""
        m = self.m
        if space == "generic":
            parts = self.memory.split(lanes, address, space)
            if any(region.name != "shared" for _, region, _ in parts):
                raise m.error("bounds", f"{what}: no address in shared memory", int(lanes[0]))
            address, space = parts[0][2], "cluster"
        region = self.memory.regions[space]
        at, outside = self.memory.place(region, lanes, np.asarray(address), NBYTES, what)
        if outside is not None and outside.any():
            raise m.error("bounds", f"{what} outside shared memory", int(lanes[0]))
        return np.broadcast_to(at, lanes.shape)

    def init(self, lanes: Any, at: Any, count: Any) -> None:
        """``mbarrier.init``."""
        m = self.m
        for lane, k, n in zip(lanes.tolist(), at.tolist(), count.tolist(), strict=True):
            if not 1 <= n <= MAX_COUNT:
                raise m.error("barrier", f"an mbarrier of {n} arrivals", lane)
            zero = np.zeros(m.clocks.warps, np.int32)
            self.found[k] = Mbarrier(n, lane, m.stamp, zero, zero.copy(), n)

    def get(self, lane: int, at: int) -> Mbarrier:
        """Return the mbarrier at a place."""
        found = self.found.get(at)
        if found is None:
            raise self.m.error("barrier", "no mbarrier was initialised here", lane)
        return found

    def invalidate(self, lanes: Any, at: Any) -> None:
        """``mbarrier.inval``."""
        for lane, k in zip(lanes.tolist(), at.tolist(), strict=True):
            if self.get(lane, k).landings:
                raise self.m.error("barrier", "copies to this mbarrier are under way", lane)
            del self.found[k]

    # Arriving ----------------------------------------------------------------------------------

    def arrive(
        self, lanes: Any, at: Any, count: Any, more_bytes: Any = None, *, drop: bool = False
    ) -> Any:
        """Arrive `count` times each, first expecting more bytes; return the tokens of the phases.

        A token holds the phase and, in its lower half, the arrivals that were pending before.
        """
        m = self.m
        m.clocks.given[lanes] = m.stamp
        tokens = np.zeros(len(lanes), np.uint64)
        for j, (lane, k, n) in enumerate(
            zip(lanes.tolist(), at.tolist(), count.tolist(), strict=True)
        ):
            b = self.get(lane, k)
            if more_bytes is not None:
                self.expect(lane, b, int(more_bytes[j]))
            tokens[j] = b.phase << 32 | b.pending
            self.arrive_at(b, lane, n, m.clocks.row(int(m.warp_id[lane]), m.stamp))
            if drop:
                b.expected -= n
        return tokens

    def arrive_at(self, b: Mbarrier, lane: int, count: int, row: NDArray[np.int32]) -> None:
        """Record the arrival of a thread; `row` is its warp's clock (`Clocks.row`)."""
        if not 1 <= count <= b.pending:
            raise self.m.error(
                "barrier", f"{count} arrivals at an mbarrier of which {b.describe()}", lane
            )
        np.maximum(b.clock, row, out=b.clock)
        b.pending -= count
        self.settle(b)

    def expect(self, lane: int, b: Mbarrier, n: int) -> None:
        """Add `n` expected bytes to the current phase (negative: arrived bytes)."""
        b.bytes_to_come += n
        if abs(b.bytes_to_come) > MAX_COUNT:
            raise self.m.error(
                "barrier", f"{b.bytes_to_come} bytes are more than an mbarrier counts", lane
            )

    def settle(self, b: Mbarrier) -> None:
        """Begin the next phase if this one is complete."""
        self.events += 1
        if b.pending == 0 and b.bytes_to_come == 0:
            b.phase += 1
            b.pending = b.expected
            b.known = b.clock.copy()

    # Waiting -----------------------------------------------------------------------------------

    def deliver(self, at: Any) -> None:
        """Land the copies in flight to these mbarriers, in order of issue, for one phase."""
        for k in np.unique(at).tolist():
            b = self.found.get(k)
            phase = b.phase if b is not None else 0
            while b is not None and b.landings and b.phase == phase:
                b.landings.pop(0)()

    def complete(self, lanes: Any, at: Any, phase: Any, *, parity: bool) -> Any:
        """Return whether the phases with a parity, or of tokens, are complete, for each thread."""
        done = np.zeros(len(lanes), np.bool_)
        for k in np.unique(at).tolist():
            here = at == k
            now = self.get(int(lanes[here.argmax()]), k).phase
            done[here] = now & 1 != phase[here] & 1 if parity else now > phase[here] >> 32
        return done

    def observe(self, lanes: Any, at: Any) -> None:
        """Join the clocks of threads that saw a phase complete with those of the arrivals."""
        m = self.m
        m.clocks.taken[lanes] = m.stamp
        pairs = np.unique(np.stack([at, m.warp_id[lanes]]), axis=1)
        for k, warp in pairs.T.tolist():
            m.clocks.learn(warp, self.found[k].known)

    def check_end(self) -> None:
        """Report copies that no thread waited for when the kernel ends."""
        for b in self.found.values():
            if b.landings and self.m.checks.uninitialised:
                raise self.m.error(
                    "uninitialised",
                    f"the kernel ends with copies to an mbarrier not waited for: {b.describe()}",
                    b.maker,
                )
