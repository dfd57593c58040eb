"""Shared memory as asynchronous units see it: the operands of ``wgmma``, bulk copies.

They read and write by another way ("proxy") than loads and stores: what threads stored is visible
to them only behind a ``fence.proxy.async``, which the writer issued after the store, or the reader
after it was told of the store.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.memory.device import LIVE, READING, WRITTEN
from nbflow_ptx.memory.spaces import Region

_GOOD = np.uint64((LIVE | WRITTEN) * 0x0101010101010101)
_READING = np.uint64(READING * 0x0101010101010101)
UNIT = 16


def read_units(m: Machine, leaders: Any, at: Any, what: str) -> Any:
    """Return what products read: (groups, units) addresses to (groups, units, 16) bytes.

    `leaders` are the first threads of the warpgroups; races are looked for on behalf of all four
    warps, and the read is noted down for the first.
    """
    region = m.memory.regions["shared"]
    n_groups, n_units = at.shape
    who = leaders.repeat(n_units)
    places, _ = m.memory.place(region, who, at.reshape(-1), UNIT, what)
    words = (places[:, None] >> 3) + np.arange(2)
    state = region.shadow_view[8][words] & ~_READING
    if (state != _GOOD).any():
        for half in (0, 8):
            m.memory.explain(region, who, places + half, 8, what, reading=True)
    if m.memory.profile is not None:
        m.memory.profile.access(m, "shared", who, places, UNIT)
    if region.cells is not None:
        for warp in range(4):
            lanes = who + 32 * warp
            for race in region.cells.read(m, lanes, places, UNIT, mark=warp == 0)[:1]:
                m.memory.race(region, lanes, places, race, what)
            check_proxy(m, region, lanes, places, what)
        m.warpgroups.begin_reads(leaders, words.reshape(n_groups, -1))
    return region.view[8][words].view(np.uint8).reshape(n_groups, n_units, UNIT)


def check_proxy(m: Machine, region: Region, lanes: Any, places: Any, what: str) -> None:
    """Report bytes that a thread stored and no ``fence.proxy.async`` made visible to this unit."""
    cells = region.cells
    if cells is None or not m.checks.proxy:
        return
    for c in cells.cells_of(places, UNIT):
        at = cells.w_at[c]
        stored = [s for s in np.unique(at).tolist() if s and not m.is_asynchronous(s)]
        if not stored:
            continue
        j = np.flatnonzero(np.isin(at, stored))
        j = j[~_seen(m, lanes[j], cells.w_who[c[j]], at[j])]
        if j.size:
            k = int(j[0])
            m.memory.fault(
                "proxy", region, lanes, places, k,
                f"{what} of bytes stored without a fence.proxy.async since",
                [m.other_access(int(cells.w_who[c[k]]), int(at[k]))],
            )  # fmt: skip


def _seen(m: Machine, lanes: Any, who: Any, at: Any) -> Any:
    """Return whether a fence makes each store (of thread `who` at stamp `at`) visible."""
    clocks = m.clocks
    writer = who.astype(np.int64) - 1 - m.first_thread
    cluster, mine = np.divmod(m.warp_id[lanes], clocks.warps)
    its = m.warp_id[writer] % clocks.warps
    fences = clocks.proxy[:, writer]
    same = m.warp_id[lanes] == m.warp_id[writer]
    told = same | (clocks.known[cluster, mine, its] >= fences)
    return ((fences >= at) & told).any(axis=0) | (clocks.proxy_known[cluster, mine, its] >= at)
