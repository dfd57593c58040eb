"""``mbarrier`` and the copies that arrive at one: bulk copies, ``cp.async.mbarrier.arrive``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow_ptx.instructions.binder import Binder, Read, Run, Write, full, threads
from nbflow_ptx.machine.async_proxy import UNIT, check_proxy
from nbflow_ptx.machine.clusters import address_in
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.machine.mbarriers import NBYTES, Mbarrier
from nbflow_ptx.parsing.syntax import Addr, Instruction
from nbflow_ptx.parsing.types import TYPES

_S64 = TYPES["s64"]
_U32 = TYPES["u32"]


class _Place:
    """The operand ``[address]`` of an mbarrier."""

    def __init__(self, b: Binder, ins: Instruction, operand: Any) -> None:
        self.address, self.what = b.address(operand), ".".join(ins.op[:2])
        self.space = ins.space
        if self.space not in ("shared", "cluster"):
            self.space = "generic"

    def find(self, m: Machine, lanes: Any, i: Any, *, using: bool = True) -> Any:
        """Return the places for these threads; `using`: as it was initialised before."""
        return self.find_at(m, lanes, full(m, i, self.address(m, i)), using=using)

    def find_at(self, m: Machine, lanes: Any, address: Any, *, using: bool = True) -> Any:
        """Return the places of addresses that this operand has, or another block's."""
        at = m.mbarriers.place(lanes, address, self.what, space=self.space)
        region = m.memory.regions["cluster"]
        if using and region.cells is not None:
            for race in region.cells.read(m, lanes, at, NBYTES, mark=False):
                if not _published(m, int(lanes[race[0]]), int(at[race[0]]), race[2]):
                    m.memory.race(region, lanes, at, race, self.what)
        return at


def _published(m: Machine, lane: int, at: int, stamp: int) -> bool:
    """Return whether a store initialized an mbarrier and the cluster met after its fence."""
    found = m.mbarriers.found.get(at)
    if found is None or found.made_at != stamp:
        return False
    return m.clusters.knows_init(lane, found.maker, stamp)


def mbarrier(b: Binder, ins: Instruction) -> Run:
    """Every ``mbarrier`` instruction but ``try_wait``, at which threads may stop."""
    if ins.has("init"):
        return _init(b, ins)
    if ins.has("test_wait"):
        return _test_wait(b, ins)
    if ins.has("arrive", "arrive_drop"):
        return _arrive(b, ins)
    if ins.has("pending_count"):
        d, state = b.write(ins.args[0]), b.read(ins.args[1], TYPES["u64"])
        return lambda m, i: d(m, i, (state(m, i) & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    place = _Place(b, ins, ins.args[0])
    if ins.has("inval"):
        return lambda m, i: m.mbarriers.invalidate(threads(m, i), place.find(m, threads(m, i), i))
    if not ins.has("expect_tx", "complete_tx"):
        raise b.unsupported(ins)
    n, sign = b.read(ins.args[1], _U32), -1 if ins.has("complete_tx") else 1

    def expect(m: Machine, i: Any) -> None:
        m.touch()
        t = threads(m, i)
        at, sizes = place.find(m, t, i), full(m, i, n(m, i))
        for lane, k, size in zip(t.tolist(), at.tolist(), sizes.tolist(), strict=True):
            found = m.mbarriers.get(lane, k)
            m.mbarriers.expect(lane, found, sign * size)
            m.mbarriers.settle(found)

    return expect


def _init(b: Binder, ins: Instruction) -> Run:
    place, count = _Place(b, ins, ins.args[0]), b.read(ins.args[1], _U32)

    def run(m: Machine, i: Any) -> None:
        m.touch()
        t = threads(m, i)
        at = place.find(m, t, i, using=False)
        state = np.zeros(len(t), np.uint64)
        m.memory.store(t, at - m.memory.regions["shared"].start(t), "shared", [state])
        m.mbarriers.init(t, at, full(m, i, count(m, i)))

    return run


def _arrive(b: Binder, ins: Instruction) -> Run:
    args = ins.args
    gives = not isinstance(args[0], Addr)
    d = b.write(args[0]) if gives else None
    place, *rest = args[1:] if gives else args
    where = _Place(b, ins, place)
    expects, drop = ins.has("expect_tx"), ins.has("arrive_drop")
    number = b.read(rest[0], _U32) if rest else None
    if ins.has("noComplete") or (expects and number is None):
        raise b.unsupported(ins)

    def run(m: Machine, i: Any) -> None:
        m.touch()
        t = threads(m, i)
        at = where.find(m, t, i)
        n = full(m, i, number(m, i)) if number is not None else np.ones(len(t), np.uint32)
        ones = np.ones(len(t), np.int64)
        state = m.mbarriers.arrive(t, at, ones if expects else n, n if expects else None, drop=drop)
        if d is not None:
            d(m, i, state)

    return run


@dataclass
class Wait:
    """``mbarrier.test_wait`` and ``.try_wait``."""

    place: _Place
    phase: Read
    parity: bool
    result: Write

    def poll(self, m: Machine, lanes: Any, *, deliver: bool) -> tuple[Any, Any, Any]:
        """Return for each thread the place, the phase, and whether that is complete."""
        at = self.place.find(m, lanes, lanes)
        if deliver:
            m.mbarriers.deliver(at)
        phase = full(m, lanes, self.phase(m, lanes)).astype(np.int64)
        return at, phase, m.mbarriers.complete(lanes, at, phase, parity=self.parity)

    def finish(self, m: Machine, lanes: Any, at: Any, done: Any) -> None:
        """Return results to threads; those that saw a complete phase synchronize with it."""
        m.touch()
        if done.any():
            m.mbarriers.observe(lanes[done], at[done])
        self.result(m, lanes, done)


def wait(b: Binder, ins: Instruction) -> Wait:
    """Return the operands of ``mbarrier.try_wait`` or ``.test_wait``."""
    parity = ins.has("parity")
    kind = _U32 if parity else _S64
    place = _Place(b, ins, ins.args[1])
    return Wait(place, b.read(ins.args[2], kind), parity, b.write(ins.args[0]))


def _test_wait(b: Binder, ins: Instruction) -> Run:
    operands = wait(b, ins)

    def run(m: Machine, i: Any) -> None:
        t = threads(m, i)
        at, _, done = operands.poll(m, t, deliver=True)
        operands.finish(m, t, at, done)
        m.strong_accesses += 1  # a thread that spins gives way to others

    return run


def arrive_behind_copies(b: Binder, ins: Instruction) -> Run:
    """``cp.async.mbarrier.arrive``: arrive when this thread's copies so far have landed."""
    place, counted = _Place(b, ins, ins.args[0]), ins.has("noinc")

    def run(m: Machine, i: Any) -> None:
        m.touch()
        t = threads(m, i)
        at = place.find(m, t, i)
        m.clocks.given[t] = m.stamp
        for k in np.unique(at).tolist():
            _arrive_later(m, k, t[at == k], counted)

    return run


def _arrive_later(m: Machine, k: int, lanes: Any, counted: bool) -> None:
    found, stamp = m.mbarriers.get(int(lanes[0]), k), m.stamp
    rows = [m.clocks.row(int(m.warp_id[lane]), m.stamp) for lane in lanes]
    if not counted:
        found.pending += len(lanes)

    def land() -> None:
        m.copies.wait(lanes, None, before=stamp)
        for lane, row in zip(lanes.tolist(), rows, strict=True):
            m.mbarriers.arrive_at(found, lane, 1, row)

    found.landings.append(land)


def bulk_copy(b: Binder, ins: Instruction) -> Run:
    """``cp.async.bulk`` from global to shared memory, counted by an mbarrier."""
    if ins.has("prefetch"):
        return lambda m, i: None
    parts = [p for p in ins.op if p.startswith(("shared", "global"))]
    if (
        ins.has("tensor")
        or parts not in (["shared::cluster", "global"], ["shared::cta", "global"])
        or not ins.has("mbarrier::complete_tx::bytes")
    ):
        raise b.unsupported(ins, "only global to shared memory, counted by an mbarrier")
    to, source = b.address(ins.args[0]), b.address(ins.args[1])
    size, place = b.read(ins.args[2], _U32), _Place(b, ins, ins.args[3])
    mask = b.read(ins.args[4], TYPES["u16"]) if ins.has("multicast::cluster") else None

    def run(m: Machine, i: Any) -> None:
        m.touch()
        t = threads(m, i)
        columns = [full(m, i, x(m, i)).tolist() for x in (to, source, size, place.address)]
        if mask is not None:
            columns.append(full(m, i, mask(m, i)).tolist())
        for lane, at, start, n, barrier, *blocks in zip(t.tolist(), *columns, strict=True):
            data = _read_source(m, lane, start, n)
            pairs = _in_blocks(m, lane, at, barrier, blocks[0]) if blocks else [(at, barrier)]
            for there, counter in pairs:
                k = int(place.find_at(m, np.array([lane]), np.array([counter]))[0])
                found = m.mbarriers.get(lane, k)
                _check_visible(m, lane, found)
                _send(m, lane, found, there, data, place.space)
        m.clocks.given[t] = m.stamp

    return run


def _in_blocks(m: Machine, lane: int, to: int, barrier: int, mask: int) -> list[tuple[int, int]]:
    """Return destination and mbarrier in each block of the cluster that a mask names."""
    if not mask or mask >> m.blocks_per_cluster:
        raise m.error(
            "bounds",
            f"a copy to the blocks {mask:#x} of a cluster of {m.blocks_per_cluster}",
            lane,
        )
    if m.blocks_per_cluster == 1:
        return [(to, barrier)]
    ranks = [r for r in range(m.blocks_per_cluster) if mask >> r & 1]
    return [(int(address_in(r, to)), int(address_in(r, barrier))) for r in ranks]


def _check_visible(m: Machine, lane: int, found: Mbarrier) -> None:
    """Report an mbarrier that a bulk copy uses and whose making no fence made visible to it."""
    clocks = m.clocks
    fence = max(int(clocks.proxy[0, found.maker]), int(clocks.init_fence[found.maker]))
    if fence < found.made_at and m.checks.proxy and m.checks.races:
        raise m.error(
            "proxy",
            "a bulk copy uses an mbarrier initialised without a fence.mbarrier_init or "
            "fence.proxy.async since",
            lane,
        )


def _read_source(m: Machine, lane: int, source: int, size: int) -> Any:
    """Return what a copy brings, in units of 16 bytes: it is read when the copy is started."""
    if size % UNIT or size < UNIT:
        raise m.error("aligned", f"cp.async.bulk of {size} bytes; a multiple of 16", lane)
    steps = np.arange(0, size, UNIT)
    lanes = np.full(len(steps), lane)
    got = m.memory.load(lanes, source + steps, "global", 8, 2, what="cp.async.bulk source")
    return np.stack(got, axis=1).view(np.uint8)


def _send(m: Machine, lane: int, found: Mbarrier, to: int, data: Any, space: str) -> None:
    """One thread starts one copy, which lands later."""
    what = "cp.async.bulk"
    steps = np.arange(0, data.size, UNIT)
    lanes = np.full(len(steps), lane)
    region = m.memory.regions[space]
    places, _ = m.memory.place(region, lanes, to + steps, UNIT, f"{what} destination")
    check_proxy(m, region, lanes, places, what)
    keep, at = m.memory.begin_copy(lanes, to + steps, UNIT, what, space)
    row = m.clocks.row(int(m.warp_id[lane]), m.stamp)

    def land() -> None:
        m.memory.end_copy(lanes[keep], at, data[keep], mark=False)
        np.maximum(found.clock, row, out=found.clock)
        m.mbarriers.expect(lane, found, -data.size)
        m.mbarriers.settle(found)

    found.landings.append(land)
