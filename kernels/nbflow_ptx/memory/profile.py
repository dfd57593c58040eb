"""Memory behaviour per access site: bank conflicts and sectors, counted, not timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow_ptx.threads.numbering import Threads

_SECTOR = 32  # bytes the memory system moves at once
_BANKS = 32  # of 4 bytes


@dataclass
class Site:
    """Memory traffic of one load or store instruction.

    Attributes
    ----------
    where, instruction, space : str
        Source line, text and memory space.
    requests : int
        Executions by a warp.
    lanes : int
        Threads that took part, over all requests.
    bytes : int
        Bytes the threads asked for.
    sectors, sectors_needed : int
        32-byte sectors touched in global memory, and the fewest that hold the distinct bytes.
    passes, passes_needed : int
        Passes over shared memory's 32 banks, and the fewest: the difference is bank conflicts.
    """

    where: str
    instruction: str
    space: str
    requests: int = 0
    lanes: int = 0
    bytes: int = 0
    sectors: int = 0
    sectors_needed: int = 0
    passes: int = 0
    passes_needed: int = 0


class Profile:
    """Collects a `Site` per memory instruction."""

    def __init__(self) -> None:
        self.sites: dict[tuple[int, str], Site] = {}

    def access(
        self,
        m: Threads,
        space: str,
        lanes: Any,
        at: Any,
        nbytes: int,
        *,
        store: bool = False,
        atomic: bool = False,
    ) -> None:
        """Count one executed access of `nbytes` per thread at byte offsets `at`."""
        if space == "local":
            return
        site = self.sites.get((m.pc, space))
        if site is None:
            site = self.sites[m.pc, space] = Site(*m.where(m.pc), space)
        at = np.broadcast_to(at, lanes.shape).astype(np.int64)
        warp = m.warp_id[lanes]
        site.requests += len(np.unique(warp))
        site.lanes += len(lanes)
        site.bytes += len(lanes) * nbytes
        if space == "global":
            first, last = at // _SECTOR, (at + nbytes - 1) // _SECTOR
            touched = np.unique(np.concatenate([warp << 40 | first, warp << 40 | last]))
            site.sectors += len(touched)
            site.sectors_needed += _fewest(np.unique(warp << 40 | at) >> 40, nbytes, _SECTOR)
        else:
            self._banks(m, site, warp, lanes, at, nbytes)

    def _banks(self, m: Threads, site: Site, warp: Any, lanes: Any, at: Any, nbytes: int) -> None:
        """Count passes: in each, a bank serves one word; 8- and 16-byte accesses go in parts."""
        parts = max(nbytes // 4, 1)
        step = 32 // parts  # lanes served together
        group = warp * 32 + m.lane[lanes] // step
        block = m.block_of[lanes]
        words = np.concatenate([at % m.layout.shared_bytes // 4 + j for j in range(parts)])
        keys = np.unique(np.tile(group, parts) << 32 | words | np.tile(block, parts) * 0)
        bank = (keys >> 32) * _BANKS + (keys & 0xFFFFFFFF) % _BANKS
        _, counts = np.unique(bank, return_counts=True)
        which = np.unique(bank) // _BANKS
        worst: dict[int, int] = {}
        for g, n in zip(which.tolist(), counts.tolist(), strict=True):
            worst[g] = max(worst.get(g, 0), n)
        site.passes += sum(worst.values())
        site.passes_needed += len(worst)

    def __str__(self) -> str:
        rows = [("requests", "sectors", "fewest", "passes", "fewest", "site")]
        for s in sorted(
            self.sites.values(),
            key=lambda s: -(s.sectors - s.sectors_needed) - (s.passes - s.passes_needed),
        ):
            counts = (
                (str(s.sectors), str(s.sectors_needed), "-", "-")
                if s.space == "global"
                else ("-", "-", str(s.passes), str(s.passes_needed))
            )
            rows.append((str(s.requests), *counts, f"{s.where}: {s.instruction}"))
        widths = [max(len(r[k]) for r in rows) for k in range(5)]
        return "\n".join(
            "  ".join([*(c.rjust(w) for c, w in zip(r[:5], widths, strict=True)), r[5]])
            for r in rows
        )


def _fewest(warps_of_distinct: Any, nbytes: int, sector: int) -> int:
    """Return the fewest sectors that hold each warp's distinct elements."""
    _, counts = np.unique(warps_of_distinct, return_counts=True)
    return int((-(-counts * nbytes // sector)).sum())
