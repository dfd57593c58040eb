"""``wgmma`` instructions in flight in each warpgroup.

Results are computed at once.  Kept are the registers and bytes of shared memory that an instruction
reads or writes until a ``wgmma.wait_group`` of its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_ptx.memory.device import READING
from nbflow_ptx.memory.spaces import Region
from nbflow_ptx.threads.numbering import Threads

WARPGROUP = 128
_READING = np.uint64(READING * 0x0101010101010101)


@dataclass
class _Reads:
    """Shared memory that products read: their warpgroups, groups of products, words, stamp."""

    groups: NDArray[np.int64]
    numbers: NDArray[np.int64]
    words: NDArray[np.int64]  # (groups, words of 8 bytes)
    stamp: int


class Warpgroups:
    """The state of all warpgroups of one machine.

    Groups of products are numbered from 1 in each warpgroup; `filling` is the one that the next
    product belongs to, `latest` the last one that has any, `waited` the last one waited for.
    """

    def __init__(self, m: Threads, shared: Region, rows: dict[str, int]) -> None:
        self.m, self.names, self.shared = m, list(rows), shared
        n_registers, n = len(rows), m.n_groups
        self.until: NDArray[np.int64] = np.zeros((n_registers, n), np.int64)
        """The latest group of products that each register belongs to."""
        self.result: NDArray[np.bool_] = np.zeros((n_registers, n), np.bool_)
        """True for accumulators, False for parts of A."""
        self.changed: NDArray[np.bool_] = np.zeros((n_registers, m.n_warps), np.bool_)
        """True if other instructions wrote a register since the latest ``wgmma.fence``."""
        self.fenced: NDArray[np.bool_] = np.zeros(n, np.bool_)
        self.filling: NDArray[np.int64] = np.ones(n, np.int64)
        self.latest: NDArray[np.int64] = np.zeros(n, np.int64)
        self.waited: NDArray[np.int64] = np.zeros(n, np.int64)
        self.busy = False
        self.reads: list[_Reads] = []

    # The instructions --------------------------------------------------------------------------

    def fence(self, lanes: Any) -> None:
        """``wgmma.fence``: the registers are as the instructions before it left them."""
        self.fenced[self.m.group_of[lanes]] = True
        self.changed[:, self.m.warp_id[lanes]] = False

    def issue(self, lanes: Any, results: Any, sources: Any) -> None:
        """Check the registers of a product (accumulators, A), and note that they are in flight."""
        groups = self.m.group_of[lanes[::WARPGROUP]]
        if self.m.checks.wgmma:
            self._check_order(lanes, results, sources)
            self._check_use(lanes, groups, results, sources)
        for rows, result in ((results, True), (sources, False)):
            self.until[rows[:, None], groups] = self.filling[groups]
            self.result[rows[:, None], groups] = result
        self.latest[groups] = self.filling[groups]
        self.busy = True

    def commit(self, lanes: Any) -> None:
        """``wgmma.commit_group``: what follows belongs to the next group."""
        self.filling[self.m.group_of[lanes[::WARPGROUP]]] += 1

    def wait(self, lanes: Any, left: int) -> None:
        """``wgmma.wait_group``: all but the latest `left` groups of products are done."""
        groups = self.m.group_of[lanes[::WARPGROUP]]
        self.waited[groups] = np.maximum(self.waited[groups], self.filling[groups] - 1 - left)
        self.busy = bool((self.latest > self.waited).any())
        self._end_reads()

    # Registers ---------------------------------------------------------------------------------

    def in_flight(self, i: Any, rows: Any) -> Any:
        """Return whether registers are in flight: one row each, for the warpgroups of threads."""
        groups = slice(None) if i is None else self.m.group_of[i]
        return self.until[rows][:, groups] > self.waited[groups]

    def check_idle(self, i: Any, rows: Any) -> None:
        """Report the use of a register that is in flight."""
        flying = self.in_flight(i, rows)
        if not flying.any() or not self.m.checks.wgmma:
            return
        row, k = (int(x) for x in np.argwhere(flying)[0])
        lane = int(np.flatnonzero(self.m.group_of == k)[0]) if i is None else int(i[k])
        result = self.result[rows[row], self.m.group_of[lane]]
        raise self.m.error(
            "wgmma",
            f"uses register {self.names[rows[row]]}, which is "
            f"{'an accumulator' if result else 'part of A'} of a wgmma that was not waited for",
            lane,
        )

    def _check_order(self, lanes: Any, results: Any, sources: Any) -> None:
        unfenced = ~self.fenced[self.m.group_of[lanes]]
        if unfenced.any():
            lane = int(lanes[np.flatnonzero(unfenced)[0]])
            raise self.m.error("wgmma", "no wgmma.fence before the first wgmma.mma_async", lane)
        rows = np.concatenate([results, sources])
        late = self.changed[rows[:, None], self.m.warp_id[lanes[::32]]]
        if late.any():
            row, k = (int(x) for x in np.argwhere(late)[0])
            raise self.m.error(
                "wgmma",
                f"register {self.names[rows[row]]} was written after the latest wgmma.fence",
                int(lanes[32 * k]),
            )

    def _check_use(self, lanes: Any, groups: Any, results: Any, sources: Any) -> None:
        for rows, wanted, what in (
            (results, True, "accumulates in a register that is part of A"),
            (sources, False, "takes as A a register that is an accumulator"),
        ):
            flying = self.until[rows[:, None], groups] > self.waited[groups]
            wrong = flying & (self.result[rows[:, None], groups] != wanted)
            if wrong.any():
                k = int(np.argwhere(wrong)[0][1])
                why = f"{what} of another wgmma that was not waited for"
                raise self.m.error("wgmma", why, int(lanes[WARPGROUP * k]))

    # Shared memory -----------------------------------------------------------------------------

    def begin_reads(self, leaders: Any, words: Any) -> None:
        """Note that products read these words of 8 bytes (one row per warpgroup) until waited for.

        Only the check of races asks.
        """
        groups = self.m.group_of[leaders]
        self.shared.shadow_view[8][words] |= _READING
        self.reads.append(_Reads(groups, self.filling[groups], words, self.m.stamp))

    def _end_reads(self) -> None:
        """Forget the reads that are over; the warps of the group know what they came after."""
        shadow = self.shared.shadow_view[8]
        keep, ended = [], False
        for r in self.reads:
            over = r.numbers <= self.waited[r.groups]
            if not over.any():
                keep.append(r)
                continue
            ended = True
            shadow[r.words[over]] &= ~_READING
            self._tell(r.groups[over], r.stamp)
            if not over.all():
                left = ~over
                keep.append(_Reads(r.groups[left], r.numbers[left], r.words[left], r.stamp))
        if ended:
            for r in keep:  # what two products read stays marked until both are done
                shadow[r.words] |= _READING
        self.reads = keep

    def _tell(self, groups: Any, stamp: int) -> None:
        """Let all warps know what the first one, which the reads are noted for, did until then."""
        per_block = self.m.n_groups // self.m.n_blocks
        warp = groups // per_block * self.m.warps_per_block + groups % per_block * 4
        cluster, first = np.divmod(warp, self.m.clocks.warps)
        known = self.m.clocks.known
        for w in range(4):
            known[cluster, first + w, first] = np.maximum(known[cluster, first + w, first], stamp)

    def check_end(self) -> None:
        """Report a product still in flight when the kernel ends."""
        if self.busy and self.m.checks.wgmma:
            group = int(np.flatnonzero(self.latest > self.waited)[0])
            lane = int(np.flatnonzero(self.m.group_of == group)[0])
            raise self.m.error("wgmma", "the kernel ends with a wgmma it never waits for", lane)
