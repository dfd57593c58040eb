"""Vector clocks: which accesses of other warps and blocks each warp is ordered after."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Clocks:
    """Vector clocks of the warps of a group of blocks.

    `warps` are those of a cluster, which is mostly one block.
    """

    def __init__(self, n_clusters: int, warps: int, lanes: int, grid: Grid) -> None:
        self.known: NDArray[np.int32] = np.zeros((n_clusters, warps, warps), np.int32)
        self.oldest: NDArray[np.int32] = np.zeros(n_clusters * warps, np.int32)
        self.lane: NDArray[np.int32] = np.zeros(lanes, np.int32)
        self.fence: NDArray[np.int32] = np.zeros(lanes, np.int32)
        self.acquire: NDArray[np.int32] = np.zeros(lanes, np.int32)
        #: The two latest fence.proxy.async of each thread (a thread one fence ahead of a reader has
        #: published the one before), the clock of each warp at its latest, and the latest
        #: fence.mbarrier_init of each thread.
        self.proxy: NDArray[np.int32] = np.zeros((2, lanes), np.int32)
        self.proxy_known: NDArray[np.int32] = np.zeros((n_clusters, warps, warps), np.int32)
        self.init_fence: NDArray[np.int32] = np.zeros(lanes, np.int32)
        #: The latest arrival of each thread at an mbarrier, and the latest wait for one.
        self.given: NDArray[np.int32] = np.zeros(lanes, np.int32)
        self.taken: NDArray[np.int32] = np.zeros(lanes, np.int32)
        self.warps, self.grid = warps, grid
        self.same: int | None = 0  # the value all of `oldest` has

    def barrier(
        self, cluster: int, lanes: NDArray[np.int64], warps: NDArray[np.int64], stamp: int
    ) -> None:
        """Threads `lanes`, of these warps of one cluster, met."""
        self.lane[lanes] = stamp
        self.same = None
        known = self.known[cluster]
        if len(warps) == self.warps:
            known[...] = stamp
        else:
            known[warps] = known[warps].max(axis=0)
            known[np.ix_(warps, warps)] = stamp
        self.oldest[cluster * self.warps : (cluster + 1) * self.warps] = known.min(axis=1)

    def proxy_fence(self, lanes: Any, warps: Any, stamp: int) -> None:
        """``fence.proxy.async``: asynchronous units see what these threads did and know of."""
        self.proxy[1, lanes] = self.proxy[0, lanes]
        self.proxy[0, lanes] = stamp
        cluster, warp = np.divmod(warps, self.warps)
        self.proxy_known[cluster, warp] = self.known[cluster, warp]
        self.proxy_known[cluster, warp, warp] = stamp

    def row(self, warp: int, stamp: int) -> NDArray[np.int32]:
        """Return the current clock of a warp, itself included."""
        row: NDArray[np.int32] = self.known[warp // self.warps, warp % self.warps].copy()
        row[warp % self.warps] = stamp
        return row

    def learn(self, warp: int, row: NDArray[np.int32]) -> None:
        """Let a warp of the machine know what a row says; not about its own lanes."""
        known = self.known[warp // self.warps, warp % self.warps]
        own = known[warp % self.warps]
        np.maximum(known, row, out=known)
        known[warp % self.warps] = own

    def barrier_of_blocks(self, per_cluster: int, stamp: int) -> None:
        """Every thread met the others of its block, of which clusters have several."""
        n = self.warps // per_cluster
        known = self.known.reshape(-1, per_cluster, n, self.warps)
        known[...] = known.max(axis=2, keepdims=True)
        for b in range(per_cluster):
            known[:, b, :, b * n : (b + 1) * n] = stamp
        self.lane[...] = stamp
        self.oldest[...] = known.min(axis=3).reshape(-1)
        self.same = None

    def barrier_of_all(self, stamp: int) -> None:
        """Every thread met the others of its cluster."""
        self.lane[...] = stamp
        self.known[...] = stamp
        self.oldest[...] = stamp
        self.same = stamp


class Grid:
    """Order between blocks: the last fence, acquire and grid-wide barrier of each."""

    def __init__(self, n_blocks: int) -> None:
        self.fence: NDArray[np.int64] = np.zeros(n_blocks, np.int64)
        self.acquire: NDArray[np.int64] = np.zeros(n_blocks, np.int64)
        self.met = 0
