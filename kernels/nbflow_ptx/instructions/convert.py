"""Moves, conversions, comparisons and selections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_ptx.instructions import floats
from nbflow_ptx.instructions.binder import Binder, Run
from nbflow_ptx.instructions.floating import pack16, unpack16, unpack_pair
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.memory.device import GLOBAL_BASE, LOCAL_BASE, SHARED_BASE, WINDOW_BYTES
from nbflow_ptx.parsing.syntax import Instruction, Vec
from nbflow_ptx.parsing.types import FLOATS, STORAGE, TYPES, Type


def move(b: Binder, ins: Instruction) -> Run:
    """``mov``: copy, pack or unpack."""
    kind = b.type_of(ins)
    if kind.nbytes > 8:
        raise b.unsupported(ins)
    if isinstance(ins.args[0], Vec):
        return _unpack(b, ins, kind)
    if isinstance(ins.args[1], Vec):
        return _pack(b, ins, kind)
    d, x = b.write(ins.args[0]), b.read(ins.args[1], kind)

    def run(m: Machine, i: Any) -> None:
        v = x(m, i)
        d(m, i, v.copy() if v.ndim else v)  # two registers never share an array

    return run


def _unpack(b: Binder, ins: Instruction, kind: Type) -> Run:
    writes = b.writes(ins.args[0])
    x = b.read(ins.args[1], TYPES[f"b{8 * kind.nbytes}"])
    width = kind.nbytes // len(writes)
    store = STORAGE[width]

    def run(m: Machine, i: Any) -> None:
        v = x(m, i)
        for k, d in enumerate(writes):
            d(m, i, (v >> v.dtype.type(8 * width * k)).astype(store))

    return run


def _pack(b: Binder, ins: Instruction, kind: Type) -> Run:
    assert isinstance(ins.args[1], Vec)
    d, items = b.write(ins.args[0]), ins.args[1].items
    width = kind.nbytes // len(items)
    store = STORAGE[kind.nbytes]
    reads = b.reads(items, TYPES[f"b{8 * width}"])

    def run(m: Machine, i: Any) -> None:
        r = reads[0](m, i).astype(store)
        for k, x in enumerate(reads[1:], 1):
            r = r | (x(m, i).astype(store) << store(8 * width * k))
        d(m, i, r)

    return run


def to_generic(b: Binder, ins: Instruction) -> Run:
    """``cvta``: between the address of a space and a generic address."""
    kind = b.type_of(ins)
    space = next((p.split("::")[0] for p in ins.op if p.split("::")[0] in _BASES), "global")
    base = kind.dtype(_BASES[space] & ((1 << 8 * kind.nbytes) - 1))
    if ins.has("to"):
        return b.apply(ins, lambda x: x - base, kind)
    return b.apply(ins, lambda x: x + base, kind)


_BASES = {"global": 0, "const": 0, "param": 0, "shared": SHARED_BASE, "local": LOCAL_BASE}


def is_space(b: Binder, ins: Instruction) -> Run:
    """``isspacep``: whether a generic address is in a space."""
    windows = {
        "global": (GLOBAL_BASE, 1 << 63),
        "shared": (SHARED_BASE, SHARED_BASE + WINDOW_BYTES),
        "shared::cta": (SHARED_BASE, SHARED_BASE + WINDOW_BYTES),
        "shared::cluster": (SHARED_BASE, LOCAL_BASE),
        "local": (LOCAL_BASE, GLOBAL_BASE),
    }
    space = ins.op[1] if ins.op[1] in windows else ins.op[1].split("::")[0]
    if space not in windows:
        raise b.unsupported(ins)
    low, high = map(np.uint64, windows[space])
    return b.apply(ins, lambda x: (x >= low) & (x < high), TYPES["u64"])


# Conversions ---------------------------------------------------------------------------------


def convert(b: Binder, ins: Instruction) -> Run:
    """``cvt`` between integers, floats and packed small floats."""
    kinds = ins.types
    if len(kinds) != 2:
        raise b.unsupported(ins)
    to, source = kinds
    if to.name in ("f16x2", "bf16x2", "e4m3x2", "e5m2x2") and source.name == "f32":
        return _pack_pair(b, ins, to)
    if "x2" in to.name or "x2" in source.name:
        return _convert_fp8(b, ins, to, source)
    if to.name == "tf32":
        mode = b.rounding(ins)
        relu = ins.has("relu")

        def tf32(x: Any) -> Any:
            return floats.round_tf32(np.where(x < 0, np.float32(0), x) if relu else x, mode)

        return b.apply(ins, tf32, source)
    if source.name in FLOATS and to.name in FLOATS:
        return _float_to_float(b, ins, to, source)
    if source.name in FLOATS:
        return _float_to_int(b, ins, to, source)
    if to.name in FLOATS:
        return _int_to_float(b, ins, to, source)
    return _int_to_int(b, ins, to, source)


_INTEGRAL: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil
}  # fmt: skip


def _as64(x: Any, kind: Type) -> Any:
    return unpack16(x, "bf16") if kind.name == "bf16" else x.astype(np.float64)


def _float_to_float(b: Binder, ins: Instruction, to: Type, source: Type) -> Run:
    mode = b.rounding(ins)
    integral = next((f for name, f in _INTEGRAL.items() if ins.has(name)), None)
    ftz, sat, relu = ins.has("ftz"), ins.has("sat"), ins.has("relu")
    if (to.name, source.name) == ("f64", "f32") and not (ftz or sat or integral):
        return b.apply(ins, lambda x: x.astype(np.float64), source)

    def f(x: Any) -> Any:
        if ftz and source.name == "f32":
            x = floats.flush(x)
        v = _as64(x, source)
        if integral is not None:
            v = integral(v)
        if sat:
            v = floats.saturate(v)
        if relu:
            v = np.where(v < 0, 0.0, v)
        if to.name in ("f16", "bf16"):
            return pack16(v, to.name, mode)
        r = floats.narrow(v, to.dtype, mode) if to.name == "f32" else v
        return floats.flush(r) if ftz and to.name == "f32" else r

    return b.apply(ins, f, TYPES["b16"] if source.name == "bf16" else source)


def _float_to_int(b: Binder, ins: Instruction, to: Type, source: Type) -> Run:
    """Out of range clamps; NaN is zero, or the highest bit alone for 64-bit operands."""
    integral = next((f for name, f in _INTEGRAL.items() if ins.has(name)), np.trunc)
    info = np.iinfo(to.dtype)
    bits = 8 * to.nbytes
    nan = 0 if source.name != "f64" and to.nbytes < 8 else 1 << (bits - 1)
    nan_value = STORAGE[to.nbytes](nan).view(to.dtype)
    too_big = float(info.max) + 1.0 if to.nbytes < 8 else float(info.max)
    ftz = ins.has("ftz") and source.name == "f32"

    def f(x: Any) -> Any:
        v = integral(_as64(floats.flush(x) if ftz else x, source))
        inside = np.where((v >= float(info.min)) & (v < too_big), v, 0.0).astype(to.dtype)
        r = np.where(v >= too_big, info.max, inside)
        r = np.where(v < float(info.min), info.min, r)
        return np.where(np.isnan(v), nan_value, r).astype(to.dtype)

    return b.apply(ins, f, TYPES["b16"] if source.name == "bf16" else source)


def _int_to_float(b: Binder, ins: Instruction, to: Type, source: Type) -> Run:
    mode = b.rounding(ins)

    def f(x: Any) -> Any:
        if mode == "rn" and to.name in ("f32", "f64"):
            return x.astype(to.dtype)
        # 32 bits are exact in float64; of 64 keep 53 and make the last one sticky
        v = x.astype(np.float64) if source.nbytes < 8 else _sticky53(x)
        if to.name == "f64":
            return _directed64(x, mode) if source.nbytes == 8 else v
        if to.name in ("f16", "bf16"):
            return pack16(v, to.name, mode)
        return floats.narrow(v, to.dtype, mode)

    return b.apply(ins, f, source)


def _sticky53(x: Any) -> Any:
    """Return 64-bit integers as float64 rounded to odd."""
    high = (x >> x.dtype.type(32)).astype(np.float64) * 2.0**32
    return floats.add_to_odd(high, (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64))


def _directed64(x: Any, mode: str) -> Any:
    high = (x >> x.dtype.type(32)).astype(np.float64) * 2.0**32
    s, e = floats.two_sum(high, (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64))
    down, up = np.nextafter(s, -np.inf), np.nextafter(s, np.inf)
    toward = {"rm": e < 0, "rz": (e < 0) & (s > 0), "rp": e < -np.inf}[mode]
    away = {"rp": e > 0, "rz": (e > 0) & (s < 0), "rm": e > np.inf}[mode]
    return np.where(toward, down, np.where(away, up, s))


def _int_to_int(b: Binder, ins: Instruction, to: Type, source: Type) -> Run:
    if not ins.has("sat"):
        return b.apply(ins, lambda x: x.astype(to.dtype), source)
    low, high = int(np.iinfo(to.dtype).min), int(np.iinfo(to.dtype).max)
    info = np.iinfo(source.dtype)
    low, high = max(low, int(info.min)), min(high, int(info.max))
    limits = source.dtype(low), source.dtype(high)
    return b.apply(ins, lambda x: np.clip(x, *limits).astype(to.dtype), source)


def _pack_pair(b: Binder, ins: Instruction, to: Type) -> Run:
    """``cvt.rn.f16x2.f32 d, high, low`` and its bfloat16 and 8-bit kin."""
    mode, relu = b.rounding(ins), ins.has("relu")
    small = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}.get(to.name)
    if ins.has("satfinite") != (small is not None):
        raise b.unsupported(ins)

    def one(x: Any) -> Any:
        if relu:
            x = np.where(x < 0, np.float32(0), x)
        return floats.to_fp8(x, small) if small else pack16(x.astype(np.float64), to.name, mode)

    shift, store = (8, np.uint16) if small else (16, np.uint32)

    def f(high: Any, low: Any) -> Any:
        return one(low).astype(store) | (one(high).astype(store) << store(shift))

    return b.apply(ins, f, TYPES["f32"], TYPES["f32"])


def _convert_fp8(b: Binder, ins: Instruction, to: Type, source: Type) -> Run:
    """Between pairs of float16 and pairs of 8-bit floats."""
    if to.name == "f16x2" and source.name in ("e4m3x2", "e5m2x2"):
        table = floats.FP8[source.name[:4]].astype(np.float16).view(np.uint16).astype(np.uint32)
        relu = ins.has("relu")

        def widen(x: Any) -> Any:
            low, high = table[x & np.uint16(255)], table[x >> np.uint16(8)]
            if relu:
                low, high = (np.where(v >> np.uint32(15), np.uint32(0), v) for v in (low, high))
            return low | (high << np.uint32(16))

        return b.apply(ins, widen, TYPES["b16"])
    if source.name == "f16x2" and to.name in ("e4m3x2", "e5m2x2"):

        def shrink(x: Any) -> Any:
            low, high = (floats.to_fp8(v, to.name[:4]) for v in unpack_pair(x, "f16"))
            return low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8))

        return b.apply(ins, shrink, TYPES["b32"])
    raise b.unsupported(ins)


# Comparisons ---------------------------------------------------------------------------------

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


def _comparison(b: Binder, ins: Instruction, name: str, kind: Type) -> Callable[[Any, Any], Any]:
    """Return a comparison; ``equ`` and the like are also true if an operand is NaN."""
    is_float = kind.name in FLOATS
    if name == "num":
        return lambda x, y: ~(np.isnan(x) | np.isnan(y))
    if name == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if name == "ne" and is_float:
        return lambda x, y: (x != y) & ~(np.isnan(x) | np.isnan(y))
    if name in _COMPARE:
        return _COMPARE[name]
    if name.endswith("u") and name[:-1] in _COMPARE and is_float:
        f = _COMPARE[name[:-1]]
        return lambda x, y: f(x, y) | np.isnan(x) | np.isnan(y)
    raise b.unsupported(ins, f"comparison .{name}")


def _compared(b: Binder, ins: Instruction, kind: Type) -> Callable[[Machine, Any], Any]:
    """Return a function giving the Boolean ``a cmp b`` for each thread (of 16-bit floats too)."""
    test = _comparison(b, ins, ins.op[1], kind)
    ftz = ins.has("ftz") and kind.name == "f32"
    if kind.name == "bf16":
        x, y = b.reads(ins.args[1:3], TYPES["b16"])
        return lambda m, i: test(unpack16(x(m, i), "bf16"), unpack16(y(m, i), "bf16"))
    x, y = b.reads(ins.args[1:3], kind)
    if ftz:
        return lambda m, i: test(floats.flush(x(m, i)), floats.flush(y(m, i)))
    return lambda m, i: test(x(m, i), y(m, i))


def set_predicate(b: Binder, ins: Instruction) -> Run:
    """``setp``: compare into one or two predicates, combined with a third."""
    kind = b.type_of(ins)
    if kind.name in ("f16x2", "bf16x2"):
        return _set_predicate_pair(b, ins, kind)
    p, q = b.pair(ins.args[0])
    test = _compared(b, ins, kind)
    join = ins.one_of("and", "or", "xor")
    if not join:
        if q is None:
            return lambda m, i: p(m, i, test(m, i))
        second = q

        def both(m: Machine, i: Any) -> None:
            r = test(m, i)
            p(m, i, r)
            second(m, i, ~r)

        return both
    f = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[join]
    c = b.read(ins.args[3], TYPES["pred"])

    def joined(m: Machine, i: Any) -> None:
        r, other = test(m, i), c(m, i)
        p(m, i, f(r, other))
        if q is not None:
            q(m, i, f(~r, other))

    return joined


def _set_predicate_pair(b: Binder, ins: Instruction, kind: Type) -> Run:
    """``setp.lt.f16x2 p|q``: one predicate per half."""
    p, q = b.pair(ins.args[0])
    if q is None or len(ins.args) > 3:
        raise b.unsupported(ins)
    second = q
    test = _comparison(b, ins, ins.op[1], kind)
    x, y = b.reads(ins.args[1:3], TYPES["b32"])

    def run(m: Machine, i: Any) -> None:
        pairs = [unpack_pair(v(m, i), kind.name) for v in (x, y)]
        for d, halves in zip((p, second), zip(*pairs, strict=True), strict=True):
            d(m, i, test(*halves))

    return run


def set_value(b: Binder, ins: Instruction) -> Run:
    """``set``: compare into all ones or 1.0."""
    kinds = ins.types
    if len(kinds) != 2 or len(ins.args) != 3 or "x2" in kinds[1].name:
        raise b.unsupported(ins)
    to, kind = kinds
    d, test = b.write(ins.args[0]), _compared(b, ins, kind)
    if to.kind == "f":
        yes = to.dtype(1)
    else:
        yes = STORAGE[to.nbytes]((1 << 8 * to.nbytes) - 1).view(to.dtype)
    no = to.dtype(0)
    return lambda m, i: d(m, i, np.where(test(m, i), yes, no))


def select(b: Binder, ins: Instruction) -> Run:
    """``selp``: choose by a predicate."""
    kind = TYPES[f"b{8 * b.type_of(ins).nbytes}"]
    d = b.write(ins.args[0])
    x, y = b.reads(ins.args[1:3], kind)
    p = b.read(ins.args[3], TYPES["pred"])
    return lambda m, i: d(m, i, np.where(p(m, i), x(m, i), y(m, i)))


def select_by_sign(b: Binder, ins: Instruction) -> Run:
    """``slct``: choose by the sign of the third operand."""
    kinds = ins.types
    if len(kinds) != 2:
        raise b.unsupported(ins)
    kind = TYPES[f"b{8 * kinds[0].nbytes}"]
    ftz = ins.has("ftz")

    def f(x: Any, y: Any, c: Any) -> Any:
        return np.where((floats.flush(c) if ftz else c) >= 0, x, y)

    return b.apply(ins, f, kind, kind, kinds[1])
