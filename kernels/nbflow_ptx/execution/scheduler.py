"""Warp scheduler: ready and waiting threads, barriers, deadlock reports."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_ptx.execution.mbarrier_waits import Parked
from nbflow_ptx.execution.program import Barrier, Block, Control
from nbflow_ptx.instructions.binder import full
from nbflow_ptx.instructions.builtin_calls import grid_barrier_done
from nbflow_ptx.instructions.warp_collectives import warp_bits
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.machine.warpgroups import WARPGROUP

#: Blocks of code a group may execute while others wait for their turn: when it keeps reading
#: memory with strong accesses (it spins), and when it does not.
_PATIENCE_SPINNING, _PATIENCE = 64, 20_000
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
        kinds = ("barrier", "warp", "group")
        self.waits = {b.control.pc: b.control for b in blocks.values() if b.control.kind in kinds}
        self.ready: dict[int, list[Any]] = {0: [m.all_lanes]}
        self.at_warp: dict[int, Any] = {}  # lanes waiting at a warp-wide instruction
        self.bar_pc = np.full(m.lanes, -1, np.int64)  # the barrier a lane waits at
        self.bar_key = np.zeros(m.lanes, np.int64)  # block * 16 + number
        self.bar_count = np.zeros(m.lanes, np.int64)
        self.bar_value = np.zeros(m.lanes, np.bool_)
        self.arrived: dict[int, tuple[int, set[int]]] = {}  # of bar.arrive: count and warps
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
        return bool(others) or bool((self.bar_pc >= 0).any())

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
            if p.all():
                step.run(m, i)
            elif p.any():
                step.run(m, lanes[p])
        m.executed += len(steps) + 1
        m.lane_instructions += (len(steps) + 1) * len(lanes)

    def uniform(self, c: Control, i: Any) -> bool:
        """Return whether a branch goes one way for the whole group; `taken` says which."""
        p = self.guarded(c, i)
        self.taken = bool(p.all())
        return self.taken or not p.any()

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
        if c.kind == "barrier":
            return self.all_here(c, i)
        return c.kind in ("warp", "active", "group") and self.alone(c, i)

    def all_here(self, c: Control, i: Any) -> bool:
        """Pass a barrier at once that all threads of all blocks have reached together."""
        m, bar = self.m, c.barrier
        assert bar is not None
        if i is not None or c.guard >= 0 or bar.mode != "sync" or self.arrived:
            return False
        number = bar.number(m, i)
        count = bar.count(m, i) if bar.count is not None else np.uint32(0)
        if number.ndim or count.ndim or int(count) not in (0, m.threads_per_block):
            return False
        m.met()
        return True

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
        else:
            self.barrier(c, lanes)
        self.check_budget(m.all_lanes[:1])

    def meet(self, c: Control, lanes: Any) -> None:
        """Let the warps go whose lanes are all here; the others wait."""
        m = self.m
        if c.pc in self.at_warp:
            lanes = np.sort(np.concatenate([self.at_warp.pop(c.pc), lanes]))
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

    # Barriers ----------------------------------------------------------------------------------

    def barrier(self, c: Control, lanes: Any) -> None:
        m, bar = self.m, c.barrier
        assert bar is not None
        number = full(m, lanes, bar.number(m, lanes)).astype(np.int64) & 15
        count = (
            full(m, lanes, bar.count(m, lanes)).astype(np.int64)
            if bar.count
            else np.zeros(len(lanes), np.int64)
        )
        if count.any() and (count % 32).any() and m.checks.barrier:
            raise m.error(
                "barrier",
                f"a thread count of {int(count.max())} is not a multiple of 32",
                int(lanes[0]),
            )
        key = m.block_of[lanes] * 16 + number
        if bar.mode == "arrive":
            m.touch()
            for k in np.unique(key):
                who = lanes[key == k]
                n, warps = self.arrived.get(int(k), (0, set()))
                # an arrival stands for its whole warp, as the hardware counts
                self.arrived[int(k)] = (
                    n + len(who),
                    warps | set((m.warp_id[who] % m.clocks.warps).tolist()),
                )
            self.send(c.pc + 1, lanes)
            return
        self.bar_pc[lanes], self.bar_key[lanes], self.bar_count[lanes] = c.pc, key, count
        if bar.value is not None:
            self.bar_value[lanes] = bar.value(m, lanes)

    def release(self) -> bool:
        """Let those go whose barrier is complete."""
        m = self.m
        waiting = np.flatnonzero(self.bar_pc >= 0)
        released = self.release_grid()
        for pc, lanes in m.clusters.release():
            self.send(pc + 1, lanes)
            released = True
        if not len(waiting):
            return released
        keys = self.bar_key[waiting]
        n_keys = m.n_blocks * 16
        here = np.bincount(keys, minlength=n_keys)
        wanted = np.zeros(n_keys, np.int64)
        np.maximum.at(wanted, keys, self.bar_count[waiting])
        for k, (n, _) in self.arrived.items():
            here[k] += n
        whole = wanted == 0
        left = np.bincount(m.block_of[m.alive], minlength=m.n_blocks).repeat(16)
        done = np.where(whole, here >= m.threads_per_block, here >= wanted) & (here > 0)
        short = whole & (here >= left) & (here > 0) & ~done
        if short.any() and not m.checks.barrier:
            done |= short
        elif short.any() and not done.any() and not self.ready:
            self.left_without(int(np.flatnonzero(short)[0]))
        go = waiting[done[keys]]
        if not len(go):
            return released
        self.open(go)
        return True

    def open(self, lanes: Any) -> None:
        """Send the threads of completed barriers on."""
        m = self.m
        m.pc = int(self.bar_pc[lanes[0]])
        m.touch()
        pcs = self.bar_pc[lanes]
        keys = self.bar_key[lanes]
        if m.checks.barrier and (pcs != pcs[0]).any():
            self.check_aligned(lanes, pcs)
        self.order(lanes, keys)
        for pc in np.unique(pcs):
            c = self.waits[int(pc)]
            some = lanes[pcs == pc]
            assert c.barrier is not None
            if c.barrier.result is not None:
                self.reduce(c.barrier, some, lanes, keys)
            self.send(int(pc) + 1, some)
        self.bar_pc[lanes] = -1

    def order(self, lanes: Any, keys: Any) -> None:
        """Synchronize the vector clocks of the lanes that met."""
        m = self.m
        if len(lanes) == m.lanes:
            m.met()
            return
        for k in np.unique(keys):
            who = lanes[keys == k]
            warps = set((m.warp_id[who] % m.clocks.warps).tolist())
            if int(k) in self.arrived:
                warps |= self.arrived.pop(int(k))[1]
            cluster = int(m.warp_id[who[0]]) // m.clocks.warps
            m.clocks.barrier(cluster, who, np.array(sorted(warps)), m.stamp)

    def reduce(self, bar: Barrier, lanes: Any, all_lanes: Any, keys: Any) -> None:
        m = self.m
        value = self.bar_value[all_lanes]
        n_keys = m.n_blocks * 16
        yes = np.bincount(keys[value], minlength=n_keys)
        total = np.bincount(keys, minlength=n_keys)
        mine = self.bar_key[lanes]
        result: Any = {"popc": yes.astype(np.uint32), "and": yes == total, "or": yes > 0}[
            bar.reduce
        ][mine]
        assert bar.result is not None
        bar.result(m, None if len(lanes) == m.lanes else lanes, result)

    def check_aligned(self, lanes: Any, pcs: Any) -> None:
        """Report lanes of one warp that wait at different barriers: it executes them as one."""
        m = self.m
        low, high = np.full(m.n_warps, 1 << 62), np.full(m.n_warps, -1)
        np.minimum.at(low, m.warp_id[lanes], pcs)
        np.maximum.at(high, m.warp_id[lanes], pcs)
        split = np.flatnonzero((high > low) & (high >= 0))
        if not len(split):
            return
        one = lanes[m.warp_id[lanes] == split[0]]
        m.pc = int(self.bar_pc[one[0]])
        raise m.error(
            "barrier", "lanes of one warp wait at different barriers", int(one[0]),
            notes=self.describe_waiting(int(m.block_of[one[0]])),
        )  # fmt: skip

    def left_without(self, key: int) -> None:
        m = self.m
        lane = int(np.flatnonzero((self.bar_pc >= 0) & (self.bar_key == key))[0])
        m.pc = int(self.bar_pc[lane])
        raise m.error(
            "barrier", "threads of the block left the kernel without reaching this barrier", lane,
            notes=self.describe_waiting(int(m.block_of[lane])),
        )  # fmt: skip

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
        places = [(pc, self.bar_pc == pc) for pc in np.unique(self.bar_pc[self.bar_pc >= 0])]
        others = [*self.at_grid, *self.m.clusters.waiting, *self.parked.places()]
        for pc, lanes in [*self.at_warp.items(), *others]:
            chosen = np.zeros(m.lanes, np.bool_)
            chosen[lanes] = True
            places.append((pc, chosen))
        for pc, waiting in places:
            chosen = waiting & mine
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
        m.pc = next(iter(at_warp + elsewhere), int(max(self.bar_pc[lane], 0)))
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
