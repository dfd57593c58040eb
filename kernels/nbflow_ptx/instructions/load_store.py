"""Loads, stores, asynchronous copies and fences."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_ptx.instructions import mbarrier
from nbflow_ptx.instructions.binder import Binder, Read, Run, full, threads
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.memory.device import LOCAL_BASE, SHARED_BASE
from nbflow_ptx.parsing.syntax import Addr, Imm, Instruction, Sym, Vec
from nbflow_ptx.parsing.types import TYPES

_STRONG = ("volatile", "relaxed", "acquire", "release", "mmio")


def load(b: Binder, ins: Instruction) -> Run:
    """``ld`` and ``ldu`` of every space, width and vector length."""
    kind, space = b.type_of(ins), ins.space
    writes = b.writes(ins.args[0])
    if kind.nbytes * len(writes) > 16 or kind.nbytes > 8:
        raise b.unsupported(ins)
    signed = kind.kind == "s"
    if space == "param":
        place = _param(b, ins.args[1])
        if place is not None:
            return _load_param(writes, place, kind.nbytes, kind.dtype if signed else None)
        space = "generic"
    address = _frame_address(b, ins.args[1]) if ins.has("param") else b.address(ins.args[1])
    width, n, strong = kind.nbytes, len(writes), ins.has(*_STRONG)

    def run(m: Machine, i: Any) -> None:
        m.touch()
        t = m.all_lanes if i is None else i
        values = m.memory.load(t, address(m, i), space, width, n, strong=strong)
        for d, v in zip(writes, values, strict=True):
            d(m, i, v.view(kind.dtype) if signed else v)

    return run


def _param(b: Binder, a: Any) -> int | None:
    """Return the offset of a kernel parameter; None for anything else."""
    if isinstance(a, Addr) and isinstance(a.base, Sym) and a.base.name in b.kernel.param_offsets:
        return b.kernel.param_offsets[a.base.name] + a.base.offset + a.offset
    return None


def _frame_address(b: Binder, a: Any) -> Read:
    """Return the generic address of an argument: of a call (the thread's own) or of the kernel."""
    address = b.address(a)

    def generic(m: Machine, i: Any) -> Any:
        at = address(m, i)
        return np.where(at < SHARED_BASE, at + LOCAL_BASE, at)

    return generic


def _load_param(writes: Any, place: int, width: int, signed: Any) -> Run:
    store = TYPES[f"b{8 * width}"].dtype

    def run(m: Machine, i: Any) -> None:
        for k, d in enumerate(writes):
            v = m.params[place + k * width : place + (k + 1) * width].view(store)[0]
            d(m, i, v.view(signed) if signed is not None else v)

    return run


def store(b: Binder, ins: Instruction) -> Run:
    """``st`` of every space, width and vector length."""
    kind, space = b.type_of(ins), ins.space
    if kind.nbytes > 8:
        raise b.unsupported(ins)
    source = ins.args[1].items if isinstance(ins.args[1], Vec) else (ins.args[1],)
    reads = b.reads(source, TYPES[f"b{8 * kind.nbytes}"])
    if kind.nbytes * len(reads) > 16 or ins.has("async", "bulk"):
        raise b.unsupported(ins)
    own = space == "param"
    address = _frame_address(b, ins.args[0]) if own else b.address(ins.args[0])
    space = "generic" if own else space
    strong, release = ins.has(*_STRONG), ins.has("release")

    def run(m: Machine, i: Any) -> None:
        m.touch()
        t = m.all_lanes if i is None else i
        if release:
            m.fence(t)
        m.memory.store(t, address(m, i), space, [x(m, i) for x in reads], strong=strong)

    return run


def fence(b: Binder, ins: Instruction) -> Run:
    """``fence`` and ``membar``: what was written before is ordered before what follows."""
    if ins.has("proxy") and any(p.startswith("async") for p in ins.op):
        return _proxy_fence
    if ins.has("mbarrier_init"):
        return _init_fence
    if ins.has("proxy"):
        return nothing(b, ins)
    wide = ins.has("gl", "gpu", "sys", "cluster")

    def run(m: Machine, i: Any) -> None:
        m.touch()
        m.fence(threads(m, i), wide=wide)

    return run


def _proxy_fence(m: Machine, i: Any) -> None:
    m.touch()
    lanes = threads(m, i)
    m.clocks.proxy_fence(lanes, m.of(m.warp_id, lanes), m.stamp)


def _init_fence(m: Machine, i: Any) -> None:
    m.touch()
    m.clocks.init_fence[threads(m, i)] = m.stamp


def nothing(b: Binder, ins: Instruction) -> Run:
    """Instructions that change no value: prefetches, hints, ``nanosleep``."""
    return lambda m, i: None


def set_registers(b: Binder, ins: Instruction) -> Run:
    """``setmaxnreg``: registers are plenty here, but their number must be one there is."""
    n = ins.args[0].value if isinstance(ins.args[0], Imm) else 0
    if n % 8 or not 24 <= n <= 256:
        raise b.unsupported(ins, "takes a multiple of 8 from 24 to 256")
    return nothing(b, ins)


def create_policy(b: Binder, ins: Instruction) -> Run:
    """``createpolicy``: an opaque number."""
    d = b.write(ins.args[0])
    return lambda m, i: d(m, i, np.uint64(0))


def async_copy(b: Binder, ins: Instruction) -> Run:
    """``cp.async``: the bytes arrive at the wait; until then reading them is an error."""
    if ins.has("bulk"):
        return mbarrier.bulk_copy(b, ins)
    if ins.has("mbarrier"):
        return mbarrier.arrive_behind_copies(b, ins)
    if ins.has("commit_group"):
        return lambda m, i: m.copies.commit(threads(m, i))
    if ins.has("wait_group", "wait_all"):
        left = ins.args[0].value if ins.args and isinstance(ins.args[0], Imm) else 0
        every = ins.has("wait_all")

        def wait(m: Machine, i: Any) -> None:
            m.touch()
            m.copies.wait(threads(m, i), None if every else left)

        return wait
    return _start_copy(b, ins)


def _start_copy(b: Binder, ins: Instruction) -> Run:
    to, source = b.address(ins.args[0]), b.address(ins.args[1])
    if not isinstance(ins.args[2], Imm) or ins.args[2].value not in (4, 8, 16):
        raise b.unsupported(ins)
    n = ins.args[2].value
    size = None
    if len(ins.args) > 3 and b.width(ins.args[3]) != 8:  # a 64-bit operand is a cache policy
        pred = b.width(ins.args[3]) == 0 and not isinstance(ins.args[3], Imm)
        size = b.read(ins.args[3], TYPES["pred"] if pred else TYPES["u32"])
        if pred:
            ignore = size
            size = lambda m, i: np.where(ignore(m, i), 0, n)  # noqa: E731

    def run(m: Machine, i: Any) -> None:
        m.touch()
        t = threads(m, i)
        bytes_read = np.full(len(t), n) if size is None else full(m, i, size(m, i)).astype(np.int64)
        m.copies.start(t, full(m, i, to(m, i)), full(m, i, source(m, i)), n, bytes_read)

    return run
