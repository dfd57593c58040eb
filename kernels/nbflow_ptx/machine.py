"""The executor: all threads of a group of blocks, one instruction at a time.

Threads at the same instruction execute it together, whatever their warp.  Threads that diverged
are separate groups; the group furthest behind runs first, so that groups meet again where their
paths do.  A group that spins on memory gives way to the others after a while, so that locks and
flags between threads make progress.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_ptx import schedule
from nbflow_ptx.checks import Checks
from nbflow_ptx.clusters import ClusterRegion, Clusters
from nbflow_ptx.device import GLOBAL_BASE, LIVE, LOCAL_BASE, SHARED_BASE, Device
from nbflow_ptx.errors import Finding, KernelFault
from nbflow_ptx.instructions.access import Copies
from nbflow_ptx.layout import Layout
from nbflow_ptx.mbarriers import Mbarriers
from nbflow_ptx.memory import Memory, Region, is_everyone
from nbflow_ptx.profile import Profile
from nbflow_ptx.program import Program
from nbflow_ptx.races import Cells, Clocks, Grid
from nbflow_ptx.warpgroups import Warpgroups


class Machine:
    """The state of one group of blocks that runs."""

    def __init__(
        self,
        program: Program,
        layout: Layout,
        device: Device,
        blocks: NDArray[np.int64],
        grid_state: Grid,
        cells: Cells | None,
        checks: Checks,
        profile: Profile | None,
        stamps: list[int],
        output: list[str],
    ) -> None:
        self.program, self.layout, self.checks, self.profile = program, layout, checks, profile
        self.device, self.params, self.output = device, layout.params, output
        self.stamps = stamps  # the instruction of each stamp
        self.pc = 0
        self.executed = self.lane_instructions = self.strong_accesses = 0
        self._threads(blocks)
        self._registers()
        self.clocks = Clocks(self.n_clusters, layout.warps_per_cluster, self.lanes, grid_state)
        self.clusters = Clusters(self)
        self.copies = Copies(self.lanes)
        self.mbarriers = Mbarriers(self)
        self.warpgroups = Warpgroups(self)
        self.memory = self._memory(cells)

    def _threads(self, blocks: NDArray[np.int64]) -> None:
        """Give numbers: lane `l` is thread ``l % size`` of block ``l // size``."""
        n = self.layout.threads_per_block
        self.threads_per_block = n
        self.n_blocks, self.lanes = len(blocks), len(blocks) * n
        self.warps_per_block = -(-n // 32)
        self.n_warps = self.n_blocks * self.warps_per_block
        self.all_lanes = np.arange(self.lanes)
        self.block_of, self.thread_of = self.all_lanes // n, self.all_lanes % n
        self.block_id = blocks[self.block_of]
        self.blocks_per_cluster = self.layout.blocks_per_cluster
        self.threads_per_cluster = self.blocks_per_cluster * n
        self.n_clusters = self.n_blocks // self.blocks_per_cluster
        self.cluster_id = self.block_id // self.blocks_per_cluster
        self.first_thread = int(blocks[0]) * n
        self.thread_id = (self.first_thread + self.all_lanes + 1).astype(np.int32)
        self.lane = self.thread_of % 32
        in_block = self.thread_of // 32
        self.warp_id = self.block_of * self.warps_per_block + in_block
        in_cluster = self.warp_id % self.layout.warps_per_cluster
        bits: Any = np.uint32 if self.layout.warps_per_cluster <= 32 else np.uint64
        self.warp_bit = bits(1) << in_cluster.astype(bits)
        self.slot = self.warp_id * 32 + self.lane
        self.group_of = self.block_of * -(-n // 128) + self.thread_of // 128  # its warpgroup
        self.n_groups = self.n_blocks * -(-n // 128)
        self.alive = np.ones(self.lanes, np.bool_)
        self._special: dict[str, Any] = {}

    def _registers(self) -> None:
        self.registers: list[Any] = list(self.program.poison)
        self.carry: Any = np.bool_(False)

    def _memory(self, cells: Cells | None) -> Memory:
        layout = self.layout
        size = layout.shared_bytes
        shared = np.full(self.n_blocks * size, 0xFF, np.uint8)
        shadow = np.zeros((self.n_blocks, size), np.uint8)
        for start, n in layout.shared_ranges:
            shadow[:, start : start + n] = LIVE
        self.shared_start = self.block_of * size
        frame = max(-(-self.program.kernel.frame_bytes // 16) * 16, 16)
        local = np.full(self.lanes * frame, 0xCD, np.uint8)
        self.local_start = self.all_lanes * frame
        self.frame_bytes = frame
        tracked = None
        if self.checks.races:
            tracked = Cells(
                shared.size, self.program.granules["shared"], across=False,
                warps=layout.warps_per_cluster,
            )  # fmt: skip
        own_parts = self.shared_start if self.n_blocks > 1 else None
        own = Region("shared", shared, shadow.reshape(-1), tracked, own_parts, size)
        return Memory(
            self,
            Region("global", self.device.heap, self.device.shadow, cells, limit=self.device.top),
            own,
            ClusterRegion(own, self) if self.blocks_per_cluster > 1 else own,
            Region(
                "local",
                local,
                np.full(local.size, LIVE, np.uint8),
                None,
                self.local_start,
                frame,
            ),
        )

    # Services for instructions ---------------------------------------------------------------

    @property
    def stamp(self) -> int:
        """The number of the latest memory or synchronisation instruction."""
        return len(self.stamps) - 1

    def touch(self) -> None:
        """Give the instruction at hand a stamp."""
        self.stamps.append(self.pc)

    def fence(self, lanes: Any, *, wide: bool = True) -> None:
        """Threads issued a fence; `wide` says that it reaches beyond their block."""
        self.clocks.fence[lanes] = self.clocks.acquire[lanes] = self.stamp
        if wide:
            self.clocks.grid.fence[self.of(self.block_id, lanes)] = self.stamp
            self.clocks.grid.acquire[self.of(self.block_id, lanes)] = self.stamp

    def is_asynchronous(self, stamp: int) -> bool:
        """Return whether a bulk copy has this stamp."""
        ins = self.program.kernel.code[self.stamps[stamp]]
        return ins.opcode == "cp" and ins.has("bulk")

    def acquire(self, lanes: Any) -> None:
        """Threads read with an atomic or another strong access."""
        self.strong_accesses += 1
        self.clocks.acquire[lanes] = self.stamp
        self.clocks.grid.acquire[self.of(self.block_id, lanes)] = self.stamp

    def of(self, values: NDArray[Any], lanes: Any) -> Any:
        """Return the entries of `values` for these threads."""
        return values if is_everyone(lanes, self.lanes) else values[lanes]

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
            self.carry = np.full(self.lanes, self.carry)
        self.carry[i] = value

    def symbol(self, name: str) -> int:
        """Return the address of a variable in its own space."""
        return self.layout.addresses[name]

    def frame_offset(self, name: str) -> int:
        """Return the address of a thread's local variable."""
        return self.program.kernel.frame[name]

    def print(self, text: str) -> None:
        """Collect what the kernel prints."""
        self.output.append(text)

    def special(self, name: str) -> Any:
        """Return a special register: an array over threads, or a scalar."""
        if name.startswith(("%clock", "%globaltimer")):
            return np.uint64(self.executed)
        if name not in self._special:
            self._special[name] = self.layout.special(self, name)
        return self._special[name]

    # Reports ---------------------------------------------------------------------------------

    def where(self, pc: int) -> tuple[str, str]:
        """Return the source line of an instruction, and its text."""
        ins = self.program.kernel.code[min(pc, len(self.program.kernel.code) - 1)]
        place = f"PTX line {ins.line}"
        if ins.source is not None:
            file = self.layout.files.get(ins.source[0], f"file {ins.source[0]}")
            place = f"{file}:{ins.source[1]} ({place})"
        return place, self.layout.shorten(ins.text)

    def thread_name(self, lane: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return block and thread index of a lane, as (x, y, z)."""
        return self.layout.block_index(int(self.block_id[lane])), self.layout.thread_index(
            int(self.thread_of[lane])
        )

    def error(self, check: str, message: str, lane: int, **more: Any) -> KernelFault:
        """Return the error for a failed check at the instruction at hand."""
        place, text = self.where(self.pc)
        block, thread = self.thread_name(lane)
        kernel = self.layout.shorten(self.program.kernel.name)
        return KernelFault(Finding(check, message, kernel, place, text, block, thread, **more))

    def memory_fault(
        self, check: str, region: Region, lane: int, at: int, why: str, notes: list[str]
    ) -> None:
        """Raise the error for a failed check of an access at offset `at` of a region."""
        if region.name == "global":
            address, text = at + GLOBAL_BASE, self.device.describe(at)
            near = self.device.nearest(at)
            name = near.name if near else None
        else:
            base = SHARED_BASE if region.name == "shared" else LOCAL_BASE
            start, whose = region.part_of(lane, at)
            address = base + at - start
            name, text = self.layout.describe(region.name, at - start)
            text += whose
        raise self.error(check, f"{why}: {text}", lane, address=address, array=name, notes=notes)

    def other_access(self, who: int, stamp: int) -> str:
        """Describe the other access of a race."""
        place, text = self.where(self.stamps[stamp])
        if who <= 0:
            return f"the other: several threads at {place}: {text}"
        block, thread = divmod(who - 1, self.threads_per_block)
        b, t = self.layout.block_index(block), self.layout.thread_index(thread)
        return f"the other: block {b}, thread {t} at {place}: {text}"

    def run(self) -> None:
        """Run until every thread has left the kernel."""
        with np.errstate(all="ignore"):
            schedule.run(self)
