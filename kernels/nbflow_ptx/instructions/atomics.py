"""Read-modify-write instructions: ``atom`` and ``red``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from nbflow_ptx.instructions import floats
from nbflow_ptx.instructions.binder import Binder, Run, full, threads
from nbflow_ptx.instructions.floating import pack16, unpack16
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.parsing.syntax import Instruction, Vec
from nbflow_ptx.parsing.types import STORAGE, TYPES, Type

_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
#: Operations NumPy can do for many threads at one address, in thread order.
_UFUNC: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def atomic(b: Binder, ins: Instruction) -> Run:
    """``atom`` (gives the old value) and ``red`` (does not)."""
    kind, space = b.type_of(ins), ins.space
    op = ins.one_of(*_OPERATIONS)
    if (
        not op
        or ins.has("async", "bulk")
        or any(isinstance(a, Vec) for a in ins.args)
        or kind.nbytes > 8
    ):
        raise b.unsupported(ins)
    gives = ins.opcode == "atom"
    args = ins.args[1:] if gives else ins.args
    d = b.write(ins.args[0]) if gives else None
    address = b.address(args[0])
    store = STORAGE[kind.nbytes]
    bits = TYPES[f"b{8 * kind.nbytes}"]
    value = b.read(args[1], bits)
    new = b.read(args[2], bits) if op == "cas" else None
    step = operation(op, kind)
    fences = ins.has("acq_rel", "release", "sc")

    def run(m: Machine, i: Any) -> None:
        m.touch()
        t = threads(m, i)
        x = full(m, i, value(m, i))
        y = full(m, i, new(m, i)) if new is not None else x
        if fences:
            m.fence(t)
        at = full(m, i, address(m, i))
        old = np.zeros(len(t), store)
        for which, array, k in m.memory.atomic(t, at, space, kind.nbytes):
            w = slice(None) if which is None else which
            old[w] = update(op, kind, step, array, k, x[w], y[w])
        if d is not None:
            d(m, i, old)

    return run


def update(op: str, kind: Type, step: Any, array: Any, k: Any, x: Any, y: Any) -> Any:
    """Apply one operation to ``array[k]``, thread after thread; return the values found."""
    distinct = len(k) < 2 or len(np.unique(k)) == len(k)
    if distinct:
        old = array[k]
        array[k] = step(old, x, y)
        return old
    if op in _UFUNC and kind.kind in "usb" and (k == k[0]).all():
        typed = x.view(kind.dtype)
        first = array[k[:1]].view(kind.dtype)
        with np.errstate(over="ignore"):
            partial = _UFUNC[op].accumulate(np.concatenate([first, typed]), dtype=kind.dtype)
        array[k[0]] = partial[-1:].view(array.dtype)[0]
        return partial[:-1].view(array.dtype)
    return _in_rounds(step, array, k, x, y)


def _in_rounds(step: Any, array: Any, k: Any, x: Any, y: Any) -> Any:
    """Serve each address once per round, so that every thread sees its predecessor's result."""
    old = np.empty(len(k), array.dtype)
    order = np.argsort(k, kind="stable")
    place = k[order]
    starts = np.flatnonzero(np.r_[True, place[1:] != place[:-1]])
    rank = np.arange(len(k)) - np.repeat(starts, np.diff(np.r_[starts, len(k)]))
    by_rank = np.argsort(rank, kind="stable")
    bounds = np.flatnonzero(np.r_[True, np.diff(rank[by_rank]) != 0, True])
    for begin, end in pairwise(bounds.tolist()):
        j = order[by_rank[begin:end]]
        found = array[k[j]]
        old[j] = found
        array[k[j]] = step(found, x[j], y[j])
    return old


def operation(op: str, kind: Type) -> Callable[[Any, Any, Any], Any]:
    """Return ``new(old, x, y)`` on bit patterns of `kind`."""
    dtype, store = kind.dtype, STORAGE[kind.nbytes]
    if op == "exch":
        return lambda old, x, y: x
    if op == "cas":
        return lambda old, x, y: np.where(old == x, y, old)
    if op == "inc":
        return lambda old, x, y: np.where(old >= x, store(0), old + store(1))
    if op == "dec":
        one = store(1)
        return lambda old, x, y: np.where((old == 0) | (old > x), x, old - one)
    if kind.name in ("f16", "bf16"):
        return lambda old, x, y: _small(op, old, x, kind.name)
    if kind.name in ("f16x2", "bf16x2"):
        return lambda old, x, y: _small_pair(op, old, x, kind.name)
    if kind.kind == "f" and op in ("min", "max"):
        pick = floats.minimum if op == "min" else floats.maximum
        return lambda old, x, y: pick(old.view(dtype), x.view(dtype)).view(store)
    f = _UFUNC[op]
    return lambda old, x, y: f(old.view(dtype), x.view(dtype)).view(store)


def _small(op: str, old: Any, x: Any, name: str) -> Any:
    a, b = unpack16(old, name), unpack16(x, name)
    f = {"add": floats.add_to_odd, "min": floats.minimum, "max": floats.maximum}[op]
    return pack16(f(a, b), name)


def _small_pair(op: str, old: Any, x: Any, name: str) -> Any:
    pairs = zip(floats.split16(old), floats.split16(x), strict=True)
    return floats.join16(*(_small(op, a, b, name) for a, b in pairs))
