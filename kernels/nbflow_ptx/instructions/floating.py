"""Float arithmetic: exactly rounded where the instruction is, else correctly rounded anyway.

``.approx`` instructions give the value rounded to nearest, which lies within the error bound the
PTX ISA states for the hardware's (see docs/ptx_emulator.md); only ``sin.approx`` and
``cos.approx`` of large arguments are better here than there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_ptx.instructions import floats
from nbflow_ptx.instructions.binder import Binder, Run
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.parsing.syntax import Instruction
from nbflow_ptx.parsing.types import TYPES, Type

Float = Callable[..., Any]


def _modifiers(ins: Instruction, f: Float) -> Float:
    """Wrap a float32 function with ``.ftz`` on its inputs and ``.ftz``, ``.sat`` on its result."""
    ftz, sat = ins.has("ftz"), ins.has("sat")
    if not ftz and not sat:
        return f

    def g(*xs: Any) -> Any:
        r = f(*[floats.flush(x) for x in xs]) if ftz else f(*xs)
        if ftz:
            r = floats.flush(r)
        return floats.saturate(r) if sat else r

    return g


def unpack_pair(v: Any, name: str) -> tuple[Any, Any]:
    """Return the low and high value of a packed pair as float64."""
    low, high = floats.split16(v)
    return unpack16(low, name), unpack16(high, name)


def unpack16(bits: Any, name: str) -> Any:
    """Return float16 or bfloat16 bits as float64."""
    if name.startswith("f16"):
        return bits.view(np.float16).astype(np.float64)
    return floats.bf16_to_f32(bits).astype(np.float64)


def pack16(x: Any, name: str, mode: str = "rn") -> Any:
    """Round float64 to float16 or bfloat16 bits (uint16)."""
    if name.startswith("f16"):
        return floats.narrow(x, np.float16, mode).view(np.uint16)
    return floats.f64_to_bf16(x, mode)


def _narrow(b: Binder, ins: Instruction, kind: Type, f: Float, n: int) -> Run:
    """Bind an operation on 16-bit floats: `f` works on float64 and returns exact or odd results."""
    d = b.write(ins.args[0])
    relu, sat = ins.has("relu"), ins.has("sat")
    ftz = ins.has("ftz") and kind.name.startswith("f16")

    def clean(x: Any) -> Any:
        return np.where(np.abs(x) < 2.0**-14, np.copysign(0.0, x), x) if ftz else x

    def g(xs: list[Any]) -> Any:
        r = np.asarray(f(*[clean(x) for x in xs]), np.float64)
        if sat:
            r = floats.saturate(r)
        if relu:
            r = np.where(r > 0, r, np.where(np.isnan(r), r, 0.0))
        if ftz:
            r = clean(floats.narrow(r, np.float16).astype(np.float64))
        return pack16(r, kind.name)

    if kind.nbytes == 2:
        reads = b.reads(ins.args[1 : 1 + n], TYPES["b16"])
        return lambda m, i: d(m, i, g([unpack16(x(m, i), kind.name) for x in reads]))
    reads = b.reads(ins.args[1 : 1 + n], TYPES["b32"])

    def run(m: Machine, i: Any) -> None:
        pairs = [unpack_pair(x(m, i), kind.name) for x in reads]
        low, high = g([p[0] for p in pairs]), g([p[1] for p in pairs])
        d(m, i, floats.join16(low, high))

    return run


def arithmetic(b: Binder, ins: Instruction) -> Run:
    """``add``, ``sub`` and ``mul`` of floats."""
    kind, mode, op = b.type_of(ins), b.rounding(ins), ins.opcode
    if kind.name not in ("f32", "f64"):
        exactly: dict[str, Float] = {
            "add": floats.add_to_odd,
            "sub": lambda x, y: floats.add_to_odd(x, -y),
            "mul": np.multiply,
        }
        return _narrow(b, ins, kind, exactly[op], 2)
    if mode == "rn":
        g: Float = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op]
    elif kind.name == "f32":
        g = {
            "add": lambda x, y: floats.add32(x, y, mode),
            "sub": lambda x, y: floats.add32(x, -y, mode),
            "mul": lambda x, y: floats.mul32(x, y, mode),
        }[op]
    else:
        summed = _each64(lambda x, y: x + y, mode)
        g = {
            "add": summed,
            "sub": lambda x, y: summed(x, -y),
            "mul": _each64(lambda x, y: x * y, mode),
        }[op]
    return b.apply(ins, _modifiers(ins, g), kind, kind)


def _each64(f: Float, mode: str) -> Float:
    """Evaluate a rational function exactly, thread by thread."""

    def g(*xs: Any) -> Any:
        xs = np.broadcast_arrays(*xs)
        out = [
            floats.exact64(f, values, mode) for values in zip(*[x.ravel() for x in xs], strict=True)
        ]
        return np.array(out, np.float64).reshape(xs[0].shape)[()]

    return g


def fma(b: Binder, ins: Instruction) -> Run:
    """``fma`` (and ``mad`` of floats), rounded once."""
    kind, mode = b.type_of(ins), b.rounding(ins)
    if kind.name == "f32":
        f = floats.fma32 if mode == "rn" else (lambda x, y, z: floats.fma32(x, y, z, mode))
        return b.apply(ins, _modifiers(ins, f), kind, kind, kind)
    if kind.name == "f64":
        return b.apply(ins, lambda x, y, z: floats.fma64(x, y, z, mode), kind, kind, kind)
    return _narrow(b, ins, kind, lambda x, y, z: floats.add_to_odd(x * y, z), 3)


def divide(b: Binder, ins: Instruction) -> Run:
    """``div`` of floats; ``.approx`` and ``.full`` are correctly rounded too."""
    kind, mode = b.type_of(ins), b.rounding(ins)
    if kind.name not in ("f32", "f64"):
        raise b.unsupported(ins)
    if mode == "rn":
        f: Float = np.divide
    elif kind.name == "f32":
        f = lambda x, y: floats.div32(x, y, mode)  # noqa: E731
    else:
        f = _each64(lambda x, y: x / y, mode)
    if ins.has("approx"):  # 2**126 < |y| < 2**128: the hardware's reciprocal is zero

        def near(x: Any, y: Any) -> Any:
            r = x / y
            big = (np.abs(y) > np.float32(2.0**126)) & np.isfinite(y) & np.isfinite(x)
            return np.where(big, np.copysign(np.float32(0), r), r)

        f = near
    return b.apply(ins, _modifiers(ins, f), kind, kind)


def _sqrt64(mode: str) -> Float:
    def g(x: Any) -> Any:
        fraction, exponent = np.frexp(x)  # work where the square neither over- nor underflows
        even = exponent - (exponent & 1)
        x = np.ldexp(fraction, exponent - even)
        r = np.sqrt(x)
        p, e = floats.two_product(r, r)
        over, under = (p - x) + e > 0, (p - x) + e < 0
        if mode == "rp":
            r = np.where(under & np.isfinite(r), np.nextafter(r, np.inf), r)
        else:
            r = np.where(over & np.isfinite(r), np.nextafter(r, -np.inf), r)
        return np.ldexp(r, even // 2)

    return g


def root(b: Binder, ins: Instruction) -> Run:
    """``rcp``, ``sqrt`` and ``rsqrt``."""
    kind, mode, op = b.type_of(ins), b.rounding(ins), ins.opcode
    if kind.name == "f64" and ins.has("approx") and op in ("rcp", "rsqrt"):
        return b.apply(ins, lambda x: _high_word(1.0 / (x if op == "rcp" else np.sqrt(x))), kind)
    one = kind.dtype(1)
    if op == "rsqrt":
        return b.apply(ins, _modifiers(ins, lambda x: _wide(lambda y: 1.0 / np.sqrt(y), x)), kind)
    if mode == "rn":
        f: Float = np.sqrt if op == "sqrt" else (lambda x: one / x)
    elif kind.name == "f32":
        f = (
            (lambda x: floats.sqrt32(x, mode))
            if op == "sqrt"
            else (lambda x: floats.div32(np.float32(1), x, mode))
        )
    else:
        f = _sqrt64(mode) if op == "sqrt" else _each64(lambda x: 1 / x, mode)
    return b.apply(ins, _modifiers(ins, f), kind)


def _high_word(x: Any) -> Any:
    """Clear the low word, as ``rcp.approx.ftz.f64`` and ``rsqrt.approx.ftz.f64`` do."""
    r = np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), x)
    return (r.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


def _wide(f: Float, x: Any) -> Any:
    """Evaluate in float64 and round to the type of `x`."""
    return f(x.astype(np.float64)).astype(x.dtype)


def special(b: Binder, ins: Instruction) -> Run:
    """``ex2``, ``lg2``, ``sin``, ``cos`` and ``tanh``."""
    kind = b.type_of(ins)
    f = {"ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh}[ins.opcode]
    if kind.name == "f32":
        return b.apply(ins, _modifiers(ins, lambda x: _wide(f, x)), kind)
    if kind.name == "f64":
        raise b.unsupported(ins)
    return _narrow(b, ins, kind, f, 1)


def sign(b: Binder, ins: Instruction) -> Run:
    """``neg`` and ``abs``: the sign bit alone, also of NaN."""
    kind = b.type_of(ins)
    bits = TYPES[f"b{8 * kind.nbytes}"]
    top = 1 << (8 * kind.nbytes - 1)
    if kind.name in ("f16x2", "bf16x2"):
        top |= 0x8000
    store = bits.dtype
    if ins.opcode == "neg":
        mask = store(top)
        f: Float = lambda x: x ^ mask  # noqa: E731
    else:
        keep = store((1 << 8 * kind.nbytes) - 1 - top)
        f = lambda x: x & keep  # noqa: E731
    if ins.has("ftz") and kind.name == "f32":
        return b.apply(ins, lambda x: f(floats.flush(x.view(np.float32)).view(np.uint32)), bits)
    return b.apply(ins, f, bits)


def minmax(b: Binder, ins: Instruction) -> Run:
    """``min`` and ``max`` of floats: NaN loses unless ``.NaN``; ``.xorsign.abs`` supported."""
    kind = b.type_of(ins)
    pick = floats.minimum if ins.opcode == "min" else floats.maximum
    nan, xorsign = ins.has("NaN"), ins.has("xorsign")

    def f(*xs: Any) -> Any:
        x, y = xs[0], xs[1]
        if not xorsign:
            r = pick(x, y, propagate=nan)
            return pick(r, xs[2], propagate=nan) if len(xs) == 3 else r
        r = pick(np.abs(x), np.abs(y), propagate=nan)
        return np.where(np.signbit(x) != np.signbit(y), -r, r)

    n = len(ins.args) - 1
    if kind.name in ("f32", "f64"):
        return b.apply(ins, _modifiers(ins, f), *[kind] * n)
    return _narrow(b, ins, kind, f, n)


def copysign(b: Binder, ins: Instruction) -> Run:
    """``copysign``: the sign of the first operand, the size of the second."""
    kind = b.type_of(ins)
    return b.apply(ins, lambda x, y: np.copysign(y, x), kind, kind)


def testp(b: Binder, ins: Instruction) -> Run:
    """``testp``: kinds of floats."""
    kind = b.type_of(ins)
    tiny = np.finfo(kind.dtype).tiny
    f: dict[str, Float] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (np.abs(x) < tiny) & (x != 0),
    }
    return b.apply(ins, f[ins.op[1]], kind)
