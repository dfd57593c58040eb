"""Threads that run together: numbers, stamps, clocks and error reports.

Threads at the same instruction execute it together, whatever their warp: NumPy arrays have one
entry per thread ("lane").
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_ptx.checks import Checks
from nbflow_ptx.errors import Finding, KernelFault
from nbflow_ptx.threads.launch_layout import Layout
from nbflow_ptx.threads.vector_clocks import Clocks, Grid


class Threads:
    """The threads of the blocks that run together."""

    def __init__(
        self,
        layout: Layout,
        checks: Checks,
        blocks: NDArray[np.int64],
        grid: Grid,
        stamps: list[int],
    ) -> None:
        self.layout, self.kernel, self.checks = layout, layout.kernel, checks
        self.stamps = stamps  # the instruction of each stamp
        self.pc = 0
        self.executed = self.lane_instructions = self.strong_accesses = 0
        self._number(blocks)
        self.clocks = Clocks(self.n_clusters, layout.warps_per_cluster, self.lanes, grid)

    def _number(self, blocks: NDArray[np.int64]) -> None:
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

    # Stamps and order ----------------------------------------------------------------------

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
        ins = self.kernel.code[self.stamps[stamp]]
        return ins.opcode == "cp" and ins.has("bulk")

    def acquire(self, lanes: Any) -> None:
        """Threads read with an atomic or another strong access."""
        self.strong_accesses += 1
        self.clocks.acquire[lanes] = self.stamp
        self.clocks.grid.acquire[self.of(self.block_id, lanes)] = self.stamp

    def of(self, values: NDArray[Any], lanes: Any) -> Any:
        """Return the entries of `values` for these threads."""
        return values if is_everyone(lanes, self.lanes) else values[lanes]

    def oldest_of(self, lanes: Any) -> Any:
        """Return the stamp up to which each thread is ordered after its whole cluster."""
        if self.clocks.same is not None:
            return self.clocks.same
        return self.clocks.oldest[self.of(self.warp_id, lanes)]

    # Reports ---------------------------------------------------------------------------------

    def where(self, pc: int) -> tuple[str, str]:
        """Return the source line of an instruction, and its text."""
        ins = self.kernel.code[min(pc, len(self.kernel.code) - 1)]
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
        kernel = self.layout.shorten(self.kernel.name)
        return KernelFault(Finding(check, message, kernel, place, text, block, thread, **more))

    def other_access(self, who: int, stamp: int) -> str:
        """Describe the other access of a race."""
        place, text = self.where(self.stamps[stamp])
        if who <= 0:
            return f"the other: several threads at {place}: {text}"
        block, thread = divmod(who - 1, self.threads_per_block)
        b, t = self.layout.block_index(block), self.layout.thread_index(thread)
        return f"the other: block {b}, thread {t} at {place}: {text}"


def is_everyone(lanes: Any, n: int) -> bool:
    """Return whether these are all `n` threads in order; one thread may stand there many times."""
    return len(lanes) == n and lanes[0] == 0 and lanes[-1] == n - 1
