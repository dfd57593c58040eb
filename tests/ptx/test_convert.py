"""Conversions, comparisons and moves against exact references, on edge values."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from ptx.exact import decode, encode, round_to
from ptx.one_instruction import as_bits, execute, products
from ptx.test_float import WIDTH, check, near, samples
from ptx.test_integer import EDGES, signed

INTS = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]


@pytest.mark.parametrize(
    ("to", "source", "mode"),
    [("f32", "f64", m) for m in ("rn", "rz", "rm", "rp")]
    + [("f16", "f32", m) for m in ("rn", "rz")]
    + [("bf16", "f32", m) for m in ("rn", "rz")]
    + [
        ("f16", "f64", "rn"),
        ("f64", "f32", ""),
        ("f32", "f16", ""),
        ("f32", "bf16", ""),
        ("f64", "f16", ""),
    ],
)
def test_float_to_float(to: str, source: str, mode: str) -> None:
    a = np.concatenate([samples(source, 400, 1), near(source, 400, 2)])
    if source == "f64" and to == "f32":  # half of them within float32's range
        a = np.concatenate(
            [
                a,
                as_bits(
                    samples("f32", 300, 3).view(np.float32).astype(np.float64) * (1 + 2.0**-30)
                ),
            ]
        )
    got = execute(f"cvt{'.' + mode if mode else ''}.{to}.{source} %d0, %a0;", [a], f"u{WIDTH[to]}")
    want = []
    for bits in a.tolist():
        x = decode(bits, source)
        rounded = (
            math.copysign(round_to(Fraction(x), to, mode or "rn"), x) if math.isfinite(x) else x
        )
        want.append(rounded)
    check(to, got, want)


@pytest.mark.parametrize(
    ("to", "mode"), list(itertools.product(INTS, ["rni", "rzi", "rmi", "rpi"]))
)
def test_float_to_int(to: str, mode: str) -> None:
    """Out of range clamps; NaN is zero, or the top bit alone when 64 bits are involved."""
    bits = int(to[1:])
    width = max(bits // 8, 2)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
    rounders = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    extra = [
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        127.5,
        128,
        255.5,
        256,
        32767.5,
        65535.5,
        2**31,
        2**31 - 128,
        2**32,
        -(2.0**31),
        2.0**63,
        -(2.0**63),
        2.0**64,
        1e30,
    ]
    for source in ("f32", "f64"):
        kind = np.float32 if source == "f32" else np.float64
        a = np.concatenate([samples(source, 50, 1), as_bits(np.array(extra, kind))])
        got = execute(f"cvt.{mode}.{to}.{source} %d0, %a0;", [a], f"u{width}")
        for x, g in zip(a.tolist(), got.tolist(), strict=True):
            v = decode(x, source)
            if math.isnan(v):
                want = 1 << (bits - 1) if source == "f64" or bits == 64 else 0
                want = signed(want, bits) if to[0] == "s" else want
            elif math.isinf(v):
                want = high if v > 0 else low
            else:
                want = max(low, min(high, rounders[mode](v)))
            assert g == want % (1 << 8 * width), (v, source)


@pytest.mark.parametrize(
    ("source", "mode"),
    list(itertools.product(["u32", "s32", "u64", "s64"], ["rn", "rz", "rm", "rp"])),
)
def test_int_to_float(source: str, mode: str) -> None:
    bits = int(source[1:])
    rng = np.random.default_rng(5)
    a = np.concatenate(
        [
            EDGES[bits],
            rng.integers(0, 2**bits - 1, 300, f"u{bits // 8}")
            >> rng.integers(0, bits, 300).astype(f"u{bits // 8}"),
        ]
    )
    for to in ("f16", "f32", "f64"):
        got = execute(f"cvt.{mode}.{to}.{source} %d0, %a0;", [a], f"u{WIDTH[to]}")
        values = [signed(x, bits) if source[0] == "s" else x for x in a.tolist()]
        check(to, got, [round_to(Fraction(v), to, mode) for v in values])


@pytest.mark.parametrize(("to", "source"), list(itertools.product(INTS, INTS)))
def test_int_to_int(to: str, source: str) -> None:
    to_bits, bits = int(to[1:]), int(source[1:])
    a = np.unique(
        np.concatenate(
            [EDGES[w].astype(np.uint64) & np.uint64((1 << bits) - 1) for w in (16, 32, 64)]
        )
    )
    a = a.astype(f"u{max(bits // 8, 2)}")
    width = max(to_bits // 8, 2)
    got, clipped = execute(
        f"cvt.{to}.{source} %d0, %a0; cvt.sat.{to}.{source} %d1, %a0;", [a], *[f"u{width}"] * 2
    )
    low, high = (
        (-(1 << to_bits - 1), (1 << to_bits - 1) - 1) if to[0] == "s" else (0, (1 << to_bits) - 1)
    )
    for x, g, c in zip(a.tolist(), got.tolist(), clipped.tolist(), strict=True):
        v = signed(x, bits) if source[0] == "s" else x
        cut = v % (1 << to_bits)
        cut = signed(cut, to_bits) if to[0] == "s" else cut
        assert g == cut % (1 << 8 * width)
        assert c == max(low, min(high, v)) % (1 << 8 * width)


def test_packed_conversions() -> None:
    a, b = samples("f32", 300, 1), samples("f32", 300, 2)
    for name in ("f16", "bf16"):
        got = (
            execute(f"cvt.rn.{name}x2.f32 %d0, %a0, %a1;", [a, b], np.uint32)
            .view(np.uint16)
            .reshape(-1, 2)
        )
        for part, source in ((got[:, 1], a), (got[:, 0], b)):  # the first operand is the upper half
            values = [decode(x, "f32") for x in source.tolist()]
            check(
                name,
                part,
                [
                    math.copysign(round_to(Fraction(v), name), v) if math.isfinite(v) else v
                    for v in values
                ],
            )
    relu = execute(
        "cvt.rn.relu.f16x2.f32 %d0, %a0, %a1;",
        [as_bits(np.array([-2.0], np.float32)), as_bits(np.array([2.0], np.float32))],
        np.uint32,
    )
    assert relu[0] == 0x00004000


def fp8(code: int, name: str) -> float:
    """Decode one 8-bit float from its definition (OCP 8-bit floating point, 2023)."""
    e_bits, m_bits, bias = (4, 3, 7) if name == "e4m3" else (5, 2, 15)
    e, m = code >> m_bits & (1 << e_bits) - 1, code & (1 << m_bits) - 1
    sign = -1.0 if code & 128 else 1.0
    if name == "e4m3" and e == 15 and m == 7:
        return math.nan
    if name == "e5m2" and e == 31:
        return math.nan if m else sign * math.inf
    return sign * (
        m / 2**m_bits * 2.0 ** (1 - bias) if e == 0 else (1 + m / 2**m_bits) * 2.0 ** (e - bias)
    )


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_eight_bit_floats(name: str) -> None:
    codes = np.arange(256, dtype=np.uint16) | (np.arange(255, -1, -1, dtype=np.uint16) << 8)
    got = (
        execute(f"cvt.rn.f16x2.{name}x2 %d0, %a0;", [codes], np.uint32)
        .view(np.float16)
        .reshape(-1, 2)
    )
    np.testing.assert_array_equal(got[:, 0], [fp8(k, name) for k in range(256)])
    np.testing.assert_array_equal(got[:, 1], [fp8(255 - k, name) for k in range(256)])
    finite = sorted({fp8(k, name) for k in range(128) if math.isfinite(fp8(k, name))})
    middle = [(p + q) / 2 for p, q in itertools.pairwise(finite)]
    x = np.array([*finite, *middle, *(v * 1.001 for v in middle), 1e6, math.inf], np.float32)
    packed = execute(f"cvt.rn.satfinite.{name}x2.f32 %d0, %a0, %a0;", [as_bits(x)], np.uint16)
    for v, g in zip(x.tolist(), packed.tolist(), strict=True):
        nearest = (
            min(finite, key=lambda f: (abs(f - v), finite.index(f) % 2))
            if math.isfinite(v)
            else finite[-1]
        )
        assert fp8(g & 255, name) == nearest, v
        assert g >> 8 == g & 255


def test_tf32() -> None:
    x = np.array([1 + 2**-11, 1 + 2**-11 + 2**-23, -(1 + 2**-11), 1 + 2**-12, np.inf], np.float32)
    got = execute("cvt.rna.tf32.f32 %d0, %a0;", [as_bits(x)], np.uint32).view(np.float32)
    np.testing.assert_array_equal(got, [1 + 2**-10, 1 + 2**-10, -(1 + 2**-10), 1, np.inf])


COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64"]
)
def test_compare(kind: str) -> None:
    bits = int(kind.lstrip("busf"))
    is_float = "f" in kind
    few = samples(kind, 3, 1) if is_float else EDGES[bits]
    a, b = products(few, few)

    def value(x: int) -> float:
        return decode(x, kind) if is_float else (signed(x, bits) if kind[0] == "s" else x)

    pairs = [(value(x), value(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    nan = [any(isinstance(v, float) and math.isnan(v) for v in p) for p in pairs]
    names = list(COMPARISONS) + (
        [f"{c}u" for c in COMPARISONS] + ["num", "nan"] if is_float else []
    )
    for name in names:
        got = execute(
            f"setp.{name}.{kind} %q|%q2, %a0, %a1;selp.u32 %d0, 1, 0, %q; selp.u32 %d1, 1, 0, %q2;",
            [a, b],
            np.uint32,
            np.uint32,
        )
        if name in ("num", "nan"):
            want = [n == (name == "nan") for n in nan]
        else:
            f = COMPARISONS[name[:2]]
            want = [
                (name.endswith("u") and len(name) == 3) if n else f(*p)
                for p, n in zip(pairs, nan, strict=True)
            ]
        assert got[0].tolist() == want, name
        assert got[1].tolist() == [not w for w in want], name


def test_compare_and_combine() -> None:
    a, b = products(np.array([1, 2, 3], np.uint32), np.array([2], np.uint32))
    for join, f in (
        ("and", lambda x, y: x and y),
        ("or", lambda x, y: x or y),
        ("xor", lambda x, y: x != y),
    ):
        body = f"""setp.gt.u32 %q2, %a0, 1; setp.lt.{join}.u32 %q, %a0, %a1, !%q2;
            selp.u32 %d0, 1, 0, %q;"""
        assert execute(body, [a, b], np.uint32).tolist() == [f(x < 2, not x > 1) for x in (1, 2, 3)]


def test_select() -> None:
    a, b = np.arange(4, dtype=np.uint32), np.arange(4, dtype=np.uint32) + 10
    c = as_bits(np.array([-1.0, 0.0, -0.0, np.nan], np.float32))
    assert execute("slct.u32.f32 %d0, %a0, %a1, %a2;", [a, b, c], np.uint32).tolist() == [
        10,
        1,
        2,
        13,
    ]
    assert execute("slct.u32.s32 %d0, %a0, %a1, %a2;", [a, b, c], np.uint32).tolist() == [
        10,
        1,
        12,
        3,
    ]
    ones, one = execute(
        "set.lt.u32.u32 %d0, %a0, 2; set.lt.f32.u32 %d1, %a0, 2;", [a], np.uint32, np.uint32
    )
    assert ones.tolist() == [2**32 - 1, 2**32 - 1, 0, 0]
    assert one.view(np.float32).tolist() == [1, 1, 0, 0]


def test_move_packs_and_unpacks() -> None:
    a, b = np.array([0x11223344], np.uint32), np.array([0x55667788], np.uint32)
    assert execute("mov.b64 %d0, {%a0, %a1};", [a, b], np.uint64)[0] == 0x5566778811223344
    got = execute(
        "mov.b32 {%h0, %h1}, %a0; mov.b32 %d0, {%h1, %h0};",
        [a],
        np.uint32,
        declare=".reg .b16 %h<2>;",
    )
    assert got[0] == 0x33441122
    literals = execute(
        "mov.f32 %d0, 0fC0000000; mov.f64 %d1, 0d3FF8000000000000;"
        "mov.u32 %d2, -1; mov.b16 %d3, 0x3C00;",
        [a],
        np.uint32,
        np.uint64,
        np.uint32,
        np.uint16,
    )
    assert [int(v[0]) for v in literals] == [0xC0000000, 0x3FF8000000000000, 0xFFFFFFFF, 0x3C00]
    assert encode(1.5, "f64") == int(literals[1][0])
