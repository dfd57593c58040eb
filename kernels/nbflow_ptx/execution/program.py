"""A kernel as blocks of bound instructions: what the machine runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbflow_ptx.errors import UnsupportedInstruction, unknown
from nbflow_ptx.instructions.binder import Binder, Read, Run, Write
from nbflow_ptx.instructions.mbarrier import Wait, wait
from nbflow_ptx.instructions.opcodes import CONTROL, PLAIN, WARP, WARPGROUP
from nbflow_ptx.instructions.warp_collectives import Collective, member_mask, synchronise, warp_bits
from nbflow_ptx.instructions.wgmma_registers import RegisterPlan
from nbflow_ptx.machine.clusters import ClusterBarrier
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.parsing.linker import Linked
from nbflow_ptx.parsing.syntax import Instruction, Sym
from nbflow_ptx.parsing.types import TYPES


@dataclass
class Step:
    """One plain instruction: `guard` is the slot of its predicate (-1: none)."""

    run: Run
    pc: int
    guard: int = -1
    negated: bool = False


@dataclass
class Control:
    """Terminator of a basic block.

    ``kind`` is ``next``, ``branch``, ``table``, ``exit``, ``barrier``, ``grid``, ``active``,
    ``warp``, ``group`` (a warpgroup), ``cluster`` or ``mbarrier``.
    """

    kind: str
    pc: int
    guard: int = -1
    negated: bool = False
    target: int = -1
    targets: tuple[int, ...] = ()
    index: Read | None = None  # of a table branch
    collective: Collective | None = None
    mask: Read | None = None  # of a warp-wide instruction; None: all lanes
    barrier: Barrier | None = None
    cluster: ClusterBarrier | None = None
    wait: Wait | None = None  # for an mbarrier


@dataclass
class Barrier:
    """``bar``: `mode` is ``sync``, ``arrive`` or ``red``; `aligned` as PTX says."""

    mode: str
    number: Read
    count: Read | None
    aligned: bool
    reduce: str = ""
    value: Read | None = None
    result: Write | None = None


@dataclass
class Block:
    """Straight-line code from one leader to the next."""

    steps: list[Step]
    control: Control


@dataclass
class Program:
    """A bound kernel.

    ``granules`` are the narrowest accesses to global and shared memory, the resolution at which
    races are looked for.  ``grid_barrier`` says that all blocks must be resident at once.
    """

    kernel: Linked
    slots: dict[str, int]
    registers: RegisterPlan
    blocks: dict[int, Block] = field(default_factory=dict)
    granules: dict[str, int] = field(default_factory=dict)
    grid_barrier: bool = False


def bind(kernel: Linked) -> Program:
    """Bind every instruction of a kernel; unsupported ones are named with their line."""
    b = Binder(kernel)
    program = Program(kernel, b.slots, b.plan)
    program.granules = {"global": _granule(b, "global"), "shared": _granule(b, "shared")}
    leaders = _leaders(kernel)
    code = kernel.code
    pc = 0
    while pc < len(code):
        start, steps = pc, []
        while pc < len(code) and not _is_control(code[pc]):
            steps.append(_step(b, code[pc], pc))
            pc += 1
            if pc in leaders:
                break
        if pc < len(code) and _is_control(code[pc]) and (pc == start or pc not in leaders):
            control = _control(b, code[pc], pc)
            program.grid_barrier |= control.kind == "grid"
            pc += 1
        else:
            control = Control("next", pc - 1)
        program.blocks[start] = Block(steps, control)
    program.blocks[len(code)] = Block([], Control("exit", max(len(code) - 1, 0)))
    return program


def _is_control(ins: Instruction) -> bool:
    known = ins.opcode in WARP or ins.opcode in WARPGROUP or ins.opcode in CONTROL
    return known or _is_grid_barrier(ins) or _is_wait(ins)


def _is_wait(ins: Instruction) -> bool:
    return ins.opcode == "mbarrier" and ins.has("try_wait")


def _is_grid_barrier(ins: Instruction) -> bool:
    return ins.opcode == "call" and any(
        isinstance(a, Sym) and a.name == "cudaCGSynchronize" for a in ins.args
    )


def _is_warp(ins: Instruction) -> bool:
    own = ins.opcode in WARP or ins.opcode in WARPGROUP or _is_wait(ins)
    return own or (ins.opcode in ("bar", "barrier") and ins.has("warp"))


def _leaders(kernel: Linked) -> set[int]:
    """Return where blocks begin: branch targets, warp-wide instructions, after control."""
    found = {0}
    for pc, ins in enumerate(kernel.code):
        if ins.target >= 0:
            found.add(ins.target)
        if _is_control(ins):
            found.add(pc + 1)
        if _is_warp(ins):
            found.add(pc)
    for table in kernel.tables.values():
        found.update(table)
    return found


def _guard(b: Binder, ins: Instruction) -> tuple[int, bool]:
    if ins.guard is None:
        return -1, False
    return b.slots[ins.guard[0].name], ins.guard[1]


def _step(b: Binder, ins: Instruction, pc: int) -> Step:
    if ins.opcode not in PLAIN:
        known = [*PLAIN, *WARP, *WARPGROUP, *CONTROL]
        raise UnsupportedInstruction(
            f"PTX line {ins.line}: {ins.text}: {unknown('instruction', ins.opcode, known)}"
        )
    try:
        run = PLAIN[ins.opcode](b, ins)
    except UnsupportedInstruction:
        raise
    except (IndexError, KeyError, AssertionError, ValueError) as e:
        raise UnsupportedInstruction(f"PTX line {ins.line}: cannot bind {ins.text}: {e!r}") from e
    return Step(b.plan.watch(ins, run), pc, *_guard(b, ins))


def _control(b: Binder, ins: Instruction, pc: int) -> Control:
    guard, negated = _guard(b, ins)
    c = Control("next", pc, guard, negated)
    if ins.opcode == "bra":
        c.kind, c.target = "branch", ins.target
    elif ins.opcode in ("ret", "exit"):
        c.kind = "exit"
    elif ins.opcode == "brx":
        c.kind, c.index = "table", b.read(ins.args[0], TYPES["u32"])
        c.targets = b.kernel.tables[getattr(ins.args[1], "name", "")]
    elif _is_grid_barrier(ins):
        c.kind = "grid"
    elif ins.opcode in WARP:
        c.kind, c.mask = "warp", member_mask(b, ins)
        c.collective = b.plan.watch(ins, WARP[ins.opcode](b, ins))
    elif ins.opcode in WARPGROUP:
        c.kind, c.collective = "group", WARPGROUP[ins.opcode](b, ins)
    elif _is_wait(ins):
        c.kind, c.wait = "mbarrier", wait(b, ins)
    elif ins.has("cluster"):
        c.kind = "cluster"
        c.cluster = ClusterBarrier(ins.has("arrive"), ins.has("relaxed"))
    elif ins.opcode == "activemask":
        return _activemask(b, ins, c)
    elif ins.has("warp"):
        c.kind, c.collective, c.mask = "warp", synchronise(b, ins), member_mask(b, ins)
    else:
        c.kind, c.barrier = "barrier", _barrier(b, ins)
    return c


def _activemask(b: Binder, ins: Instruction, c: Control) -> Control:
    d = b.write(ins.args[0])

    def run(m: Machine, i: Any, masks: Any) -> None:
        t = m.all_lanes if i is None else i
        d(m, i, warp_bits(m, t, True)[m.warp_id[t]])

    c.kind, c.collective = "active", run
    return c


def _barrier(b: Binder, ins: Instruction) -> Barrier:
    u = TYPES["u32"]
    aligned = ins.opcode == "bar" or ins.has("aligned")
    mode = ins.one_of("sync", "arrive", "red")
    if not mode:
        raise b.unsupported(ins)
    args = ins.args
    if mode != "red":
        return Barrier(
            mode, b.read(args[0], u), b.read(args[1], u) if len(args) > 1 else None, aligned
        )
    reduce = ins.one_of("popc", "and", "or")
    count = b.read(args[2], u) if len(args) == 4 else None
    return Barrier(
        mode,
        b.read(args[1], u),
        count,
        aligned,
        reduce,
        b.read(args[-1], TYPES["pred"]),
        b.write(args[0]),
    )


def _granule(b: Binder, space: str) -> int:
    """Return the bytes of the narrowest access a kernel makes to a space."""
    widths = [8]
    spaces = (space, "generic", "cluster" if space == "shared" else space)
    for ins in b.kernel.code:
        if ins.opcode in ("ld", "st", "atom", "red", "ldu") and ins.space in spaces:
            widths.append(max(b.type_of(ins).nbytes, 1))
        if ins.opcode == "cp":
            widths.append(4)
    return min(widths)
