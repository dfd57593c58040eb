"""Registers that ``wgmma`` uses in a kernel, and the checks of instructions that access them.

A register that is *in flight* may only be used by further ``wgmma``.  Moves between registers are
the compiler's: they carry the state of what they copy along instead of counting as a use, and a
moved constant counts as in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.parsing.linker import Linked
from nbflow_ptx.parsing.syntax import Addr, Imm, Instruction, Operand, Pair, Reg, Vec

#: Instructions whose first operand is not a destination.
_NO_RESULT = ("st", "red", "bar", "barrier", "cp", "prefetch", "stmatrix", "mbarrier", "bra", "brx")


class RegisterPlan:
    """The registers of a kernel that ``wgmma`` uses, with what is moved from and to them.

    ``rows`` numbers them.
    """

    def __init__(self, kernel: Linked) -> None:
        found = {
            name
            for ins in kernel.code
            if is_mma(ins)
            for a in ins.args[:2]
            for name in _registers(a)
            if kernel.registers[name].nbytes == 4
        }
        moves = [
            (ins.args[0].name, ins.args[1].name)
            for ins in kernel.code
            if found and ins.opcode == "mov"
            and isinstance(ins.args[0], Reg) and isinstance(ins.args[1], Reg)
        ]  # fmt: skip
        size = -1
        while size != len(found):
            size = len(found)
            for a, b in moves:
                if a in found or b in found:
                    found |= {a, b}
        self.rows = {name: k for k, name in enumerate(sorted(found))}

    def rows_of(self, *operands: Operand) -> list[int]:
        """Return the numbers of the registers among some operands."""
        names = dict.fromkeys(name for a in operands for name in _registers(a))
        return [self.rows[name] for name in names if name in self.rows]

    def watch(self, ins: Instruction, run: Any) -> Any:
        """Return `run` (of a thread's or a warp's instruction) with the checks of its registers."""
        touch = self._touch(ins) if self.rows else None
        if touch is None:
            return run

        def watched(m: Machine, i: Any, *masks: Any) -> None:
            touch.before(m, i)
            run(m, i, *masks)
            touch.after(m, i)

        return watched

    def _touch(self, ins: Instruction) -> _Use | _Copy | None:
        results = 0 if ins.opcode in _NO_RESULT else 1
        written = self.rows_of(*ins.args[:results])
        read = self.rows_of(*ins.args[results:])
        if not written and not read:
            return None
        if ins.opcode == "mov" and isinstance(ins.args[0], Reg):
            if isinstance(ins.args[1], Reg):
                return _Copy(written[0], read[0])
            if isinstance(ins.args[1], Imm):
                return _Use(written, written, changes=False)
        return _Use(sorted({*written, *read}), written)


class _Use:
    """An instruction that touches some registers and writes some."""

    def __init__(self, touched: list[int], written: list[int], *, changes: bool = True) -> None:
        self.touched = np.array(touched, np.int64)
        self.written = np.array(written, np.int64)
        self.changes = changes

    def before(self, m: Machine, i: Any) -> None:
        if m.warpgroups.busy:
            m.warpgroups.check_idle(i, self.touched)

    def after(self, m: Machine, i: Any) -> None:
        if i is None:
            m.warpgroups.changed[self.written] = self.changes
        else:
            m.warpgroups.changed[self.written[:, None], m.warp_id[i]] = self.changes


class _Copy:
    """A move: the copy is what the original was."""

    def __init__(self, to: int, source: int) -> None:
        self.to, self.source = to, source
        self.both = np.array([to]), np.array([source])

    def before(self, m: Machine, i: Any) -> None:
        groups = m.warpgroups
        if groups.busy and not groups.in_flight(i, self.both[1]).any():
            groups.check_idle(i, self.both[0])

    def after(self, m: Machine, i: Any) -> None:
        groups, to, source = m.warpgroups, self.to, self.source
        w, g = (slice(None), slice(None)) if i is None else (m.warp_id[i], m.group_of[i])
        groups.changed[to, w] = groups.changed[source, w]
        groups.until[to, g] = groups.until[source, g]
        groups.result[to, g] = groups.result[source, g]


def is_mma(ins: Instruction) -> bool:
    """Return whether an instruction is a product of matrices of a warpgroup."""
    return ins.opcode == "wgmma" and ins.has("mma_async")


def _registers(a: Operand) -> list[str]:
    if isinstance(a, Reg):
        return [a.name]
    if isinstance(a, Vec):
        return [name for x in a.items for name in _registers(x)]
    if isinstance(a, Pair):
        return _registers(a.first) + _registers(a.second)
    return _registers(a.base) if isinstance(a, Addr) else []
