"""Thread block clusters: ``barrier.cluster``, and shared memory of other blocks of the cluster.

A block may reach the shared memory of another one only while that runs: from a ``barrier.cluster``
on, which tells that all have begun, until something that the other one waits for, mostly a second
``barrier.cluster``, ends that access.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_ptx.memory.device import WINDOW_BYTES
from nbflow_ptx.memory.spaces import Region
from nbflow_ptx.threads.numbering import Threads


def address_in(rank: Any, address: Any) -> Any:
    """Return the ``shared::cluster`` address of the same place in the block of a rank.

    The window of rank r is number r + 1; the first one is that of the thread's own block.
    """
    return (rank + 1) * WINDOW_BYTES + address % WINDOW_BYTES


def rank_in(address: Any, own: Any) -> Any:
    """Return the rank of the block that an address belongs to; `own` is the thread's."""
    window = address // WINDOW_BYTES
    return np.where(window > 0, window - 1, own)


@dataclass(frozen=True)
class ClusterBarrier:
    """``barrier.cluster.arrive`` (`relaxed`: it orders no memory), or else ``.wait``."""

    arrive: bool
    relaxed: bool


class Clusters:
    """Cluster barriers of a machine, and accesses to other blocks' shared memory."""

    def __init__(self, m: Threads) -> None:
        self.m = m
        n, warps = m.n_clusters, m.clocks.warps
        self.arrived: NDArray[np.int32] = np.zeros(m.lanes, np.int32)
        """The stamp of each thread's arrival in the current phase; 0: not arrived."""
        self.open: NDArray[np.bool_] = np.zeros(m.lanes, np.bool_)
        """True for threads whose phase is complete but that have not waited yet."""
        self.given: NDArray[np.int32] = np.zeros((n, warps), np.int32)
        """Clocks of the threads that arrived without ``.relaxed``, as `Clocks.row`."""
        self.told, self.arrivals = self.given.copy(), self.given.copy()
        """Clocks and arrival of each warp in the latest complete phase."""
        self.met: NDArray[np.int32] = np.zeros((n, warps, warps), np.int32)
        """The latest arrival of each warp that each warp has waited for."""
        self.waiting: list[tuple[int, NDArray[np.int64]]] = []
        """Pairs of an instruction and the threads that wait at it."""
        self.reached: NDArray[np.int32] = np.zeros((m.n_blocks, warps), np.int32)
        """Clock of the last access of each warp to the shared memory of each block."""
        self.left: NDArray[np.bool_] = np.zeros(m.n_blocks, np.bool_)
        """Blocks whose threads have all exited."""

    # barrier.cluster ---------------------------------------------------------------------------

    def come(self, barrier: ClusterBarrier, pc: int, lanes: Any) -> Any:
        """Process arrivals or waits of threads; return the threads that continue."""
        self.m.touch()
        if barrier.arrive:
            self._arrive(lanes, barrier.relaxed)
            return lanes
        early = ~self.open[lanes] & (self.arrived[lanes] == 0)
        if early.any():
            lane = int(lanes[early.argmax()])
            raise self.m.error("barrier", "barrier.cluster.wait without an arrival before", lane)
        go = self.open[lanes]
        self._pass(lanes[go])
        if not go.all():
            self.waiting.append((pc, lanes[~go]))
        return lanes[go]

    def release(self) -> list[tuple[int, Any]]:
        """Complete phases where all remaining threads have arrived; return those released."""
        m = self.m
        here = self.arrived > 0
        if not here.any():
            return []
        cluster = m.warp_id // m.clocks.warps
        late = np.bincount(cluster[m.alive & ~here], minlength=m.n_clusters)
        done = here & (late == 0)[cluster]
        if not done.any():
            return []
        self._complete(np.flatnonzero(done))
        found, keep = [], []
        for pc, lanes in self.waiting:
            go = self.open[lanes]
            m.pc = pc
            if go.any():
                m.touch()
                self._pass(lanes[go])
                found.append((pc, lanes[go]))
            if not go.all():
                keep.append((pc, lanes[~go]))
        self.waiting = keep
        return found

    def _arrive(self, lanes: Any, relaxed: bool) -> None:
        m = self.m
        again = self.open[lanes] | (self.arrived[lanes] > 0)
        if again.any():
            lane = int(lanes[again.argmax()])
            raise m.error(
                "barrier", "a second barrier.cluster.arrive, with no wait for the first", lane
            )
        self.arrived[lanes] = m.stamp
        if relaxed:
            return
        m.clocks.given[lanes] = m.stamp
        for warp in np.unique(m.warp_id[lanes]).tolist():
            given = self.given[warp // m.clocks.warps]
            np.maximum(given, m.clocks.row(warp, m.stamp), out=given)

    def _complete(self, lanes: Any) -> None:
        """End the phase of the clusters of these threads."""
        m = self.m
        clusters = np.unique(m.warp_id[lanes] // m.clocks.warps)
        self.told[clusters] = self.given[clusters]
        self.arrivals[clusters] = 0
        np.maximum.at(self.arrivals.reshape(-1), m.warp_id[lanes], self.arrived[lanes])
        self.open[lanes], self.arrived[lanes] = True, 0

    def _pass(self, lanes: Any) -> None:
        """Join the clocks of threads with those of the threads that arrived."""
        m = self.m
        self.open[lanes] = False
        m.clocks.taken[lanes] = m.stamp
        for warp in np.unique(m.warp_id[lanes]).tolist():
            cluster, own = divmod(warp, m.clocks.warps)
            m.clocks.learn(warp, self.told[cluster])
            self.met[cluster, own] = self.arrivals[cluster]

    # Memory of other blocks --------------------------------------------------------------------

    def reach(self, lanes: Any, blocks: Any) -> None:
        """Threads reach into the shared memory of other blocks (numbers in the machine)."""
        m = self.m
        cluster, mine = np.divmod(m.warp_id[lanes], m.clocks.warps)
        its = blocks * m.warps_per_block % m.clocks.warps
        for bad, why in (
            (self.met[cluster, mine, its] == 0, "may not have begun: no barrier.cluster before"),
            (self.left[blocks], "has ended"),
        ):
            if bad.any() and m.checks.barrier:
                j = int(bad.argmax())
                raise m.error(
                    "barrier",
                    f"reaches into the shared memory of block {self.name(blocks[j])}, which {why}",
                    int(lanes[j]),
                )
        self.reached[blocks, mine] = m.stamp

    def leave(self, lanes: Any) -> None:
        """Threads have left: report blocks that others may still reach into."""
        m = self.m
        for block in np.unique(m.block_of[lanes]).tolist():
            n = m.threads_per_block
            if m.alive[block * n : (block + 1) * n].any():
                continue
            self.left[block] = True
            cluster, first = divmod(block * m.warps_per_block, m.clocks.warps)
            known = m.clocks.known[cluster, first : first + m.warps_per_block].max(axis=0)
            unknown = self.reached[block] > known
            if unknown.any() and m.checks.barrier:
                raise self._ended(int(lanes[m.block_of[lanes] == block][0]), block, unknown)

    def _ended(self, lane: int, block: int, unknown: Any) -> Exception:
        m, warp = self.m, int(unknown.argmax())
        at = int(self.reached[block, warp])
        other = warp // m.warps_per_block + block // m.blocks_per_cluster * m.blocks_per_cluster
        place, text = m.where(m.stamps[at])
        return m.error(
            "barrier",
            "the block ends while another one of its cluster may reach into its shared memory",
            lane,
            notes=[f"block {self.name(other)}, warp {warp % m.warps_per_block} at {place}: {text}"],
        )

    def knows_init(self, lane: int, maker: int, made_at: int) -> bool:
        """Return whether a thread came, by any ``barrier.cluster``, after a fence.mbarrier_init."""
        m = self.m
        fence = int(m.clocks.init_fence[maker])
        cluster, mine = divmod(int(m.warp_id[lane]), m.clocks.warps)
        its = int(m.warp_id[maker]) % m.clocks.warps
        return made_at <= fence <= int(self.met[cluster, mine, its])

    def name(self, block: Any) -> str:
        """Return the index of a block of the machine, as text."""
        m = self.m
        return str(m.layout.block_index(int(m.block_id[int(block) * m.threads_per_block])))


class ClusterRegion(Region):
    """Shared memory of a thread's own block and, in windows, of all blocks of its cluster."""

    def __init__(self, own: Region, clusters: Clusters) -> None:
        super().__init__(own.name, own.memory, own.shadow, own.cells, own.starts, own.limit)
        self.own, self.clusters, self.m = own, clusters, clusters.m

    def resolve(self, lanes: Any, at: Any) -> tuple[Any, Any]:
        """Return offsets in the parts of the region, and where these begin."""
        m, n = self.m, self.m.blocks_per_cluster
        own = m.block_of[lanes]
        mapped = np.broadcast_to((at >= WINDOW_BYTES) & (at < (n + 1) * WINDOW_BYTES), lanes.shape)
        if not mapped.any():
            return at, own * self.limit
        block = np.where(mapped, own // n * n + rank_in(at, own % n), own)
        other = np.flatnonzero(block != own)
        if other.size:
            self.clusters.reach(lanes[other], block[other])
        return np.where(mapped, at % WINDOW_BYTES, at), block * self.limit

    def part_of(self, lane: int, at: int) -> tuple[int, str]:
        """Return the start of the block's memory that contains an offset, and the block."""
        block, m = at // self.limit, self.m
        whose = "" if block == m.block_of[lane] else f" of block {self.clusters.name(block)}"
        return block * self.limit, whose
