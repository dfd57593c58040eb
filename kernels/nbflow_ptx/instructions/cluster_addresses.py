"""Addresses of shared memory in other blocks of a thread block cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_ptx.instructions.binder import Binder, Run, full, threads
from nbflow_ptx.machine.clusters import address_in, rank_in
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.memory.device import SHARED_BASE
from nbflow_ptx.parsing.syntax import Instruction
from nbflow_ptx.parsing.types import TYPES


def map_to_rank(b: Binder, ins: Instruction) -> Run:
    """``mapa``: the address of the same place in the shared memory of another block."""
    kind = b.type_of(ins)
    d, address = b.write(ins.args[0]), b.read(ins.args[1], kind)
    rank = b.read(ins.args[2], TYPES["u32"])
    base = 0 if ins.has("shared::cluster") else SHARED_BASE

    def run(m: Machine, i: Any) -> None:
        t, n = threads(m, i), m.blocks_per_cluster
        ranks = full(m, i, rank(m, i)).astype(np.int64)
        if (ranks >= n).any():
            j = int((ranks >= n).argmax())
            raise m.error("bounds", f"mapa to block {ranks[j]} of a cluster of {n}", int(t[j]))
        at = full(m, i, address(m, i)).astype(np.int64)
        d(m, i, (base + address_in(ranks, at) if n > 1 else at).astype(kind.dtype))

    return run


def find_rank(b: Binder, ins: Instruction) -> Run:
    """``getctarank``: the rank of the block of a shared memory address."""
    d, address = b.write(ins.args[0]), b.read(ins.args[1], b.type_of(ins))

    def run(m: Machine, i: Any) -> None:
        at = full(m, i, address(m, i)).astype(np.int64) % SHARED_BASE
        own = m.block_of[threads(m, i)] % m.blocks_per_cluster
        d(m, i, rank_in(at, own).astype(np.uint32))

    return run
