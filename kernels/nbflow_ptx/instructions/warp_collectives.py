"""Warp-wide instructions: shuffles, votes, matches and reductions.

Each is bound as ``run(machine, i, masks)``; the machine has made sure that every lane of a mask
has arrived.  Lanes are rows of a table of 32 per warp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_ptx.instructions.binder import Binder, full, threads
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.parsing.syntax import Imm, Instruction
from nbflow_ptx.parsing.types import TYPES

Collective = Callable[["Machine", Any, Any], None]


def warp_bits(m: Machine, t: Any, flags: Any) -> Any:
    """Return one word per warp: the bits of the lanes `t` whose flag is set."""
    table = np.zeros(m.n_warps * 32, np.bool_)
    table[m.slot[t]] = flags
    return np.packbits(table, bitorder="little").view(np.uint32)


def shuffle(b: Binder, ins: Instruction) -> Collective:
    """``shfl.sync`` in its four modes."""
    mode = ins.one_of("up", "down", "bfly", "idx")
    if not mode:
        raise b.unsupported(ins)
    d, p = b.pair(ins.args[0])
    x = b.read(ins.args[1], TYPES["b32"])
    u = TYPES["u32"]
    offset, clamp = b.read(ins.args[2], u), b.read(ins.args[3], u)

    def run(m: Machine, i: Any, masks: Any) -> None:
        t = threads(m, i)
        lane = m.lane[t]
        by, bounds = offset(m, i), clamp(m, i)
        if by.ndim or bounds.ndim:
            source, inside = shuffle_source(mode, lane, by, bounds)
        else:
            source, inside = (of.take(lane) for of in _sources_of_warp(mode, int(by), int(bounds)))
        table = np.zeros(m.n_warps * 32, np.uint32)
        table[m.slot[t]] = x(m, i)
        d(m, i, table[m.warp_id[t] * 32 + source])
        if p is not None:
            p(m, i, inside)
        if m.checks.masks and not (np.ndim(masks) == 0 and masks == 0xFFFFFFFF):
            bad = (masks >> source.astype(np.uint32)) & np.uint32(1) == 0
            if bad.any():
                j = int(np.flatnonzero(np.broadcast_to(bad, t.shape))[0])
                raise m.error(
                    "masks",
                    f"shfl reads lane {int(source[j])}, which its mask "
                    f"{int(np.broadcast_to(masks, t.shape)[j]):#010x} does not name",
                    int(t[j]),
                )

    return run


def shuffle_source(mode: str, lane: Any, offset: Any, clamp: Any) -> tuple[Any, Any]:
    """Return the lane each lane reads, and whether that is within its segment."""
    by, c = (offset & np.uint32(31)).astype(np.int64), (clamp & np.uint32(31)).astype(np.int64)
    segment = ((clamp >> np.uint32(8)) & np.uint32(31)).astype(np.int64)
    last = (lane & segment) | (c & ~segment & 31)
    if mode == "up":
        source = lane - by
        inside = source >= last
    elif mode == "down":
        source = lane + by
        inside = source <= last
    elif mode == "bfly":
        source = lane ^ by
        inside = source <= last
    else:
        source = (lane & segment) | (by & ~segment & 31)
        inside = source <= last
    return np.where(inside, source, lane), inside


@functools.cache
def _sources_of_warp(mode: str, offset: int, clamp: int) -> tuple[Any, Any]:
    """Return `shuffle_source` of the 32 lanes of a warp."""
    return shuffle_source(mode, np.arange(32), np.uint32(offset), np.uint32(clamp))


def vote(b: Binder, ins: Instruction) -> Collective:
    """``vote.sync``: all, any, uni, ballot."""
    mode = ins.one_of("all", "any", "uni", "ballot")
    if not mode or not ins.has("sync"):
        raise b.unsupported(ins)
    d, p = b.write(ins.args[0]), b.read(ins.args[1], TYPES["pred"])

    def run(m: Machine, i: Any, masks: Any) -> None:
        t = threads(m, i)
        warp = m.warp_id[t]
        yes = warp_bits(m, t, p(m, i))[warp] & masks
        there = warp_bits(m, t, True)[warp] & masks
        if mode == "ballot":
            d(m, i, yes)
        elif mode == "any":
            d(m, i, yes != 0)
        elif mode == "all":
            d(m, i, yes == there)
        else:
            d(m, i, (yes == there) | (yes == 0))

    return run


def match(b: Binder, ins: Instruction) -> Collective:
    """``match.sync``: which lanes hold the same value."""
    kind = TYPES[f"b{8 * b.type_of(ins).nbytes}"]
    d, p = b.pair(ins.args[0])
    every = ins.has("all")
    x = b.read(ins.args[1], kind)

    def run(m: Machine, i: Any, masks: Any) -> None:
        t = threads(m, i)
        there = warp_bits(m, t, True)
        table = np.zeros((m.n_warps, 32), kind.dtype)
        table.reshape(-1)[m.slot[t]] = full(m, i, x(m, i))
        warp, lane = m.warp_id[t], m.lane[t]
        same = np.packbits(table[warp] == table[warp, lane][:, None], axis=1, bitorder="little")
        bits = same.view(np.uint32)[:, 0] & masks & there[warp]
        if every:
            all_same = bits == (masks & there[warp])
            d(m, i, np.where(all_same, masks, np.uint32(0)).astype(np.uint32))
            if p is not None:
                p(m, i, all_same)
        else:
            d(m, i, bits)

    return run


def reduce(b: Binder, ins: Instruction) -> Collective:
    """``redux.sync``: add, min, max and the logical ones of 32-bit integers."""
    kind = b.type_of(ins)
    table: dict[str, Any] = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    f = next((table[p] for p in ins.op if p in table), None)
    if f is None or kind.nbytes != 4 or kind.kind not in "usb":
        raise b.unsupported(ins)
    d, x = b.write(ins.args[0]), b.read(ins.args[1], kind)

    def run(m: Machine, i: Any, masks: Any) -> None:
        t = threads(m, i)
        key = m.warp_id[t].astype(np.int64) << 32 | masks
        groups, inverse = np.unique(key, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        starts = np.searchsorted(inverse[order], np.arange(len(groups)))
        value = full(m, i, x(m, i))
        d(m, i, f.reduceat(value[order], starts, dtype=kind.dtype)[inverse])

    return run


def elect(b: Binder, ins: Instruction) -> Collective:
    """``elect.sync``: one lane of the mask (here the lowest; hardware may take another)."""
    d, p = b.pair(ins.args[0])

    def run(m: Machine, i: Any, masks: Any) -> None:
        t = threads(m, i)
        there = warp_bits(m, t, True)[m.warp_id[t]] & masks
        lowest = there & (~there + np.uint32(1))
        d(m, i, np.log2(lowest).astype(np.uint32))
        if p is not None:
            p(m, i, lowest >> m.lane[t].astype(np.uint32) == 1)

    return run


def active_mask(b: Binder, ins: Instruction) -> Collective:
    """``activemask``: the lanes of the warp that execute it together."""
    d = b.write(ins.args[0])

    def run(m: Machine, i: Any, masks: Any) -> None:
        t = threads(m, i)
        d(m, i, warp_bits(m, t, True)[m.warp_id[t]])

    return run


def member_mask(b: Binder, ins: Instruction) -> Any:
    """Return the reader of the member mask of a warp-wide instruction; None for all lanes."""
    if ins.opcode in ("mma", "ldmatrix", "stmatrix", "movmatrix", "wmma"):
        return None
    mask = ins.args[-1]
    if isinstance(mask, Imm) and mask.value & 0xFFFFFFFF == 0xFFFFFFFF:
        return None
    return b.read(mask, TYPES["u32"])


def synchronise(b: Binder, ins: Instruction) -> Collective:
    """``bar.warp.sync``: orders memory among the lanes of the mask (done by the machine)."""
    return lambda m, i, masks: None
