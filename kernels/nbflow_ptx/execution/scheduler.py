"""Warp scheduler: ready and waiting threads, warp-wide instructions, deadlock reports."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_ptx.execution.block_barriers import BlockBarriers
from nbflow_ptx.execution.mbarrier_waits import Parked
from nbflow_ptx.execution.program import Block, Control
from nbflow_ptx.instructions.binder import full
from nbflow_ptx.instructions.builtin_calls import grid_barrier_done
from nbflow_ptx.instructions.warp_collectives import warp_bits
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.machine.warpgroups import WARPGROUP

#: Blocks of code a group may execute while others wait for their turn: when it keeps reading
#: memory with strong accesses (it spins), and when it does not.
_PATIENCE_SPINNING, _PATIENCE = 16, 20_000
_ALL = np.uint32(0xFFFFFFFF)


def run(m: Machine, blocks: dict[int, Block]) -> None:
    """Run a machine until all its threads have left; `blocks` are those of its program.

    The group of threads furthest behind runs first, so that groups meet again where their paths
    do.  A group that spins on memory gives way to the others after a while, so that locks and
    flags between threads make progress.
    """
    with np.errstate(all="ignore"):
        _Scheduler(m, blocks).run()


class _Scheduler:
    def __init__(self, m: Machine, blocks: dict[int, Block]) -> None:
        self.m, self.blocks = m, blocks
        kinds = ("warp", "group")
        self.waits = {b.control.pc: b.control for b in blocks.values() if b.control.kind in kinds}
        self.ready: dict[int, list[Any]] = {0: [m.all_lanes]}
        self.at_warp: dict[int, Any] = {}  # lanes waiting at a warp-wide instruction
        self.barriers = BlockBarriers(m, self.describe_waiting)
        self.at_grid: list[tuple[int, Any]] = []
        self.parked = Parked(m)
        self.new_turn()

    def run(self) -> None:
        while True:
            if not self.ready and not self.release() and not self.wake():
                if self.at_warp and not self.m.checks.masks:
                    self.force_warps()
                    continue
                if self.m.alive.any():
                    self.deadlock()
                break
            pc = self.choose()
            groups = self.ready.pop(pc)
            lanes = groups[0] if len(groups) == 1 else np.sort(np.concatenate(groups))
            self.follow(pc, lanes)
        self.m.warpgroups.check_end()
        self.m.mbarriers.check_end()
        if self.m.copies.pending and self.m.checks.uninitialised:
            lanes = self.m.copies.pending[0][0]
            raise self.m.error(
                "uninitialised", "the kernel ends with a cp.async it never waits for", int(lanes[0])
            )

    def choose(self) -> int:
        """Return the group to run: the one least advanced, unless it spins."""
        if len(self.ready) == 1 and not self.waiting():
            self.new_turn()
            return min(self.ready)
        self.turn += 1
        spins = self.m.strong_accesses - self.spins_before > _PATIENCE_SPINNING // 2
        if self.turn >= (_PATIENCE_SPINNING if spins else _PATIENCE):
            self.new_turn()
            self.release()
            self.wake()
            return max(self.ready)
        return min(self.ready)

    def new_turn(self) -> None:
        """Restart the count of how long the others have been waiting."""
        self.turn, self.spins_before = 0, self.m.strong_accesses

    def waiting(self) -> bool:
        others = self.at_grid or self.parked.groups or self.m.clusters.waiting
        return bool(others) or self.barriers.waiting()

    def send(self, pc: int, lanes: Any) -> None:
        self.ready.setdefault(pc, []).append(lanes)

    def follow(self, pc: int, lanes: Any) -> None:
        """Run one group until it splits, waits, ends, or another is less advanced."""
        m = self.m
        while True:
            i = None if len(lanes) == m.lanes else lanes
            block = self.blocks[pc]
            self.execute(block.steps, i, lanes)
            c = block.control
            m.pc = c.pc
            if c.kind == "next":
                pc = c.pc + 1
            elif c.kind == "branch" and (c.guard < 0 or self.uniform(c, i)):
                pc = c.target if c.guard < 0 or self.taken else c.pc + 1
            elif self.pass_together(c, i):
                pc = c.pc + 1
            else:
                self.control(c, i, lanes)
                return
            if pc in self.ready or (self.ready and pc > min(self.ready)):
                self.send(pc, lanes)
                return
            if m.executed > m.checks.budget or self.turn >= _PATIENCE_SPINNING:
                self.send(pc, lanes)
                self.check_budget(lanes)
                return
            self.turn += 1

    def execute(self, steps: Any, i: Any, lanes: Any) -> None:
        m = self.m
        registers = m.registers
        for step in steps:
            m.pc = step.pc
            if step.guard < 0:
                step.run(m, i)
                continue
            p = registers[step.guard]
            if i is not None and p.ndim:
                p = p[i]
            if step.negated:
                p = ~p
            n = np.count_nonzero(p)  # several times as fast as `any` and `all` of few threads
            if n == p.size:
                step.run(m, i)
            elif n:
                step.run(m, lanes[p])
        m.executed += len(steps) + 1
        m.lane_instructions += (len(steps) + 1) * len(lanes)

    def uniform(self, c: Control, i: Any) -> bool:
        """Return whether a branch goes one way for the whole group; `taken` says which."""
        p = self.guarded(c, i)
        n = np.count_nonzero(p)
        self.taken = n == p.size
        return self.taken or not n

    def guarded(self, c: Control, i: Any) -> Any:
        p = self.m.registers[c.guard]
        if i is not None and p.ndim:
            p = p[i]
        return ~p if c.negated else p

    def alone(self, c: Control, i: Any) -> bool:
        """Run a warp-wide instruction of all threads at once, if it is one."""
        m = self.m
        size = 32 if c.kind != "group" else WARPGROUP
        if i is not None or c.guard >= 0 or c.pc in self.at_warp or m.threads_per_block % size:
            return False
        assert c.collective is not None
        if c.kind == "active":
            c.collective(m, i, _ALL)
            return True
        if c.mask is not None:
            mask = c.mask(m, i)
            if mask.ndim or mask != _ALL:
                return False
        m.touch()
        c.collective(m, i, _ALL)
        m.clocks.lane[...] = m.stamp
        return True

    def pass_together(self, c: Control, i: Any) -> bool:
        """Execute what threads wait for each other at, if all threads are here already."""
        if c.barrier is not None:
            return i is None and c.guard < 0 and self.barriers.pass_together(c.barrier)
        return c.kind in ("warp", "active", "group") and self.alone(c, i)

    def check_budget(self, lanes: Any) -> None:
        m = self.m
        if m.executed <= m.checks.budget:
            return
        notes = [
            f"{len(g)} threads at {m.where(pc)[0]}: {m.where(pc)[1]}"
            for pc, gs in self.ready.items()
            for g in gs
        ]
        raise m.error(
            "budget",
            f"more than {m.checks.budget} instructions: an endless loop?",
            int(lanes[0]),
            notes=notes,
        )

    # Divergence and barriers of a group --------------------------------------------------------

    def control(self, c: Control, i: Any, lanes: Any) -> None:
        m = self.m
        if c.kind == "branch":
            p = np.broadcast_to(self.guarded(c, i), lanes.shape)
            self.send(c.target, lanes[p])
            self.send(c.pc + 1, lanes[~p])
            return
        if c.guard >= 0:
            p = np.broadcast_to(self.guarded(c, i), lanes.shape)
            if not p.all():
                self.send(c.pc + 1, lanes[~p])
                lanes = lanes[p]
            if not len(lanes):
                return
            i = lanes
        if c.kind == "exit":
            m.alive[lanes] = False
            if m.blocks_per_cluster > 1:
                m.clusters.leave(lanes)
        elif c.kind == "table":
            assert c.index is not None
            index = full(m, lanes, c.index(m, lanes))
            for k in np.unique(index):
                self.send(c.targets[int(k)], lanes[index == k])
        elif c.kind == "grid":
            self.at_grid.append((c.pc, lanes))
        elif c.kind == "active":
            assert c.collective is not None
            c.collective(m, lanes, _ALL)
            self.send(c.pc + 1, lanes)
        elif c.kind == "warp":
            self.meet(c, lanes)
        elif c.kind == "group":
            self.meet_group(c, lanes)
        elif c.kind == "cluster":
            assert c.cluster is not None
            go = m.clusters.come(c.cluster, c.pc, lanes)
            if len(go):
                self.send(c.pc + 1, go)
        elif c.kind == "mbarrier":
            go = self.parked.try_wait(c, lanes)
            if len(go):
                self.send(c.pc + 1, go)
        elif c.barrier is not None and self.barriers.come(c.barrier, c.pc, lanes):
            self.send(c.pc + 1, lanes)
        self.check_budget(m.all_lanes[:1])

    def meet(self, c: Control, lanes: Any) -> None:
        """Let the warps go whose lanes are all here; the others wait."""
        m = self.m
        if c.pc in self.at_warp:
            lanes = np.sort(np.concatenate([self.at_warp.pop(c.pc), lanes]))
        if self.whole_warps(c, lanes):
            self.cross(c, lanes, _ALL)
            return
        masks = self.masks(c, lanes)
        go = np.zeros(len(lanes), np.bool_)
        warp = m.warp_id[lanes]
        alive = warp_bits(m, np.flatnonzero(m.alive), True)
        for mask in np.unique(masks):
            same = np.flatnonzero(masks == mask)
            here = warp_bits(m, lanes[same], True)[warp[same]]
            wanted = mask & (alive[warp[same]] if c.mask is None or not m.checks.masks else _ALL)
            go[same] = (here & wanted) == wanted
        m.pc = c.pc
        if m.checks.masks:
            self.check_masks(c, lanes, masks, alive)
        if go.any():
            self.cross(c, lanes[go], masks[go])
        if not go.all():
            self.at_warp[c.pc] = lanes[~go]

    def whole_warps(self, c: Control, lanes: Any) -> bool:
        """Return whether these are all threads of some warps, and the mask names them all."""
        m = self.m
        if len(lanes) % 32 or m.threads_per_block % 32:
            return False
        first = lanes[::32]
        # they are in order
        if np.count_nonzero(first & 31) or np.count_nonzero(lanes[31::32] - first != 31):
            return False
        if c.mask is None:
            return True
        mask = c.mask(m, lanes)
        return bool(mask == _ALL if not mask.ndim else (mask == _ALL).all())

    def meet_group(self, c: Control, lanes: Any) -> None:
        """Let the warpgroups go whose 128 threads are all here; the others wait."""
        m = self.m
        if c.pc in self.at_warp:
            lanes = np.sort(np.concatenate([self.at_warp.pop(c.pc), lanes]))
        group = m.group_of[lanes]
        whole = np.bincount(group, minlength=m.n_groups) == WARPGROUP
        alive = np.bincount(m.group_of[m.alive], minlength=m.n_groups)
        short = ~whole[group] & (alive[group] < WARPGROUP)
        m.pc = c.pc
        if short.any():
            lane = int(lanes[np.flatnonzero(short)[0]])
            raise m.error(
                "masks",
                "a warpgroup has 128 threads (4 warps from a multiple of 4 on); of this one "
                f"{int(alive[m.group_of[lane]])} are there",
                lane,
            )
        go = whole[group]
        if go.any():
            self.cross(c, lanes[go], _ALL)
        if not go.all():
            self.at_warp[c.pc] = lanes[~go]

    def wake(self) -> bool:
        """Resume the threads that wait for an mbarrier, once no others can run."""
        for pc, lanes in self.parked.wake():
            self.send(pc + 1, lanes)
        return bool(self.ready)

    def masks(self, c: Control, lanes: Any) -> Any:
        """Return the member mask of each lane; lanes the block does not have are left out."""
        m = self.m
        size = m.threads_per_block - (m.thread_of[lanes] - m.lane[lanes])
        real = np.where(
            size >= 32,
            _ALL,
            (np.uint32(1) << np.minimum(size, 31).astype(np.uint32)) - np.uint32(1),
        )
        given = full(m, lanes, c.mask(m, lanes)) if c.mask is not None else _ALL
        return (given & real).astype(np.uint32)

    def cross(self, c: Control, lanes: Any, masks: Any) -> None:
        m = self.m
        assert c.collective is not None
        m.pc = c.pc
        m.touch()
        i = None if len(lanes) == m.lanes else lanes
        c.collective(m, i, masks)
        m.clocks.lane[lanes] = m.stamp
        m.executed += 1
        self.send(c.pc + 1, lanes)

    def check_masks(self, c: Control, lanes: Any, masks: Any, alive: Any) -> None:
        m = self.m
        own = (masks >> m.lane[lanes].astype(np.uint32)) & np.uint32(1) == 0
        gone = masks & ~alive[m.warp_id[lanes]]
        if c.mask is None:
            gone = np.zeros(len(lanes), np.uint32)
        for bad, why in (
            (own, "executed by a lane its member mask {mask:#010x} does not name"),
            (
                gone != 0,
                "its member mask {mask:#010x} names lanes that have left the kernel: {gone:#010x}",
            ),
        ):
            if bad.any():
                j = int(np.flatnonzero(bad)[0])
                raise m.error(
                    "masks", why.format(mask=int(masks[j]), gone=int(gone[j])), int(lanes[j])
                )

    def force_warps(self) -> None:
        """Continue with the lanes that arrived; used with the check of masks off."""
        pc = min(self.at_warp)
        c = self.waits[pc]
        if c.kind == "group":
            self.deadlock()
        lanes = self.at_warp.pop(pc)
        self.cross(c, lanes, self.masks(c, lanes))

    def release(self) -> bool:
        """Resume the threads whose barrier is complete."""
        released = self.release_grid()
        for pc, lanes in self.m.clusters.release():
            self.send(pc + 1, lanes)
            released = True
        for pc, lanes in self.barriers.release(others_run=bool(self.ready)):
            self.send(pc + 1, lanes)
            released = True
        return released

    def release_grid(self) -> bool:
        """Let all blocks go once every thread alive is at the grid's barrier."""
        m = self.m
        if not self.at_grid or sum(len(g) for _, g in self.at_grid) < int(m.alive.sum()):
            return False
        m.met(grid=True)
        m.clocks.grid.met = m.stamp
        for pc, lanes in self.at_grid:
            grid_barrier_done(m, m.kernel.code[pc], lanes)
            self.send(pc + 1, lanes)
        self.at_grid = []
        return True

    # Deadlock ----------------------------------------------------------------------------------

    def describe_waiting(self, block: int) -> list[str]:
        """Return one line per group of threads of a block: how many, and where."""
        m = self.m
        mine = m.block_of == block
        lines = []
        others = [*self.at_grid, *m.clusters.waiting, *self.parked.places()]
        for pc, lanes in [*self.barriers.places(), *self.at_warp.items(), *others]:
            chosen = np.zeros(m.lanes, np.bool_)
            chosen[lanes] = True
            chosen &= mine
            if chosen.any():
                place, text = m.where(int(pc))
                first = m.thread_name(int(np.flatnonzero(chosen)[0]))[1]
                lines.append(
                    f"{int(chosen.sum())} threads (the first: {first}) wait at {place}: {text}"
                )
        lines += self.parked.describe(block)
        gone = int((mine & ~m.alive).sum())
        if gone:
            first = m.thread_name(int(np.flatnonzero(mine & ~m.alive)[0]))[1]
            lines.append(f"{gone} threads (the first: {first}) have left the kernel")
        return lines

    def deadlock(self) -> None:
        m = self.m
        lane = int(np.flatnonzero(m.alive)[0])
        at_warp = [pc for pc, lanes in self.at_warp.items() if lane in lanes]
        others = [*self.at_grid, *m.clusters.waiting, *self.parked.places()]
        elsewhere = [pc for pc, lanes in others if lane in lanes]
        m.pc = next(iter(at_warp + elsewhere), int(max(self.barriers.pc[lane], 0)))
        if at_warp:
            raise m.error(
                "masks",
                self.why_stuck(m.pc, lane),
                lane,
                notes=self.describe_waiting(int(m.block_of[lane])),
            )
        why = "deadlock: threads wait for each other at different places"
        raise m.error("barrier", why, lane, notes=self.describe_waiting(int(m.block_of[lane])))

    def why_stuck(self, pc: int, lane: int) -> str:
        """Say which lanes a warp-wide instruction waits for."""
        m = self.m
        c = self.waits[pc]
        if c.kind == "group":
            return "deadlock: not all 128 threads of the warpgroup come to this instruction"
        lanes = self.at_warp[pc]
        mask = int(self.masks(c, lanes)[int(np.flatnonzero(lanes == lane)[0])])
        here = int(warp_bits(m, lanes, True)[m.warp_id[lane]])
        gone = mask & ~int(warp_bits(m, np.flatnonzero(m.alive), True)[m.warp_id[lane]])
        if gone:
            return (
                f"its member mask {mask:#010x} names lanes that have left the kernel: {gone:#010x}"
            )
        return f"deadlock: lanes {mask & ~here:#010x} of its member mask {mask:#010x} never come"
