"""Errors of the emulator, from PTX that does not parse to data races."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field


class PtxError(Exception):
    """Base class of everything this package raises about a kernel."""


class ParseError(PtxError, ValueError):
    """The text is not PTX this package understands; the message names the line."""


class UnsupportedInstruction(PtxError, NotImplementedError):
    """An instruction, or a form of one, that the emulator does not execute."""


class LaunchError(PtxError, ValueError):
    """Wrong arguments of a launch: unknown kernel, number of arguments, sizes."""


class OutOfMemory(LaunchError, MemoryError):
    """The emulated device has no memory left."""


class MissingToolError(ImportError):
    """A compiler that is an optional dependency; the message names what to install."""


@dataclass
class Finding:
    """One thing a check found.

    Attributes
    ----------
    check : str
        Which check: ``bounds``, ``aligned``, ``freed``, ``uninitialised``, ``race``, ``barrier``,
        ``masks``, ``wgmma``, ``proxy``, ``budget``, ``assert`` or ``trap``.
    message : str
        What happened, in one sentence.
    kernel, where, instruction : str
        Entry point, source line (or line of the PTX text), and the instruction itself.
    block, thread : tuple of int, optional
        The first thread it happened in.
    address : int, optional
        Address of the access, in the space of the instruction.
    array : str, optional
        Name of the array or variable at or next to the address.
    notes : list of str
        Further lines, such as the other access of a race or the waiting threads.
    """

    check: str
    message: str
    kernel: str = ""
    where: str = ""
    instruction: str = ""
    block: tuple[int, ...] | None = None
    thread: tuple[int, ...] | None = None
    address: int | None = None
    array: str | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.check}: {self.message}"]
        lines.append(f"  in {self.kernel} at {self.where}: {self.instruction}")
        if self.block is not None and self.thread is not None:
            lines.append(f"  block {_triple(self.block)}, thread {_triple(self.thread)}")
        if self.address is not None:
            name = f" ({self.array})" if self.array else ""
            lines.append(f"  address {self.address:#x}{name}")
        return "\n".join(lines + [f"  {note}" for note in self.notes])


class KernelFault(PtxError):
    """A check failed while a kernel ran; `finding` says what, where and in which thread."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def _triple(values: tuple[int, ...]) -> str:
    return "(" + ", ".join(str(v) for v in values) + ")"


def position(offset: int, what: str, n_bytes: int) -> str:
    """Describe an offset from the start of an array: in, before or behind it."""
    if 0 <= offset < n_bytes:
        return f"byte {offset} of {what} of {n_bytes} bytes"
    if offset < 0:
        return f"{-offset} bytes before {what} of {n_bytes} bytes"
    return f"{offset - n_bytes} bytes behind the end of {what} of {n_bytes} bytes"


def unknown(kind: str, name: str, available: Iterable[str]) -> str:
    """Return the message for a name that does not exist: close names first, then all."""
    names = list(available)
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ";"
    return f"unknown {kind} {name!r}{hint} available: {', '.join(names) or 'none'}"
