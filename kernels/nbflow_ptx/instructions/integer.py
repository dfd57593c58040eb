"""Integer arithmetic, logic, shifts and bit fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_ptx.instructions import floating
from nbflow_ptx.instructions.binder import Binder, Run
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.parsing.syntax import Imm, Instruction, Pair
from nbflow_ptx.parsing.types import FLOATS, SIGNED, STORAGE, TYPES, Type

_WIDE = {
    "u16": TYPES["u32"], "s16": TYPES["s32"], "u32": TYPES["u64"], "s32": TYPES["s64"],
    "u64": TYPES["u64"], "s64": TYPES["s64"],
}  # fmt: skip


def add(b: Binder, ins: Instruction) -> Run:
    """``add``, ``sub`` and their carry and saturating forms."""
    kind = b.type_of(ins)
    if kind.name in FLOATS:
        return floating.arithmetic(b, ins)
    subtract = ins.opcode in ("sub", "subc")
    if ins.has("cc") or ins.opcode in ("addc", "subc"):
        return _with_carry(b, ins, kind)
    if kind.name in ("u16x2", "s16x2"):
        raise b.unsupported(ins)
    if ins.has("sat"):
        low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        wide = np.subtract if subtract else np.add

        def saturating(x: Any, y: Any) -> Any:
            return np.clip(wide(x.astype(np.int64), y.astype(np.int64)), low, high).astype(np.int32)

        return b.apply(ins, saturating, kind, kind)
    return b.apply(ins, np.subtract if subtract else np.add, kind, kind)


def _with_carry(b: Binder, ins: Instruction, kind: Type, product: Any = None) -> Run:
    """``add.cc``, ``subc``, ``madc``: the carry flag is a register, one bit per thread."""
    d, reads = b.write(ins.args[0]), b.reads(ins.args[1:], kind)
    takes, gives = ins.opcode in ("addc", "subc", "madc"), ins.has("cc")
    subtract = ins.opcode in ("sub", "subc")
    store = STORAGE[kind.nbytes]

    def run(m: Machine, i: Any) -> None:
        *factors, c = [x(m, i) for x in reads]
        a = (product(*factors) if product is not None else factors[0]).view(store)
        c = c.view(store)
        carry = m.carry if i is None or not m.carry.ndim else m.carry[i]
        extra = carry.astype(store) if takes else store(0)
        if subtract:  # the flag holds the borrow
            r = a - c
            out = (a < c) | (r < extra)
            r = r - extra
        else:
            r = a + c
            out = r < a
            r = r + extra
            out = out | (r < extra)
        d(m, i, r)
        if gives:
            m.set_carry(i, out)

    return run


def multiply(b: Binder, ins: Instruction) -> Run:
    """``mul``: low, high or wide product."""
    kind = b.type_of(ins)
    if kind.name in FLOATS:
        return floating.arithmetic(b, ins)
    return b.apply(ins, _product(ins, kind), kind, kind)


def _product(ins: Instruction, kind: Type) -> Callable[[Any, Any], Any]:
    if ins.opcode in ("mul24", "mad24"):
        return _product24(ins, kind)
    if ins.has("wide"):
        wide = _WIDE[kind.name].dtype
        return lambda x, y: x.astype(wide) * y.astype(wide)
    if ins.has("hi"):
        return lambda x, y: high_product(x, y, kind)
    return np.multiply


def _product24(ins: Instruction, kind: Type) -> Callable[[Any, Any], Any]:
    wide, shift = _WIDE[kind.name].dtype, np.array(16 if ins.has("hi") else 0)

    def product(x: Any, y: Any) -> Any:
        def cut(v: Any) -> Any:
            return (v << v.dtype.type(8)) >> v.dtype.type(8)

        p = cut(x).astype(wide) * cut(y).astype(wide)
        return (p >> shift.astype(wide)).astype(kind.dtype)

    return product


def high_product(x: Any, y: Any, kind: Type) -> Any:
    """Return the upper half of a product."""
    if kind.nbytes < 8:
        wide = _WIDE[kind.name].dtype
        return ((x.astype(wide) * y.astype(wide)) >> np.array(8 * kind.nbytes).astype(wide)).astype(
            kind.dtype
        )
    a, c = x.view(np.uint64), y.view(np.uint64)
    low, s = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, c0, c1 = a & low, a >> s, c & low, c >> s
    middle = (a0 * c0 >> s) + (a1 * c0 & low)
    cross = a0 * c1 + middle  # at most (2**32-1)**2 + 2*(2**32-1): no overflow
    r = a1 * c1 + (a1 * c0 >> s) + (cross >> s)
    if kind.kind == "s":
        r = r - np.where(x < 0, c, np.uint64(0)) - np.where(y < 0, a, np.uint64(0))
    return r.view(kind.dtype)


def multiply_add(b: Binder, ins: Instruction) -> Run:
    """``mad`` in its low, high, wide and carry forms."""
    kind = b.type_of(ins)
    if kind.name in FLOATS:
        return floating.fma(b, ins)
    product = _product(ins, kind)
    third = _WIDE[kind.name] if ins.has("wide") else kind
    if ins.has("cc") or ins.opcode == "madc":
        return _with_carry(b, ins, kind, product)
    if ins.has("sat"):
        raise b.unsupported(ins)
    return b.apply(ins, lambda x, y, z: product(x, y) + z, kind, kind, third)


def divide(b: Binder, ins: Instruction) -> Run:
    """``div`` and ``rem``; a zero divisor gives all ones, and the dividend, as on hardware."""
    kind = b.type_of(ins)
    if kind.name in FLOATS:
        return floating.divide(b, ins)
    remainder = ins.opcode == "rem"
    store = STORAGE[kind.nbytes]
    ones = store((1 << 8 * kind.nbytes) - 1).view(kind.dtype)

    def unsigned(x: Any, y: Any) -> Any:
        zero = y == 0
        safe = np.where(zero, kind.dtype(1), y)
        q = x // safe
        return np.where(zero, x, x - q * safe) if remainder else np.where(zero, ones, q)

    def signed(x: Any, y: Any) -> Any:  # truncates; on magnitudes, so that -2**31 is safe
        a, c = np.abs(x).view(store), np.abs(y).view(store)
        zero = c == 0
        safe = np.where(zero, store(1), c)
        q = a // safe
        if remainder:
            r = np.where(zero, a, a - q * safe).view(kind.dtype)
            return np.where(x < 0, -r, r)
        q = q.view(kind.dtype)
        return np.where(zero, ones, np.where((x < 0) != (y < 0), -q, q))

    return b.apply(ins, signed if kind.kind == "s" else unsigned, kind, kind)


def minmax(b: Binder, ins: Instruction) -> Run:
    """``min`` and ``max``."""
    kind = b.type_of(ins)
    if kind.name in FLOATS:
        return floating.minmax(b, ins)
    if ins.has("relu"):
        raise b.unsupported(ins)
    return b.apply(ins, np.minimum if ins.opcode == "min" else np.maximum, kind, kind)


def unary(b: Binder, ins: Instruction) -> Run:
    """``neg`` and ``abs``."""
    kind = b.type_of(ins)
    if kind.name in FLOATS:
        return floating.sign(b, ins)
    return b.apply(ins, np.negative if ins.opcode == "neg" else np.abs, kind)


def sad(b: Binder, ins: Instruction) -> Run:
    """``sad``: ``c + |a - b|``."""
    kind = b.type_of(ins)
    return b.apply(ins, lambda x, y, z: z + np.where(x < y, y - x, x - y), kind, kind, kind)


def logic(b: Binder, ins: Instruction) -> Run:
    """``and or xor not cnot``."""
    kind = b.type_of(ins)
    if ins.opcode == "not":
        return b.apply(ins, np.invert, kind)
    if ins.opcode == "cnot":
        return b.apply(ins, lambda x: (x == 0).astype(kind.dtype), kind)
    f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[ins.opcode]
    return b.apply(ins, f, kind, kind)


def shift(b: Binder, ins: Instruction) -> Run:
    """``shl`` and ``shr``: counts past the width empty the register (or fill it with the sign)."""
    kind = b.type_of(ins)
    bits, dtype = 8 * kind.nbytes, kind.dtype
    left = ins.opcode == "shl"
    amount = ins.args[2]
    if isinstance(amount, Imm):
        n = amount.value & 0xFFFFFFFF
        if n < bits:
            by = dtype(n)
            d, x = b.write(ins.args[0]), b.read(ins.args[1], kind)
            if left:
                return lambda m, i: d(m, i, x(m, i) << by)
            return lambda m, i: d(m, i, x(m, i) >> by)

    def f(x: Any, n: Any) -> Any:
        last = np.minimum(n, bits - 1).astype(dtype)
        if kind.kind == "s" and not left:
            return x >> last
        return np.where(n >= bits, dtype(0), x << last if left else x >> last)

    return b.apply(ins, f, kind, TYPES["u32"])


def funnel_shift(b: Binder, ins: Instruction) -> Run:
    """``shf``: 32 bits out of 64 shifted, the count wrapped or clamped."""
    wrap, left = ins.has("wrap"), ins.has("l")
    u = TYPES["u32"]

    def f(low: Any, high: Any, n: Any) -> Any:
        n = n.astype(np.uint64)
        n = n & np.uint64(31) if wrap else np.minimum(n, np.uint64(32))
        v = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        return ((v << n) >> np.uint64(32) if left else v >> n).astype(np.uint32)

    return b.apply(ins, f, u, u, u)


def lop3(b: Binder, ins: Instruction) -> Run:
    """``lop3``: any function of three bits, given by its truth table."""
    table = ins.args[4]
    if not isinstance(table, Imm) or isinstance(ins.args[0], Pair):
        raise b.unsupported(ins)
    f = truth_table(table.value & 255)
    d = b.write(ins.args[0])
    x, y, z = b.reads(ins.args[1:4], TYPES["b32"])
    return lambda m, i: d(m, i, f(x(m, i), y(m, i), z(m, i)))


def truth_table(table: int) -> Callable[[Any, Any, Any], Any]:
    """Return the bitwise function with this table: bit ``4a + 2b + c`` of it is the result."""
    known: dict[int, Callable[[Any, Any, Any], Any]] = {
        0x80: lambda a, b, c: a & b & c,
        0xFE: lambda a, b, c: a | b | c,
        0x96: lambda a, b, c: a ^ b ^ c,
        0xEA: lambda a, b, c: (a & b) | c,
        0xF8: lambda a, b, c: a | (b & c),
        0xCA: lambda a, b, c: (a & b) | (~a & c),
        0xC0: lambda a, b, c: a & b,
        0xF0: lambda a, b, c: a + np.uint32(0),  # a copy: registers never share an array
        0xCC: lambda a, b, c: b + np.uint32(0),
        0xAA: lambda a, b, c: c + np.uint32(0),
    }
    if table in known:
        return known[table]

    def f(a: Any, b: Any, c: Any) -> Any:
        def mux(s: Any, one: Any, zero: Any) -> Any:  # s ? one : zero, of constants or arrays
            if one is zero:
                return one
            if isinstance(one, int) and isinstance(zero, int):
                return s if one else ~s
            if isinstance(zero, int):
                return s & one if not zero else ~s | one
            if isinstance(one, int):
                return s | zero if one else ~s & zero
            return (s & one) | (~s & zero)

        bit = [table >> k & 1 for k in range(8)]
        on_c = [mux(c, bit[2 * k + 1], bit[2 * k]) for k in range(4)]
        on_b = [mux(b, on_c[2 * k + 1], on_c[2 * k]) for k in range(2)]
        r = mux(a, on_b[1], on_b[0])
        return np.uint32(0xFFFFFFFF if r else 0) if isinstance(r, int) else r

    return f


def permute(b: Binder, ins: Instruction) -> Run:
    """``prmt``: any four of eight bytes, or one of the fixed patterns."""
    u = TYPES["b32"]
    mode = ins.one_of("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")

    def f(low: Any, high: Any, s: Any) -> Any:
        v = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        r: Any = np.uint32(0)
        for k in range(4):
            pick = _byte_number(mode, k, s) if mode else (s >> np.uint32(4 * k)) & np.uint32(7)
            byte = ((v >> (pick.astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(
                np.uint32
            )
            if not mode:
                sign = (s >> np.uint32(4 * k + 3)) & np.uint32(1)
                byte = np.where(sign != 0, (byte >> np.uint32(7)) * np.uint32(255), byte)
            r = r | (byte << np.uint32(8 * k))
        return r

    return b.apply(ins, f, u, u, u)


def _byte_number(mode: str, k: int, s: Any) -> Any:
    """Return which of the eight bytes lands in byte `k` in a fixed ``prmt`` mode."""
    s = s & np.uint32(3)
    k32 = np.uint32(k)
    if mode == "f4e":
        return s + k32
    if mode == "b4e":
        return (s - k32) & np.uint32(7)
    if mode == "rc8":
        return s
    if mode == "ecl":
        return np.maximum(s, k32)
    if mode == "ecr":
        return np.minimum(s, k32)
    return (s & np.uint32(1)) * np.uint32(2) + np.uint32(k & 1)


def extract_field(b: Binder, ins: Instruction) -> Run:
    """``bfe``: a bit field, sign-extended for signed types."""
    kind = b.type_of(ins)
    bits, store = 8 * kind.nbytes, np.uint64
    u = TYPES["u32"]

    def f(x: Any, start: Any, length: Any) -> Any:
        v = x.view(STORAGE[kind.nbytes]).astype(store)
        p, n = (start & np.uint32(255)).astype(np.int64), (length & np.uint32(255)).astype(np.int64)
        mask = _ones(n)
        r = np.where(p >= 64, store(0), v >> np.minimum(p, 63).astype(store)) & mask
        if kind.kind == "s":
            last = np.minimum(p + n - 1, bits - 1)
            sign = (v >> np.maximum(last, 0).astype(store)) & store(1)
            keep = _ones(np.clip(np.minimum(n, bits - p), 0, 64))
            r = np.where((sign != 0) & (n > 0), r | ~keep, r & mask)
        return r.astype(STORAGE[kind.nbytes]).view(kind.dtype)

    return b.apply(ins, f, kind, u, u)


def insert_field(b: Binder, ins: Instruction) -> Run:
    """``bfi``: put the low bits of one register into another."""
    kind = b.type_of(ins)
    u = TYPES["u32"]

    def f(x: Any, y: Any, start: Any, length: Any) -> Any:
        p, n = (start & np.uint32(255)).astype(np.int64), (length & np.uint32(255)).astype(np.int64)
        by = np.minimum(p, 63).astype(np.uint64)
        mask = np.where(p >= 64, np.uint64(0), _ones(n) << by)
        r = (y.astype(np.uint64) & ~mask) | ((x.astype(np.uint64) << by) & mask)
        return r.astype(STORAGE[kind.nbytes])

    return b.apply(ins, f, kind, kind, u, u)


def _ones(n: Any) -> Any:
    """Return masks of `n` one bits, 0 to 64."""
    return np.where(
        n >= 64,
        np.uint64(2**64 - 1),
        (np.uint64(1) << np.clip(n, 0, 63).astype(np.uint64)) - np.uint64(1),
    )


def bit_mask(b: Binder, ins: Instruction) -> Run:
    """``bmsk``: a run of one bits."""
    wrap = ins.has("wrap")
    u = TYPES["u32"]

    def f(start: Any, length: Any) -> Any:
        p, n = start.astype(np.int64), length.astype(np.int64)
        if wrap:
            p, n = p & 31, n & 31
        r = np.where(
            p >= 32, np.uint64(0), _ones(np.minimum(n, 32)) << np.minimum(p, 31).astype(np.uint64)
        )
        return r.astype(np.uint32)

    return b.apply(ins, f, u, u)


def count_bits(b: Binder, ins: Instruction) -> Run:
    """``popc``, ``clz``, ``brev`` and ``bfind``."""
    kind = b.type_of(ins)
    bits = 8 * kind.nbytes
    if ins.opcode == "popc":
        return b.apply(ins, population, kind)
    if ins.opcode == "clz":
        return b.apply(ins, lambda x: (np.int64(bits - 1) - highest_bit(x)).astype(np.uint32), kind)
    if ins.opcode == "brev":
        return b.apply(ins, lambda x: reverse_bits(x, kind), kind)
    distance = ins.has("shiftamt")

    def find(x: Any) -> Any:
        v = np.where(x < 0, ~x, x).view(STORAGE[kind.nbytes]) if kind.kind == "s" else x
        k = highest_bit(v)
        r = np.where(k < 0, k, bits - 1 - k) if distance else k
        return r.astype(np.int32).view(np.uint32)

    return b.apply(ins, find, kind)


def population(x: Any) -> Any:
    """Return the number of one bits as uint32."""
    v = x.astype(np.uint64)
    for s, mask in ((1, 0x55), (2, 0x33), (4, 0x0F)):
        k = np.uint64(int.from_bytes(bytes([mask]) * 8, "little"))
        v = (v & k) + ((v >> np.uint64(s)) & k)
    return ((v * np.uint64(0x0101010101010101)) >> np.uint64(56)).astype(np.uint32)


def highest_bit(x: Any) -> Any:
    """Return the position of the highest one bit as int64, -1 for zero."""
    v = x.astype(np.uint64)
    r = np.zeros(v.shape, np.int64)
    for s in (32, 16, 8, 4, 2, 1):
        up = (v >> np.uint64(s)) != 0
        r = r + np.where(up, s, 0)
        v = np.where(up, v >> np.uint64(s), v)
    return np.where(v == 0, np.int64(-1), r)


def reverse_bits(x: Any, kind: Type) -> Any:
    """Return the bits in opposite order."""
    store = STORAGE[kind.nbytes]
    v = x.view(store)
    for s, mask in ((1, 0x55), (2, 0x33), (4, 0x0F)):
        k = store(int.from_bytes(bytes([mask]) * kind.nbytes, "little"))
        n = store(s)
        v = ((v >> n) & k) | ((v & k) << n)
    return v.byteswap()


def dot_product(b: Binder, ins: Instruction) -> Run:
    """``dp4a`` and ``dp2a``: products of bytes (and half words), added to a 32-bit sum."""
    first, second = ins.types[:2]
    four = ins.opcode == "dp4a"
    d = b.write(ins.args[0])
    x, y, z = b.reads(ins.args[1:4], TYPES["b32"])
    high = ins.has("hi")

    def parts(v: Any, kind: Type, width: int) -> list[Any]:
        table = SIGNED if kind.kind == "s" else STORAGE
        cut = [(v >> np.uint32(8 * width * k)).astype(STORAGE[width]) for k in range(4 // width)]
        return [x.view(table[width]).astype(np.int32) for x in cut]

    def run(m: Machine, i: Any) -> None:
        p = parts(x(m, i), first, 1 if four else 2)
        q = parts(y(m, i), second, 1)
        if not four:
            q = q[2:] if high else q[:2]
        r = z(m, i).view(np.int32)
        for a, c in zip(p, q, strict=True):
            r = r + a * c
        d(m, i, r)

    return run
