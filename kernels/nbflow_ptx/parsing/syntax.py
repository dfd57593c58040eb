"""A PTX module as data: variables, functions, instructions and their operands."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbflow_ptx.parsing.types import SPACES, TYPES, Type


@dataclass(frozen=True)
class Reg:
    """A declared register; the name is unique within its function."""

    name: str


@dataclass(frozen=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Imm:
    """A literal: an integer, or the bits of a float (``float_bytes`` = 4 or 8)."""

    value: int
    float_bytes: int = 0


@dataclass(frozen=True)
class Sym:
    """The address of a variable, plus bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Addr:
    """``[base + offset]``."""

    base: Reg | Sym | Imm
    offset: int = 0


@dataclass(frozen=True)
class Vec:
    """``{a, b, ...}`` or a parenthesised list of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """``a|b``: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """``!p``: a negated predicate."""

    reg: Reg


@dataclass(frozen=True)
class Skip:
    """``_``: a discarded destination."""


Operand = Reg | Special | Imm | Sym | Addr | Vec | Pair | Not | Skip


@dataclass(frozen=True)
class Variable:
    """A declared variable or parameter.

    ``size`` is in bytes; 0 means an ``extern`` array (dynamic shared memory).  ``init`` holds
    the initial values: literals, or names of variables whose addresses are stored.
    """

    name: str
    space: str
    type: Type
    size: int
    align: int
    init: tuple[Imm | str, ...] = ()


@dataclass
class Instruction:
    """One instruction: ``op`` is the opcode split at its dots.

    ``line`` is the line of the PTX text; ``source`` is (file index, line) of the latest ``.loc``.
    ``target`` is filled in by the linker for branches.
    """

    op: tuple[str, ...]
    args: tuple[Operand, ...]
    text: str
    line: int
    guard: tuple[Reg, bool] | None = None
    source: tuple[int, int] | None = None
    target: int = -1

    @property
    def opcode(self) -> str:
        """The first part: ``add`` of ``add.s32``."""
        return self.op[0]

    @property
    def types(self) -> list[Type]:
        """The types among the parts of the opcode, in order."""
        return [TYPES[p] for p in self.op[1:] if p in TYPES]

    @property
    def space(self) -> str:
        """The state space it names (``cluster`` for ``shared::cluster``), or ``generic``."""
        for part in self.op[1:]:
            if part == "shared::cluster":
                return "cluster"
            name = part.split("::")[0]
            if name in SPACES:
                return name
        return "generic"

    def has(self, *qualifiers: str) -> bool:
        """Return whether any of the qualifiers is present."""
        return not set(self.op).isdisjoint(qualifiers)

    def one_of(self, *qualifiers: str) -> str:
        """Return the first of the qualifiers that is present, or an empty string."""
        return next((q for q in qualifiers if q in self.op[1:]), "")


@dataclass
class Function:
    """An entry point or a device function.

    ``labels`` maps a label to the index of the instruction after it; ``tables`` holds the label
    lists of ``.branchtargets``; ``cluster`` is the size of its thread block clusters.
    """

    name: str
    entry: bool
    params: list[Variable] = field(default_factory=list)
    returns: list[Variable] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    registers: dict[str, Type] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    max_threads: int | None = None
    cluster: tuple[int, ...] = (1,)


@dataclass(eq=False)
class Module:
    """A parsed PTX text; two of them have variables of their own, even with equal texts."""

    version: str = ""
    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

    @property
    def entries(self) -> list[str]:
        """Names of the kernels."""
        return [f.name for f in self.functions.values() if f.entry]
