"""Functions the driver provides: ``printf``, ``assert`` and the grid barrier's handle."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from nbflow_ptx.instructions.binder import Binder, Run, threads
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.parsing.syntax import Instruction, Sym, Vec

_FORMAT = re.compile(r"%(?:%|([-+ #0]*)(\d+)?(?:\.(\d+))?(hh|h|ll|l|z|j|t)?([diouxXeEfFgGaAcsp]))")
_MAX_STRING = 4096


def call(b: Binder, ins: Instruction) -> Run:
    """Bind a call of a built-in; other calls were inlined by the linker."""
    name = next(a.name for a in ins.args if isinstance(a, Sym))
    lists = [
        [x.name for x in a.items if isinstance(x, Sym)] for a in ins.args if isinstance(a, Vec)
    ]
    returns, args = (lists[0], lists[1]) if len(lists) == 2 else ([], lists[0] if lists else [])
    if name == "vprintf":
        return _vprintf(returns, args)
    if name == "__assertfail":
        return _assertfail(args)

    def handle(m: Machine, i: Any) -> None:  # cudaCGGetIntrinsicHandle: any number but zero
        _give(m, i, returns, np.uint64(1))

    return handle


def _give(m: Machine, i: Any, returns: list[str], value: Any) -> None:
    """Store the result of a built-in where the caller looks for it."""
    for name in returns:
        at = np.int64(m.kernel.frame[name])
        m.memory.store(threads(m, i), at, "local", [value])


def grid_barrier_done(m: Machine, ins: Instruction, lanes: Any) -> None:
    """Give the threads that met at ``cudaCGSynchronize`` its result: success."""
    results = ins.args[0] if isinstance(ins.args[0], Vec) else Vec(())
    _give(m, lanes, [a.name for a in results.items if isinstance(a, Sym)], np.uint32(0))


def _argument(m: Machine, t: Any, name: str, width: int = 8) -> Any:
    return m.memory.load(t, np.int64(m.kernel.frame[name]), "local", width)[0]


def _vprintf(returns: list[str], args: list[str]) -> Run:
    def run(m: Machine, i: Any) -> None:
        m.touch()
        t = threads(m, i)
        formats, buffers = _argument(m, t, args[0]), _argument(m, t, args[1])
        for lane, at, buffer in zip(t, formats.view(np.int64), buffers.view(np.int64), strict=True):
            one = np.array([lane])
            m.launch.printed.append(_formatted(m, one, read_string(m, one, int(at)), int(buffer)))
        _give(m, i, returns, np.uint32(0))

    return run


def read_string(m: Machine, t: Any, address: int) -> str:
    """Read a zero-terminated string at a generic address."""
    out = bytearray()
    while len(out) < _MAX_STRING:
        byte = int(m.memory.load(t, np.array([address + len(out)]), "generic", 1)[0][0])
        if not byte:
            break
        out.append(byte)
    return out.decode("utf-8", "replace")


def _formatted(m: Machine, t: Any, text: str, buffer: int) -> str:
    """Format as C's printf; arguments are in `buffer`, each aligned to its size."""
    at = buffer

    def take(width: int) -> int:
        nonlocal at
        at = -(-at // width) * width
        value = int(m.memory.load(t, np.array([at]), "generic", width)[0][0])
        at += width
        return value

    def one(f: re.Match[str]) -> str:
        flags, width, precision, length, kind = f.groups()
        if kind is None:
            return "%"
        head = f"%{flags or ''}{width or ''}" + (f".{precision}" if precision else "")
        if kind == "s":
            return (head + "s") % read_string(m, t, take(8))
        if kind in "eEfFgGaA":
            value = float(np.uint64(take(8)).view(np.float64))
            return value.hex() if kind in "aA" else (head + kind) % value
        if kind == "p":
            return f"{take(8):#x}"
        nbytes = 8 if length in ("l", "ll", "z", "j", "t") else 4
        number = take(nbytes)
        if kind == "c":
            return chr(number & 255)
        if kind in "di" and number >> (8 * nbytes - 1):
            number -= 1 << 8 * nbytes
        return (head + ("d" if kind in "diu" else kind)) % number

    return _FORMAT.sub(one, text)


def _assertfail(args: list[str]) -> Run:
    def run(m: Machine, i: Any) -> None:
        m.touch()
        t = threads(m, i)[:1]
        message, file = (
            read_string(m, t, int(_argument(m, t, a).view(np.int64)[0])) for a in args[:2]
        )
        line = int(_argument(m, t, args[2], 4)[0])
        raise m.error("assert", f"assertion failed: {message} ({file}:{line})", int(t[0]))

    return run


def trap(b: Binder, ins: Instruction) -> Run:
    """``trap`` and ``brkpt``: the kernel stops."""

    def run(m: Machine, i: Any) -> None:
        raise m.error("trap", f"{ins.opcode} executed", int(threads(m, i)[0]))

    return run
