"""One entry point and the device functions it calls, as one flat list of instructions.

Calls are inlined: a callee's registers, labels and variables get unique names, its
parameters become the caller's argument variables, and its ``ret`` a branch behind the call.  So
the executor needs no call stack; recursion is refused.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import numpy as np

from nbflow_ptx.errors import LaunchError, UnsupportedInstruction, unknown
from nbflow_ptx.parsing.syntax import (
    Addr,
    Function,
    Instruction,
    Module,
    Not,
    Operand,
    Pair,
    Reg,
    Sym,
    Variable,
    Vec,
)
from nbflow_ptx.parsing.types import STORAGE, Type

#: Functions the hardware's driver provides; the emulator has its own (`instructions.calls`).
BUILTINS = (
    "vprintf",
    "__assertfail",
    "cudaCGGetIntrinsicHandle",
    "cudaCGSynchronize",
)
_MAX_INSTRUCTIONS = 1 << 20


@dataclass
class Linked:
    """A kernel ready to be bound to the executor.

    ``frame`` maps the thread's own variables (local arrays, arguments of calls) to their byte
    offset, ``frame_bytes`` is their sum; ``shared`` lists the static and dynamic shared arrays.
    """

    name: str
    params: list[Variable]
    max_threads: int | None
    cluster: tuple[int, ...] = (1,)
    target: str = ""
    code: list[Instruction] = field(default_factory=list)
    registers: dict[str, Type] = field(default_factory=dict)
    frame: dict[str, int] = field(default_factory=dict)
    frame_sizes: dict[str, int] = field(default_factory=dict)
    frame_bytes: int = 0
    shared: list[Variable] = field(default_factory=list)
    param_offsets: dict[str, int] = field(default_factory=dict)
    param_bytes: int = 0
    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @functools.cached_property
    def unwritten(self) -> list[Any]:
        """Contents of each register before its first write: a value that stands out."""
        return [_poison(kind) for kind in self.registers.values()]


def _poison(kind: Type) -> Any:
    if not kind.nbytes:
        return np.bool_(False)
    n = min(kind.nbytes, 8)
    return STORAGE[n](0xCDCDCDCDCDCDCDCD & ((1 << 8 * n) - 1))


def link(module: Module, entry: str) -> Linked:
    """Flatten the kernel `entry`, given by its name or a part of it that only one has."""
    return _Linker(module, find_entry(module, entry)).run()


def find_entry(module: Module, name: str) -> Function:
    """Return the entry point called `name`, or the only one whose (mangled) name holds it."""
    entries = module.entries
    matches = [name] if name in entries else [e for e in entries if name in e]
    if len(matches) != 1:
        if not matches:
            raise LaunchError(unknown("kernel", name, entries))
        raise LaunchError(f"kernel {name!r} is not one name: {', '.join(matches)}")
    return module.functions[matches[0]]


class _Linker:
    def __init__(self, module: Module, entry: Function) -> None:
        self.module, self.entry = module, entry
        self.out = Linked(entry.name, list(entry.params), entry.max_threads)
        self.out.cluster, self.out.target = entry.cluster, module.target
        self.labels: dict[str, int] = {}
        self.pending: list[tuple[Instruction, str]] = []
        self.tables: dict[str, tuple[str, ...]] = {}
        self.n_inlined = 0
        self.stack: list[str] = []

    def run(self) -> Linked:
        out = self.out
        for p in self.entry.params:
            at = -(-out.param_bytes // p.align) * p.align
            out.param_offsets[p.name] = at
            out.param_bytes = at + p.size
        out.shared = [v for v in self.module.variables.values() if v.space == "shared"]
        self.copy(self.entry, "", {}, "")
        if out.shared:
            used = {name for ins in out.code for a in ins.args for name in _names(a)}
            out.shared = [v for v in out.shared if v.name in used]
        for ins, label in self.pending:
            ins.target = self.labels[label]
        for name, names in self.tables.items():
            out.tables[name] = tuple(self.labels[n] for n in names)
        return out

    def copy(self, f: Function, prefix: str, alias: dict[str, str], done: str) -> None:
        """Append the code of `f`; `done` is the label its ``ret`` goes to ('' in the entry)."""
        if f.name in self.stack:
            raise UnsupportedInstruction(f"recursive device function {f.name} in {self.entry.name}")
        self.stack.append(f.name)
        names = dict(alias)
        for v in f.variables:
            names[v.name] = prefix + v.name
            if v.space == "shared":  # one per thread block, however often the function is inlined
                names[v.name] = f"{f.name}:{v.name}"
                if all(s.name != names[v.name] for s in self.out.shared):
                    self.out.shared.append(replace(v, name=names[v.name]))
            elif v.space in ("local", "param"):
                self.place(names[v.name], v)
            else:
                names[v.name] = v.name
                self.module.variables.setdefault(v.name, v)
        for r, kind in f.registers.items():
            self.out.registers[prefix + r] = kind
        at: dict[int, list[str]] = {}
        for label, k in f.labels.items():
            at.setdefault(k, []).append(prefix + label)
        for table, targets in f.tables.items():
            self.tables[prefix + table] = tuple(prefix + t for t in targets)
        for k, ins in enumerate(f.code):
            for label in at.get(k, ()):
                self.labels[label] = len(self.out.code)
            self.append(f, ins, prefix, names, done)
        for label in at.get(len(f.code), ()):
            self.labels[label] = len(self.out.code)
        self.stack.pop()

    def append(
        self, f: Function, ins: Instruction, prefix: str, names: dict[str, str], done: str
    ) -> None:
        if len(self.out.code) > _MAX_INSTRUCTIONS:
            raise UnsupportedInstruction(f"more than {_MAX_INSTRUCTIONS} instructions once inlined")
        guard = ins.guard
        if guard and prefix:
            guard = Reg(prefix + guard[0].name), guard[1]
        if ins.opcode == "bra":
            assert isinstance(ins.args[0], Sym)
            self.branch(replace(ins, guard=guard), prefix + ins.args[0].name)
            return
        if ins.opcode == "ret" and done:
            self.branch(replace(ins, op=("bra", "uni"), args=(Sym(done),), guard=guard), done)
            return
        args = tuple([_rename(a, prefix, names) for a in ins.args])
        if ins.opcode == "brx":
            args = (args[0], Sym(prefix + getattr(ins.args[1], "name", "")))
        if ins.opcode == "call" and (callee := self.callee(ins)) is not None:
            self.inline(callee, replace(ins, args=args, guard=guard))
            return
        same = not prefix and all(map(is_, args, ins.args))
        self.out.code.append(ins if same else replace(ins, args=args, guard=guard))

    def branch(self, ins: Instruction, label: str) -> None:
        """Append a branch to a label that may come later."""
        self.pending.append((ins, label))
        self.out.code.append(ins)

    def callee(self, ins: Instruction) -> Function | None:
        """Return the function a call enters; None for a built-in."""
        target = next((a for a in ins.args if isinstance(a, (Sym, Reg))), None)
        if isinstance(target, Sym) and target.name in self.module.functions:
            return self.module.functions[target.name]
        if isinstance(target, Sym) and target.name in BUILTINS:
            return None
        what = (
            "an indirect call"
            if isinstance(target, Reg)
            else f"call of {getattr(target, 'name', '?')}, whose code is not in this module"
        )
        raise UnsupportedInstruction(f"PTX line {ins.line}: {what}: {ins.text}")

    def inline(self, f: Function, ins: Instruction) -> None:
        lists = [a.items for a in ins.args if isinstance(a, Vec)]
        returns = lists[0] if f.returns else ()
        actual = lists[-1] if f.params else ()
        if len(returns) != len(f.returns) or len(actual) != len(f.params):
            raise UnsupportedInstruction(
                f"PTX line {ins.line}: arguments do not match {f.name}: {ins.text}"
            )
        self.n_inlined += 1
        prefix = f"{f.name}#{self.n_inlined}:"
        alias: dict[str, str] = {}
        for formal, a in zip([*f.returns, *f.params], [*returns, *actual], strict=True):
            if isinstance(a, Sym):
                alias[formal.name] = a.name
            else:  # a register passed directly
                raise UnsupportedInstruction(
                    f"PTX line {ins.line}: an argument that is not a .param: {ins.text}"
                )
        done = prefix + "done"
        if ins.guard is not None:  # a guarded call: branch around the inlined body
            guard = ins.guard[0], not ins.guard[1]
            self.branch(replace(ins, op=("bra",), args=(Sym(done),), guard=guard), done)
        self.copy(f, prefix, alias, done)
        self.labels[done] = len(self.out.code)

    def place(self, name: str, v: Variable) -> None:
        """Give a thread's own variable its place in the frame."""
        out = self.out
        out.frame_bytes = -(-out.frame_bytes // v.align) * v.align
        out.frame[name] = out.frame_bytes
        out.frame_sizes[name] = v.size
        out.frame_bytes += v.size


def _names(a: Operand) -> set[str]:
    """Return the variables an operand names."""
    if isinstance(a, Vec):
        return set().union(*(_names(x) for x in a.items))
    base = a.base if isinstance(a, Addr) else a
    return {base.name} if isinstance(base, Sym) else set()


def _rename(a: Operand, prefix: str, names: dict[str, str]) -> Operand:
    """Give an operand's registers and variables this copy's names; return it if none changes."""
    if isinstance(a, Reg):
        return Reg(prefix + a.name) if prefix else a
    if isinstance(a, Sym):
        name = names.get(a.name, a.name)
        return a if name == a.name else Sym(name, a.offset)
    if isinstance(a, Not):
        return Not(Reg(prefix + a.reg.name)) if prefix else a
    if isinstance(a, Addr):
        base = _rename(a.base, prefix, names)
        assert not isinstance(base, (Vec, Pair, Not))
        return a if base is a.base else Addr(base, a.offset)  # type: ignore[arg-type]
    if isinstance(a, Vec):
        items = tuple([_rename(x, prefix, names) for x in a.items])
        return a if all(map(is_, items, a.items)) else Vec(items)
    if isinstance(a, Pair):
        if not prefix:
            return a
        return Pair(_rename(a.first, prefix, names), _rename(a.second, prefix, names))
    return a
