"""State of one group of blocks that runs: registers, memory and everything in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_ptx.checks import Checks
from nbflow_ptx.machine.async_copies import Copies
from nbflow_ptx.machine.clusters import ClusterRegion, Clusters
from nbflow_ptx.machine.mbarriers import Mbarriers
from nbflow_ptx.machine.warpgroups import Warpgroups
from nbflow_ptx.memory.device import LIVE, Device
from nbflow_ptx.memory.profile import Profile
from nbflow_ptx.memory.races import Cells
from nbflow_ptx.memory.spaces import Memory, Region
from nbflow_ptx.threads.launch_layout import Layout
from nbflow_ptx.threads.numbering import Threads
from nbflow_ptx.threads.special_registers import special_register
from nbflow_ptx.threads.vector_clocks import Grid


@dataclass
class Launch:
    """State that all thread blocks of one launch share.

    ``shared_granule`` is the narrowest access to shared memory in bytes, ``wgmma_rows`` numbers
    the registers that ``wgmma`` uses, ``stamps`` has the instruction of each stamp.  Tensor cores
    are those of ``arch``, or exact with ``exact_mma``.
    """

    layout: Layout
    device: Device
    checks: Checks
    grid: Grid
    cells: Cells | None
    profile: Profile | None
    shared_granule: int
    wgmma_rows: dict[str, int]
    arch: str
    exact_mma: bool
    stamps: list[int] = field(default_factory=lambda: [0])
    printed: list[str] = field(default_factory=list)


class Machine(Threads):
    """The state of one group of blocks that runs."""

    def __init__(self, launch: Launch, blocks: NDArray[np.int64]) -> None:
        layout = launch.layout
        super().__init__(layout, launch.checks, blocks, launch.grid, launch.stamps)
        self.launch, self.params = launch, layout.params
        self.registers = self.kernel.unwritten.copy()
        self.carry: Any = np.bool_(False)
        self._special: dict[str, Any] = {}
        self.clusters = Clusters(self)
        self.memory = self._memory()
        self.copies = Copies(self.memory)
        self.mbarriers = Mbarriers(self.memory)
        self.warpgroups = Warpgroups(self, self.memory.regions["shared"], launch.wgmma_rows)

    def _memory(self) -> Memory:
        launch, layout = self.launch, self.layout
        size = layout.shared_bytes
        shared = np.full(self.n_blocks * size, 0xFF, np.uint8)
        shadow = np.zeros((self.n_blocks, size), np.uint8)
        for start, n in layout.shared_ranges:
            shadow[:, start : start + n] = LIVE
        frame = max(-(-self.kernel.frame_bytes // 16) * 16, 16)
        local = np.full(self.lanes * frame, 0xCD, np.uint8)
        tracked = None
        if self.checks.races:
            tracked = Cells(
                shared.size, launch.shared_granule, across=False, warps=layout.warps_per_cluster
            )
        own_parts = self.block_of * size if self.n_blocks > 1 else None
        own = Region("shared", shared, shadow.reshape(-1), tracked, own_parts, size)
        device = launch.device
        regions = {
            "global": Region("global", device.heap, device.shadow, launch.cells, limit=device.top),
            "shared": own,
            "cluster": ClusterRegion(own, self.clusters) if self.blocks_per_cluster > 1 else own,
            "local": Region(
                "local", local, np.full(local.size, LIVE, np.uint8), None,
                self.all_lanes * frame, frame,
            ),
        }  # fmt: skip
        return Memory(self, device, regions, launch.profile)

    def met(self, *, grid: bool = False) -> None:
        """Every thread met the others of its block (or of the grid) at a barrier."""
        self.touch()
        if self.blocks_per_cluster > 1 and not grid:
            self.clocks.barrier_of_blocks(self.blocks_per_cluster, self.stamp)
            return
        self.clocks.barrier_of_all(self.stamp)
        cells = self.memory.regions["shared"].cells
        if cells is not None:
            cells.barrier_of_all()

    def set_carry(self, i: Any, value: Any) -> None:
        """Write the carry flag."""
        if i is None:
            self.carry = value
            return
        if not self.carry.ndim:
            self.carry = filled(self.lanes, self.carry)
        self.carry[i] = value

    def special(self, name: str) -> Any:
        """Return a special register: an array over threads, or a scalar."""
        if name.startswith(("%clock", "%globaltimer")):
            return np.uint64(self.executed)
        if name not in self._special:
            workspace = self.launch.device.grid_workspace()
            self._special[name] = special_register(self, name, workspace)
        return self._special[name]


def filled(n: int, value: Any) -> Any:
    """Return `n` times a NumPy scalar; for short arrays several times as fast as `np.full`."""
    out = np.empty(n, value.dtype)
    out.fill(value)
    return out
