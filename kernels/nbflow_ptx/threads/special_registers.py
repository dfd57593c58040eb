"""Special registers: ``%tid``, ``%laneid``, ``%cluster_ctarank``, ..."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_ptx.errors import UnsupportedInstruction
from nbflow_ptx.threads.launch_layout import index_in
from nbflow_ptx.threads.numbering import Threads


def special_register(m: Threads, name: str, grid_workspace: int) -> Any:
    """Return the values of a special register; `grid_workspace` is the grid barrier's address."""
    layout = m.layout
    base, _, axis = name.lstrip("%").partition(".")
    k = "xyz".find(axis) if axis else -1
    if base in ("tid", "ctaid"):
        index = (
            index_in(m.thread_of, layout.block) if base == "tid" else layout.block_index(m.block_id)
        )
        return _scalar_if_same(index[k])
    if base in ("ntid", "nctaid"):
        return np.uint32((layout.block if base == "ntid" else layout.grid)[k])
    lane = m.lane.astype(np.uint32)
    one = np.uint32(1)
    rank = m.block_id % layout.blocks_per_cluster
    table: dict[str, Any] = {
        "laneid": lambda: lane,
        "warpid": lambda: (m.warp_id % m.warps_per_block).astype(np.uint32),
        "nwarpid": lambda: np.uint32(m.warps_per_block),
        "lanemask_eq": lambda: one << lane,
        "lanemask_lt": lambda: (one << lane) - one,
        "lanemask_le": lambda: ((one << lane) - one) | (one << lane),
        "lanemask_gt": lambda: ~(((one << lane) - one) | (one << lane)),
        "lanemask_ge": lambda: ~((one << lane) - one),
        "WARP_SZ": lambda: np.uint32(32),
        "smid": lambda: (m.block_id % 132).astype(np.uint32),
        "nsmid": lambda: np.uint32(132),
        "gridid": lambda: np.uint64(1),
        "dynamic_smem_size": lambda: np.uint32(layout.dynamic_bytes),
        "total_smem_size": lambda: np.uint32(layout.total_shared),
        "clusterid": lambda: _scalar_if_same(
            layout.block_index(m.block_id)[k] // layout.cluster[k]
        ),
        "nclusterid": lambda: np.uint32(layout.grid[k] // layout.cluster[k]),
        "cluster_ctaid": lambda: _scalar_if_same(index_in(rank, layout.cluster)[k]),
        "cluster_nctaid": lambda: np.uint32(layout.cluster[k]),
        "cluster_ctarank": lambda: _scalar_if_same(rank),
        "cluster_nctarank": lambda: np.uint32(layout.blocks_per_cluster),
        "is_explicit_cluster": lambda: np.bool_(layout.blocks_per_cluster > 1),
    }
    if base in table:
        return table[base]()
    if base in ("envreg1", "envreg2"):  # where cooperative groups look for the grid's barrier
        half = grid_workspace >> (32 if base == "envreg1" else 0)
        return np.uint32(half & 0xFFFFFFFF)
    raise UnsupportedInstruction(f"special register {name}")


def _scalar_if_same(values: Any) -> Any:
    """Return values of threads as a register's, one number if all are the same."""
    values = values.astype(np.uint32)
    return values[0] if (values == values[0]).all() else values
