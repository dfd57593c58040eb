"""Integer instructions against Python's integers, on edge values."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from ptx.one_instruction import execute, products

EDGES = {
    w: np.array(
        [
            0,
            1,
            2,
            3,
            7,
            (1 << w - 1) - 1,
            1 << w - 1,
            (1 << w - 1) + 1,
            (1 << w) - 2,
            (1 << w) - 1,
            0x5A % (1 << w),
            0xC3A5C3A5C3A5C3A5 % (1 << w),
        ],
        dtype=f"u{w // 8}",
    )
    for w in (16, 32, 64)
}


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def value(x: int, kind: str) -> int:
    bits = int(kind[1:])
    return signed(x, bits) if kind[0] == "s" else x


def trunc_div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def quotient(a: int, b: int, w: int) -> int:
    return trunc_div(a, b) if b else -1


def remainder(a: int, b: int, w: int) -> int:
    return a - b * trunc_div(a, b) if b else a


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


TWO: dict[str, tuple[list[str], Callable[[int, int, int], int]]] = {
    "add": (["u16", "s16", "u32", "s32", "u64", "s64"], lambda a, b, w: a + b),
    "sub": (["u16", "s16", "u32", "s32", "u64", "s64"], lambda a, b, w: a - b),
    "add.sat": (["s32"], lambda a, b, w: clamp(a + b, -(2**31), 2**31 - 1)),
    "sub.sat": (["s32"], lambda a, b, w: clamp(a - b, -(2**31), 2**31 - 1)),
    "mul.lo": (["u16", "s16", "u32", "s32", "u64", "s64"], lambda a, b, w: a * b),
    "mul.hi": (["u16", "s16", "u32", "s32", "u64", "s64"], lambda a, b, w: (a * b) >> w),
    "min": (["u16", "s16", "u32", "s32", "u64", "s64"], lambda a, b, w: min(a, b)),
    "max": (["u16", "s16", "u32", "s32", "u64", "s64"], lambda a, b, w: max(a, b)),
    "and": (["b16", "b32", "b64"], lambda a, b, w: a & b),
    "or": (["b16", "b32", "b64"], lambda a, b, w: a | b),
    "xor": (["b16", "b32", "b64"], lambda a, b, w: a ^ b),
    "div": (["u16", "s16", "u32", "s32", "u64", "s64"], quotient),
    "rem": (["u16", "s16", "u32", "s32", "u64", "s64"], remainder),
}


@pytest.mark.parametrize(("op", "kind"), [(o, k) for o, (ks, _) in TWO.items() for k in ks])
def test_two_operands(op: str, kind: str) -> None:
    bits = int(kind[1:])
    a, b = products(EDGES[bits], EDGES[bits])
    got = execute(f"{op}.{kind} %d0, %a0, %a1;", [a, b], a.dtype)
    f = TWO[op][1]
    want = [
        f(value(int(x), kind), value(int(y), kind), bits) % (1 << bits)
        for x, y in zip(a, b, strict=True)
    ]
    assert got.tolist() == want


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind: str) -> None:
    bits = int(kind[1:])
    a, b = products(EDGES[bits], EDGES[bits])
    wide = np.dtype(f"u{bits // 4}")
    c = np.full(len(a), 5, wide)
    got, added = execute(
        f"mul.wide.{kind} %d0, %a0, %a1; mad.wide.{kind} %d1, %a0, %a1, %a2;", [a, b, c], wide, wide
    )
    want = [value(int(x), kind) * value(int(y), kind) for x, y in zip(a, b, strict=True)]
    assert got.tolist() == [w % (1 << 2 * bits) for w in want]
    assert added.tolist() == [(w + 5) % (1 << 2 * bits) for w in want]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_multiply_add(kind: str) -> None:
    bits = int(kind[1:])
    a, b, c = products(EDGES[bits], EDGES[bits], EDGES[bits][[0, 1, 6, 9]])
    low, high = execute(
        f"mad.lo.{kind} %d0, %a0, %a1, %a2; mad.hi.{kind} %d1, %a0, %a1, %a2;",
        [a, b, c],
        a.dtype,
        a.dtype,
    )
    p = [value(int(x), kind) * value(int(y), kind) for x, y in zip(a, b, strict=True)]
    assert low.tolist() == [(x + int(z)) % (1 << bits) for x, z in zip(p, c, strict=True)]
    assert high.tolist() == [
        ((x >> bits) + int(z)) % (1 << bits) for x, z in zip(p, c, strict=True)
    ]


def test_mul24() -> None:
    a, b = products(EDGES[32], EDGES[32])
    got = execute("mul24.lo.s32 %d0, %a0, %a1;", [a, b], np.uint32)
    cut = [signed(int(x) % 2**24, 24) for x in EDGES[32]]
    assert got.tolist() == [x * y % 2**32 for x, y in itertools.product(cut, cut)]


@pytest.mark.parametrize("chain", ["add", "sub"])
def test_carry_chain(chain: str) -> None:
    """128-bit sums and differences of 64-bit halves, each in two 32-bit instructions."""
    a, b = products(EDGES[64], EDGES[64])
    body = f"""{chain}.cc.u32 %x0, %l0, %l1; {chain}c.cc.u32 %x1, %h0, %h1;
               {chain}c.u32 %x2, 0, 0; mov.b64 %d0, {{%x0, %x1}}; mov.u32 %d1, %x2;"""
    split = "mov.b64 {%l0, %h0}, %a0; mov.b64 {%l1, %h1}, %a1;"
    got, carry = execute(
        split + body, [a, b], np.uint64, np.uint32, declare=".reg .b32 %l<2>, %h<2>, %x<3>;"
    )
    for x, y, g, c in zip(a.tolist(), b.tolist(), got.tolist(), carry.tolist(), strict=True):
        exact = x + y if chain == "add" else x - y
        assert g == exact % 2**64
        assert signed(c, 32) == exact >> 64


def test_multiply_with_carry() -> None:
    """A 64 x 64 -> 128 bit product from 32-bit ``mad.cc`` and ``madc``, as compilers expand it."""
    a, b = products(EDGES[64], EDGES[64])
    body = """mov.b64 {%l0, %h0}, %a0; mov.b64 {%l1, %h1}, %a1;
        mul.lo.u32 %x0, %l0, %l1; mul.hi.u32 %x1, %l0, %l1;
        mad.lo.cc.u32 %x1, %h0, %l1, %x1; madc.hi.u32 %x2, %h0, %l1, 0;
        mad.lo.cc.u32 %x1, %l0, %h1, %x1; madc.hi.cc.u32 %x2, %l0, %h1, %x2; addc.u32 %x3, 0, 0;
        mad.lo.cc.u32 %x2, %h0, %h1, %x2; madc.hi.u32 %x3, %h0, %h1, %x3;
        mov.b64 %d0, {%x0, %x1}; mov.b64 %d1, {%x2, %x3};"""
    low, high = execute(
        body, [a, b], np.uint64, np.uint64, declare=".reg .b32 %l<2>, %h<2>, %x<4>;"
    )
    for x, y, lo, hi in zip(a.tolist(), b.tolist(), low.tolist(), high.tolist(), strict=True):
        assert (hi << 64) + lo == x * y


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "u32", "s16", "s32", "s64"])
def test_shifts(kind: str) -> None:
    bits = int(kind[1:])
    counts = np.array([0, 1, bits - 1, bits, bits + 1, 255, 2**32 - 1], np.uint32)
    a, n = products(EDGES[bits], counts)
    got = execute(f"shr.{kind} %d0, %a0, %a1;", [a, n], a.dtype)
    pairs = list(zip(a.tolist(), n.tolist(), strict=True))
    assert got.tolist() == [(value(x, kind) >> min(s, 64)) % (1 << bits) for x, s in pairs]
    if kind[0] == "b":
        got = execute(f"shl.{kind} %d0, %a0, %a1;", [a, n], a.dtype)
        assert got.tolist() == [(x << min(s, 64)) % (1 << bits) for x, s in pairs]
        for s in (0, 3, bits - 1, bits, 1000):  # literal counts take another path
            got = execute(f"shl.{kind} %d0, %a0, {s};", [a], a.dtype)
            assert got.tolist() == [(x << s) % (1 << bits) for x in a.tolist()]


@pytest.mark.parametrize("mode", ["l.wrap", "l.clamp", "r.wrap", "r.clamp"])
def test_funnel_shift(mode: str) -> None:
    a, b, n = products(EDGES[32], EDGES[32], np.array([0, 1, 31, 32, 33, 100], np.uint32))
    got = execute(f"shf.{mode}.b32 %d0, %a0, %a1, %a2;", [a, b, n], np.uint32)
    for low, high, s, g in zip(a.tolist(), b.tolist(), n.tolist(), got.tolist(), strict=True):
        s = s & 31 if mode.endswith("wrap") else min(s, 32)
        v = (high << 32) | low
        assert g == ((v << s) >> 32 if mode[0] == "l" else v >> s) % 2**32


def test_lop3_every_table() -> None:
    a, b, c = (np.array([v], np.uint32) for v in (0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA))
    for table in range(256):
        got = execute(f"lop3.b32 %d0, %a0, %a1, %a2, {table};", [a, b, c], np.uint32)
        assert got[0] == table * 0x01010101, table


def test_lop3_keeps_registers_apart() -> None:
    """A table that copies an operand must not tie the two registers together."""
    a = np.arange(64, dtype=np.uint32)
    body = "lop3.b32 %d0, %a0, 0, 0, 0xF0; setp.lt.u32 %q, %t, 10; @%q mov.u32 %a0, 7;"
    assert execute(body, [a], np.uint32).tolist() == a.tolist()
    assert (
        execute(
            "mov.u32 %d0, %a0; setp.lt.u32 %q, %t, 10; @%q mov.u32 %a0, 7;", [a], np.uint32
        ).tolist()
        == a.tolist()
    )


def test_permute() -> None:
    a, b = np.array([0x83828180], np.uint32), np.array([0x07060504], np.uint32)
    source = [0x80, 0x81, 0x82, 0x83, 4, 5, 6, 7]
    for pick in (0x3210, 0x7654, 0x0123, 0xFEDC, 0xBA98, 0x4140, 0x8F07):
        got = int(execute(f"prmt.b32 %d0, %a0, %a1, {pick};", [a, b], np.uint32)[0])
        for k in range(4):
            s = pick >> 4 * k & 15
            byte = source[s & 7]
            want = (255 if byte & 128 else 0) if s & 8 else byte
            assert got >> 8 * k & 255 == want, hex(pick)
    modes = {
        "f4e": lambda s, k: s + k, "b4e": lambda s, k: (s - k) % 8, "rc8": lambda s, k: s,
        "ecl": max, "ecr": min, "rc16": lambda s, k: (s & 1) * 2 + (k & 1),
    }  # fmt: skip
    for mode, f in modes.items():
        for s in range(4):
            got = int(execute(f"prmt.b32.{mode} %d0, %a0, %a1, {s};", [a, b], np.uint32)[0])
            assert [got >> 8 * k & 255 for k in range(4)] == [source[f(s, k)] for k in range(4)], (
                mode
            )


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind: str) -> None:
    bits = int(kind[1:])
    a, p, n = products(
        EDGES[bits],
        np.array([0, 1, 5, bits - 1, bits, 255], np.uint32),
        np.array([0, 1, 8, bits - 1, bits, 200], np.uint32),
    )
    got = execute(f"bfe.{kind} %d0, %a0, %a1, %a2;", [a, p, n], a.dtype)
    for x, s, length, g in zip(a.tolist(), p.tolist(), n.tolist(), got.tolist(), strict=True):
        field = [x >> j & 1 if j < bits else None for j in range(s, s + length)]
        fill = 0
        if kind[0] == "s" and length:
            fill = x >> min(s + length - 1, bits - 1) & 1
        out = sum(
            (fill if j >= len(field) or field[j] is None else field[j]) << j for j in range(bits)
        )
        assert g == out, (hex(x), s, length)
    b = np.full(len(a), 0xA5A5A5A5A5A5A5A5 % (1 << bits), a.dtype)
    got = execute(f"bfi.b{bits} %d0, %a0, %a1, %a2, %a3;", [a, b, p, n], a.dtype)
    for x, y, s, length, g in zip(
        a.tolist(), b.tolist(), p.tolist(), n.tolist(), got.tolist(), strict=True
    ):
        for j in range(length):
            if s + j < bits:
                y = y & ~(1 << s + j) | (x >> j & 1 if j < bits else 0) << s + j
        assert g == y


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_bits(bits: int) -> None:
    a = np.concatenate([EDGES[bits], np.array([1 << j for j in range(bits)], f"u{bits // 8}")])
    body = f"popc.b{bits} %d0, %a0; clz.b{bits} %d1, %a0; brev.b{bits} %d2, %a0;"
    ones, zeros, back = execute(body, [a], np.uint32, np.uint32, a.dtype)
    texts = [format(x, f"0{bits}b") for x in a.tolist()]
    assert ones.tolist() == [t.count("1") for t in texts]
    assert zeros.tolist() == [len(t) - len(t.lstrip("0")) for t in texts]
    assert back.tolist() == [int(t[::-1], 2) for t in texts]
    for kind in "us":
        got, far = execute(
            f"bfind.{kind}{bits} %d0, %a0; bfind.shiftamt.{kind}{bits} %d1, %a0;",
            [a],
            np.uint32,
            np.uint32,
        )
        for x, g, d in zip(a.tolist(), got.tolist(), far.tolist(), strict=True):
            v = ~signed(x, bits) if kind == "s" and x >> (bits - 1) else x
            assert g == (v.bit_length() - 1) % 2**32
            assert d == ((bits - v.bit_length()) if v else 2**32 - 1)


@pytest.mark.parametrize("kinds", list(itertools.product(["u32", "s32"], ["u32", "s32"])))
def test_dot_products(kinds: tuple[str, str]) -> None:
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(0, 2**32, 500, dtype=np.uint32) for _ in range(3))
    ta, tb = ("i" if k[0] == "s" else "u" for k in kinds)
    x4, y4 = (
        a.view(f"{ta}1").reshape(-1, 4).astype(int),
        b.view(f"{tb}1").reshape(-1, 4).astype(int),
    )
    x2 = a.view(f"{ta}2").reshape(-1, 2).astype(int)
    body = "".join(
        f"{op}.{kinds[0]}.{kinds[1]} %d{k}, %a0, %a1, %a2; "
        for k, op in enumerate(("dp4a", "dp2a.lo", "dp2a.hi"))
    )
    four, low, high = execute(body, [a, b, c], np.uint32, np.uint32, np.uint32)
    base = c.astype(np.int64)
    for got, sums in (
        (four, (x4 * y4).sum(1)),
        (low, (x2 * y4[:, :2]).sum(1)),
        (high, (x2 * y4[:, 2:]).sum(1)),
    ):
        assert got.tolist() == ((base + sums) % 2**32).tolist()


def test_rest() -> None:
    a, b = products(EDGES[32], EDGES[32])
    c = np.full(len(a), 9, np.uint32)
    unsigned, sign = execute(
        "sad.u32 %d0, %a0, %a1, %a2; sad.s32 %d1, %a0, %a1, %a2;", [a, b, c], np.uint32, np.uint32
    )
    x, y = a.astype(np.int64), b.astype(np.int64)
    assert unsigned.tolist() == ((abs(x - y) + 9) % 2**32).tolist()
    x, y = a.view(np.int32).astype(np.int64), b.view(np.int32).astype(np.int64)
    assert sign.tolist() == ((abs(x - y) + 9) % 2**32).tolist()
    neg, size, inv, zero = execute(
        "neg.s32 %d0, %a0; abs.s32 %d1, %a0; not.b32 %d2, %a0; cnot.b32 %d3, %a0;",
        [a],
        *[np.uint32] * 4,
    )
    assert neg.tolist() == ((-x) % 2**32).tolist()
    assert size.tolist() == (abs(x) % 2**32).tolist()
    assert inv.tolist() == (~a).tolist()
    assert zero.tolist() == (a == 0).astype(int).tolist()
    start, length = products(
        np.array([0, 3, 31, 32, 40], np.uint32), np.array([0, 1, 32, 40], np.uint32)
    )
    clamped = execute("bmsk.clamp.b32 %d0, %a0, %a1;", [start, length], np.uint32)
    assert clamped.tolist() == [
        ((1 << min(n, 32)) - 1 << min(s, 32)) % 2**32
        for s, n in zip(start.tolist(), length.tolist(), strict=True)
    ]
