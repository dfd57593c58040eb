"""Operands as functions: where an instruction reads, where it writes.

Registers are stored as unsigned integers (predicates as Booleans), one array over all threads, or
one scalar while every thread holds the same value: parameters, loop counters and block sizes stay
scalars, and cost next to nothing.  ``i`` is None when all threads execute the instruction, else
the array of those that do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_ptx.errors import ParseError, UnsupportedInstruction
from nbflow_ptx.instructions.wgmma_registers import RegisterPlan
from nbflow_ptx.machine.machine import Machine, filled
from nbflow_ptx.parsing.linker import Linked
from nbflow_ptx.parsing.syntax import (
    Addr,
    Imm,
    Instruction,
    Not,
    Operand,
    Pair,
    Reg,
    Skip,
    Special,
    Sym,
    Vec,
)
from nbflow_ptx.parsing.types import SIGNED, STORAGE, TYPES, Type

Read = Callable[["Machine", Any], Any]
Write = Callable[["Machine", Any, Any], None]
Run = Callable[["Machine", Any], None]


class Binder:
    """Turns the operands of one kernel into functions of (machine, threads)."""

    def __init__(self, kernel: Linked) -> None:
        self.kernel = kernel
        self.slots = {name: k for k, name in enumerate(kernel.registers)}
        self.kinds = list(kernel.registers.values())
        self.plan = RegisterPlan(kernel)

    # Operands of an instruction ---------------------------------------------------------------

    def unsupported(self, ins: Instruction, why: str = "") -> UnsupportedInstruction:
        """Return the error for an instruction the emulator does not execute."""
        tail = f" ({why})" if why else ""
        return UnsupportedInstruction(
            f"PTX line {ins.line}: unsupported instruction {'.'.join(ins.op)}{tail}: {ins.text}"
        )

    def type_of(self, ins: Instruction) -> Type:
        """Return the last type of the opcode."""
        if not ins.types:
            raise self.unsupported(ins, "it names no type")
        return ins.types[-1]

    def rounding(self, ins: Instruction) -> str:
        """Return the float rounding mode (``rn`` if none is named)."""
        return ins.one_of("rn", "rz", "rm", "rp", "rna") or "rn"

    # Reading ----------------------------------------------------------------------------------

    def read(self, a: Operand, kind: Type) -> Read:
        """Return a function that reads an operand as `kind`."""
        if isinstance(a, Reg):
            return self._read_register(a, kind)
        if isinstance(a, Imm):
            value = constant(a, kind)
            return lambda m, i: value
        if isinstance(a, Not):
            inner = self.read(a.reg, TYPES["pred"])
            return lambda m, i: ~inner(m, i)
        if isinstance(a, Special):
            return self._read_special(a.name, kind)
        if isinstance(a, Sym):
            dtype = np.dtype(kind.dtype)
            name, offset = a.name, a.offset
            store = STORAGE[dtype.itemsize]
            mask = (1 << 8 * dtype.itemsize) - 1
            return lambda m, i: store((m.layout.addresses[name] + offset) & mask).view(kind.dtype)
        raise ParseError(f"not a value: {a}")

    def _read_register(self, a: Reg, kind: Type) -> Read:
        slot = self.slots[a.name]
        width = self.kinds[slot].nbytes
        dtype = kind.dtype
        if width == kind.nbytes:
            if STORAGE.get(width) is dtype:

                def plain(m: Machine, i: Any) -> Any:
                    v = m.registers[slot]
                    return v if i is None or not v.ndim else v[i]

                return plain

            def same(m: Machine, i: Any) -> Any:
                v = m.registers[slot]
                return (v if i is None or not v.ndim else v[i]).view(dtype)

            return same
        store = STORAGE[kind.nbytes]
        if width == 0:
            raise ParseError(f"predicate {a.name} read as .{kind.name}")

        def cut(m: Machine, i: Any) -> Any:
            v = m.registers[slot]
            return (v if i is None or not v.ndim else v[i]).astype(store).view(dtype)

        return cut

    def _read_special(self, name: str, kind: Type) -> Read:
        store = STORAGE[kind.nbytes]
        dtype = kind.dtype

        def read(m: Machine, i: Any) -> Any:
            v = m.special(name)
            return (v if i is None or not v.ndim else v[i]).astype(store).view(dtype)

        return read

    def reads(self, args: tuple[Operand, ...], kind: Type) -> list[Read]:
        """Return one reader per operand."""
        return [self.read(a, kind) for a in args]

    # Writing ----------------------------------------------------------------------------------

    def write(self, a: Operand) -> Write:
        """Return a function that writes a register; narrower values are extended."""
        if isinstance(a, Skip):
            return lambda m, i, v: None
        if not isinstance(a, Reg):
            raise ParseError(f"not a destination: {a}")
        slot = self.slots[a.name]
        width = self.kinds[slot].nbytes
        store = STORAGE[width]
        signed = SIGNED.get(width)

        def write(m: Machine, i: Any, v: Any) -> None:
            if v.dtype != store:
                if width and v.dtype.itemsize != width:
                    v = v.astype(signed if v.dtype.kind == "i" else store)
                v = v.view(store)
            if i is None:
                m.registers[slot] = v
                return
            r = m.registers[slot]
            if not r.ndim:
                r = m.registers[slot] = filled(m.lanes, r)
            r[i] = v

        return write

    def writes(self, a: Operand) -> list[Write]:
        """Return the writers of ``{a, b, ...}`` or of a single register."""
        return [self.write(x) for x in (a.items if isinstance(a, Vec) else (a,))]

    def pair(self, a: Operand) -> tuple[Write, Write | None]:
        """Return the writers of ``a|b``; the second is None for a plain ``a``."""
        if isinstance(a, Pair):
            return self.write(a.first), self.write(a.second)
        return self.write(a), None

    def width(self, a: Operand) -> int:
        """Return the bytes of a register operand (0 otherwise)."""
        return self.kinds[self.slots[a.name]].nbytes if isinstance(a, Reg) else 0

    # Addresses --------------------------------------------------------------------------------

    def address(self, a: Operand) -> Read:
        """Return a function that computes ``[base + offset]`` as int64."""
        if not isinstance(a, Addr):
            raise ParseError(f"not an address: {a}")
        base, offset = a.base, np.int64(a.offset)
        if isinstance(base, Reg):
            wide = self.width(base) == 8
            value = self.read(base, TYPES["s64"] if wide else TYPES["u32"])
            if wide and not a.offset:
                return value
            if wide:
                return lambda m, i: value(m, i) + offset
            return lambda m, i: value(m, i).astype(np.int64) + offset
        if isinstance(base, Imm):
            at = np.int64(base.value + a.offset)
            return lambda m, i: at
        name, extra = base.name, base.offset + a.offset
        return lambda m, i: np.int64(m.layout.addresses[name] + extra)

    # Whole instructions -----------------------------------------------------------------------

    def apply(self, ins: Instruction, f: Callable[..., Any], *kinds: Type) -> Run:
        """Bind ``d = f(a, b, ...)`` with one type per source operand."""
        d = self.write(ins.args[0])
        if len(ins.args) != len(kinds) + 1:
            raise self.unsupported(ins, f"{len(kinds) + 1} operands expected")
        g = [self.read(a, k) for a, k in zip(ins.args[1:], kinds, strict=True)]
        if len(g) == 1:
            a = g[0]
            return lambda m, i: d(m, i, f(a(m, i)))
        if len(g) == 2:
            a, b = g
            return lambda m, i: d(m, i, f(a(m, i), b(m, i)))
        return lambda m, i: d(m, i, f(*[x(m, i) for x in g]))


def constant(a: Imm, kind: Type) -> Any:
    """Return a literal as a NumPy scalar of `kind`."""
    if kind.kind == "p":
        return np.bool_(a.value != 0)
    if a.float_bytes:
        bits, floats = (np.uint32, np.float32) if a.float_bytes == 4 else (np.uint64, np.float64)
        if kind.nbytes == a.float_bytes:
            return bits(a.value).view(kind.dtype)
        value = bits(a.value).view(floats)
        if kind.kind == "f":
            return value.astype(kind.dtype)
        raise ParseError(f"a float literal where .{kind.name} is wanted")
    store = STORAGE[min(kind.nbytes, 8)]
    return store(a.value & ((1 << 8 * kind.nbytes) - 1)).view(kind.dtype)


def full(m: Machine, i: Any, v: Any) -> Any:
    """Return a value as one entry per executing thread."""
    return v if v.ndim else filled(m.lanes if i is None else len(i), v)


def threads(m: Machine, i: Any) -> Any:
    """Return the indices of the executing threads."""
    return m.all_lanes if i is None else i
