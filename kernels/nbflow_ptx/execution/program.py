"""A kernel as blocks of bound instructions: what the machine runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbflow_ptx.errors import UnsupportedInstruction, unknown
from nbflow_ptx.instructions.binder import Binder, Read, Run, Write
from nbflow_ptx.instructions.mbarrier import Wait, wait
from nbflow_ptx.instructions.opcodes import PLAIN, WARP, WARPGROUP
from nbflow_ptx.instructions.warp_collectives import (
    Collective,
    active_mask,
    member_mask,
    synchronise,
)
from nbflow_ptx.instructions.wgmma_registers import RegisterPlan
from nbflow_ptx.machine.clusters import ClusterBarrier
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
    """``bar``: `mode` is ``sync``, ``arrive`` or ``red``."""

    mode: str
    number: Read
    count: Read | None
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
    registers: RegisterPlan
    blocks: dict[int, Block] = field(default_factory=dict)
    granules: dict[str, int] = field(default_factory=dict)
    grid_barrier: bool = False


#: Kinds of `Control` by opcode (`_kind` has those that depend on more than the opcode).
_KINDS = {
    "bra": "branch", "brx": "table", "ret": "exit", "exit": "exit", "activemask": "active",
    **dict.fromkeys(WARP, "warp"), **dict.fromkeys(WARPGROUP, "group"),
}  # fmt: skip


def bind(kernel: Linked) -> Program:
    """Bind every instruction of a kernel; unsupported ones are named with their line."""
    b = Binder(kernel)
    granules = {space: _granule(b, space) for space in ("global", "shared")}
    code, kinds = kernel.code, [_kind(ins) for ins in kernel.code]
    # or it reads the words of the grid barrier of cooperative groups
    together = "grid" in kinds or any("%envreg" in ins.text for ins in code)
    program = Program(kernel, b.plan, granules=granules, grid_barrier=together)
    leaders = _leaders(kernel, kinds)
    pc = 0
    while pc < len(code):
        start, steps = pc, []
        while pc < len(code) and not kinds[pc]:
            steps.append(_step(b, code[pc], pc))
            pc += 1
            if pc in leaders:
                break
        if pc < len(code) and kinds[pc] and (pc == start or pc not in leaders):
            control = _control(b, kinds[pc], code[pc], pc)
            pc += 1
        else:
            control = Control("next", pc - 1)
        program.blocks[start] = Block(steps, control)
    program.blocks[len(code)] = Block([], Control("exit", max(len(code) - 1, 0)))
    return program


def _kind(ins: Instruction) -> str:
    """Return the kind of `Control` an instruction is, or an empty string."""
    if ins.opcode in ("bar", "barrier"):
        return ins.one_of("warp", "cluster") or "barrier"
    if ins.opcode == "mbarrier" and ins.has("try_wait"):
        return "mbarrier"
    if ins.opcode == "call" and any(
        isinstance(a, Sym) and a.name == "cudaCGSynchronize" for a in ins.args
    ):
        return "grid"
    return _KINDS.get(ins.opcode, "")


def _leaders(kernel: Linked, kinds: list[str]) -> set[int]:
    """Return where blocks begin: branch targets, warp-wide instructions, after control."""
    found = {0}.union(*kernel.tables.values())
    for pc, (ins, kind) in enumerate(zip(kernel.code, kinds, strict=True)):
        if ins.target >= 0:
            found.add(ins.target)
        if kind:
            found.add(pc + 1)
        if kind in ("warp", "group", "mbarrier"):
            found.add(pc)
    return found


def _guard(b: Binder, ins: Instruction) -> tuple[int, bool]:
    if ins.guard is None:
        return -1, False
    return b.slots[ins.guard[0].name], ins.guard[1]


def _step(b: Binder, ins: Instruction, pc: int) -> Step:
    if ins.opcode not in PLAIN:
        known = [*PLAIN, *_KINDS, "bar", "barrier"]
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


def _control(b: Binder, kind: str, ins: Instruction, pc: int) -> Control:
    c = Control(kind, pc, *_guard(b, ins), target=ins.target)
    if kind == "table":
        c.index = b.read(ins.args[0], TYPES["u32"])
        c.targets = b.kernel.tables[getattr(ins.args[1], "name", "")]
    elif kind == "warp":
        c.mask = member_mask(b, ins)
        c.collective = b.plan.watch(ins, WARP.get(ins.opcode, synchronise)(b, ins))
    elif kind == "group":
        c.collective = WARPGROUP[ins.opcode](b, ins)
    elif kind == "active":
        c.collective = active_mask(b, ins)
    elif kind == "mbarrier":
        c.wait = wait(b, ins)
    elif kind == "cluster":
        c.cluster = ClusterBarrier(ins.has("arrive"), ins.has("relaxed"))
    elif kind == "barrier":
        c.barrier = _barrier(b, ins)
    return c


def _barrier(b: Binder, ins: Instruction) -> Barrier:
    mode, u, args = ins.one_of("sync", "arrive", "red"), TYPES["u32"], ins.args
    if not mode:
        raise b.unsupported(ins)
    if mode != "red":
        return Barrier(mode, b.read(args[0], u), b.read(args[1], u) if len(args) > 1 else None)
    return Barrier(
        mode,
        b.read(args[1], u),
        b.read(args[2], u) if len(args) == 4 else None,
        ins.one_of("popc", "and", "or"),
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
