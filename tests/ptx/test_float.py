"""Float instructions against exact rational arithmetic, on edge values and random ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from ptx.exact import decode, encode, round_to
from ptx.one_instruction import as_bits, execute, products

WIDTH = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
EDGES = {
    "f32": [
        0.0,
        -0.0,
        1.0,
        -1.5,
        2**-126,
        -(2**-149),
        2**-130,
        3.4028234663852886e38,
        math.inf,
        -math.inf,
        math.nan,
        1 + 2**-23,
        16777217.0 - 2,
        2**-24,
        0.1,
    ],
    "f64": [
        0.0,
        -0.0,
        1.0,
        -1.5,
        2**-1022,
        -5e-324,
        2**-1050,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        math.nan,
        1 + 2**-52,
        2**-53,
        0.1,
        1e200,
        1e-200,
    ],
    "f16": [
        0.0,
        -0.0,
        1.0,
        -1.5,
        2**-14,
        -(2**-24),
        65504.0,
        math.inf,
        -math.inf,
        math.nan,
        1 + 2**-10,
        2**-11,
        0.0999755859375,
    ],
    "bf16": [
        0.0,
        -0.0,
        1.0,
        -1.5,
        2**-126,
        -(2**-133),
        3.3895313892515355e38,
        math.inf,
        -math.inf,
        math.nan,
        1 + 2**-7,
        2**-8,
        0.10009765625,
    ],
}


def samples(name: str, n: int, seed: int) -> np.ndarray:
    """Return bit patterns: the edges and random ones of every size."""
    edges = [
        encode(round_to(Fraction(x), name) if math.isfinite(x) and x else x, name)
        for x in EDGES[name]
    ]
    rng = np.random.default_rng(seed)
    w = WIDTH[name]
    return np.concatenate(
        [np.array(edges, f"u{w}"), rng.integers(0, 2 ** (8 * w), n, f"u{w}", endpoint=False)]
    )


def near(name: str, n: int, seed: int) -> np.ndarray:
    """Return bit patterns of numbers of similar size, where sums cancel and round."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * 2.0 ** rng.integers(-4, 5, n)
    return np.array([encode(round_to(Fraction(v), name), name) for v in x], f"u{WIDTH[name]}")


def reference(
    f: Callable[..., Any], plain: Callable[..., float], name: str, mode: str, *bits: int
) -> float:
    """Evaluate exactly; NaN, infinities and zeros follow float arithmetic and IEEE's sign rules."""
    x = [decode(b, name) for b in bits]
    with np.errstate(all="ignore"):
        if not all(math.isfinite(v) for v in x):
            return float(plain(*map(np.float64, x)))
        try:
            exact = f(*map(Fraction, x))
        except ZeroDivisionError:
            return float(plain(*map(np.float64, x)))
        if exact == 0:
            scaled = [np.float64(np.sign(v)) if v else np.float64(v) for v in x]
            r = float(plain(*scaled)) if plain(*scaled) == 0 else 0.0
            terms_cancel = plain in (ADD, SUB) and r == 0 and not all(v == 0 for v in x)
            if plain is FMA and r == 0:
                product = math.copysign(1, x[0]) * math.copysign(1, x[1])
                terms_cancel = product != math.copysign(1, x[2])
            if plain in (ADD, SUB) and all(v == 0 for v in x):
                second = x[1] if plain is ADD else -x[1]
                terms_cancel = math.copysign(1, x[0]) != math.copysign(1, second)
            return (-0.0 if mode == "rm" else 0.0) if terms_cancel else r
    r = round_to(exact, name, mode)
    return math.copysign(r, -1 if exact < 0 else 1)


def ADD(a: Any, b: Any) -> Any:
    return a + b


def SUB(a: Any, b: Any) -> Any:
    return a - b


def MUL(a: Any, b: Any) -> Any:
    return a * b


def DIV(a: Any, b: Any) -> Any:
    return a / b


def FMA(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


def check(name: str, got: np.ndarray, want: list[float]) -> None:
    w = np.array([encode(x, name) for x in want], got.dtype)
    nan = np.array([math.isnan(x) for x in want])
    found_nan = np.array([math.isnan(decode(int(b), name)) for b in got])
    wrong = np.where(nan, ~found_nan, got != w)
    j = np.flatnonzero(wrong)[:5]
    assert not wrong.any(), [(int(k), hex(got[k]), hex(w[k])) for k in j]


CASES = [
    (op, name, mode)
    for name in ("f32", "f64")
    for op in ("add", "sub", "mul", "div")
    for mode in ("rn", "rz", "rm", "rp")
] + [(op, name, "rn") for name in ("f16", "bf16") for op in ("add", "sub", "mul")]


@pytest.mark.parametrize(("op", "name", "mode"), CASES)
def test_arithmetic(op: str, name: str, mode: str) -> None:
    f = {"add": ADD, "sub": SUB, "mul": MUL, "div": DIV}[op]
    few = samples(name, 4, 1)
    a, b = products(few, few)
    a = np.concatenate([a, near(name, 150, 2), samples(name, 150, 3)])
    b = np.concatenate([b, near(name, 150, 4), samples(name, 150, 5)])
    b = b[: len(a)]
    a = a[: len(b)]
    got = execute(f"{op}.{mode}.{name} %d0, %a0, %a1;", [a, b], a.dtype)
    check(
        name, got, [reference(f, f, name, mode, int(x), int(y)) for x, y in zip(a, b, strict=True)]
    )


@pytest.mark.parametrize(
    ("name", "mode"),
    [(n, m) for n in ("f32", "f64") for m in ("rn", "rz", "rm", "rp")]
    + [("f16", "rn"), ("bf16", "rn")],
)
def test_fma(name: str, mode: str) -> None:
    """Rounded once: also where a float64 intermediate would round twice."""
    few = samples(name, 0, 1)[:10]
    a, b, c = products(few, few, few)
    a = np.concatenate([a, near(name, 300, 2)])
    b = np.concatenate([b, near(name, 300, 4)])
    tail = near(name, 300, 6)
    if name in ("f32", "f64"):  # c close to -a * b, and tiny next to it: the hard cases
        exact = [
            -Fraction(decode(int(x), name)) * Fraction(decode(int(y), name))
            for x, y in zip(a[-300:], b[-300:], strict=True)
        ]
        tail[:100] = [encode(round_to(v, name), name) for v in exact[:100]]
        tail[100:200] = [
            encode(round_to(v * Fraction(2) ** -30, name), name) for v in exact[100:200]
        ]
    c = np.concatenate([c, tail])
    got = execute(f"fma.{mode}.{name} %d0, %a0, %a1, %a2;", [a, b, c], a.dtype)
    check(
        name,
        got,
        [reference(FMA, FMA, name, mode, *map(int, t)) for t in zip(a, b, c, strict=True)],
    )


def test_fma32_that_rounds_twice_in_float64() -> None:
    """a * b + c lies just above a midpoint of float32, by less than float64 can hold."""
    a = np.array([1 + 2**-12], np.float32)
    b = np.array([1 + 2**-12], np.float32)  # product 1 + 2**-11 + 2**-24: a midpoint
    c = np.array([2**-80], np.float32)
    got = execute("fma.rn.f32 %d0, %a0, %a1, %a2;", [as_bits(a), as_bits(b), as_bits(c)], np.uint32)
    assert got.view(np.float32)[0] == np.float32(1 + 2**-11 + 2**-23)
    got = execute(
        "fma.rn.f32 %d0, %a0, %a1, %a2;", [as_bits(a), as_bits(b), as_bits(-c)], np.uint32
    )
    assert got.view(np.float32)[0] == np.float32(1 + 2**-11)


@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_sqrt_and_rcp(name: str, mode: str) -> None:
    a = np.concatenate([samples(name, 100, 1), near(name, 200, 2)])
    root, inverse = execute(
        f"sqrt.{mode}.{name} %d0, %a0; rcp.{mode}.{name} %d1, %a0;", [a], a.dtype, a.dtype
    )
    check(
        name, inverse, [reference(lambda x: 1 / x, lambda x: 1 / x, name, mode, int(x)) for x in a]
    )
    for bits, r in zip(a.tolist(), root.tolist(), strict=True):
        x, y = decode(bits, name), decode(r, name)
        if x == 0 or not math.isfinite(x) or x < 0:
            plain = float(np.sqrt(np.float64(x))) if x >= 0 or x == 0 else math.nan
            assert y == plain or (math.isnan(plain) and math.isnan(y))
            continue
        kind = np.float32 if name == "f32" else np.float64
        below, above = (Fraction(float(np.nextafter(kind(y), kind(s)))) for s in (0, math.inf))
        exact, here = Fraction(x), Fraction(y)
        if mode == "rn":  # (midpoints are never roots)
            assert ((below + here) / 2) ** 2 < exact < ((here + above) / 2) ** 2
        elif mode == "rp":
            assert below**2 < exact <= here**2
        else:
            assert here**2 <= exact < above**2


@pytest.mark.parametrize(
    ("op", "name"),
    [(o, n) for o in ("min", "max") for n in WIDTH]
    + [(o, n) for o in ("min.NaN", "max.NaN") for n in ("f16", "bf16", "f32")],
)
def test_minmax(op: str, name: str) -> None:
    few = samples(name, 8, 1)
    a, b = products(few, few)
    got = execute(f"{op}.{name} %d0, %a0, %a1;", [a, b], a.dtype)
    want = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        x, y = decode(x, name), decode(y, name)
        if math.isnan(x) or math.isnan(y):
            want.append(
                math.nan
                if op.endswith("NaN") or math.isnan(x) == math.isnan(y)
                else (y if math.isnan(x) else x)
            )
        else:
            key = lambda v: (v, math.copysign(1, v))  # noqa: E731 - orders the zeros
            want.append((min if op[:3] == "min" else max)(x, y, key=key))
    check(name, got, want)


def test_ftz_and_sat() -> None:
    a = as_bits(np.array([2**-127, -(2**-140), 2**-126, 0.5, 3, -3, np.nan, np.inf], np.float32))
    one = np.full(len(a), np.float32(1).view(np.uint32))
    got = execute("mul.ftz.f32 %d0, %a0, %a1;", [a, one], np.uint32).view(np.float32)
    assert got[:4].tolist() == [0, 0, 2**-126, 0.5]
    assert np.signbit(got[1])
    half = np.full(len(a), np.float32(0.5).view(np.uint32))
    assert (
        execute("mul.ftz.f32 %d0, %a0, %a1;", [a, half], np.uint32)[2] == 0
    )  # the result is flushed
    got = execute("add.sat.f32 %d0, %a0, %a1;", [a, one * 0], np.uint32).view(np.float32)
    assert got.tolist() == [2**-127, 0, 2**-126, 0.5, 1, 0, 0, 1]


def test_packed_halves() -> None:
    rng = np.random.default_rng(3)
    for name, unpack in (
        ("f16x2", lambda u: u.view(np.uint16)),
        ("bf16x2", lambda u: u.view(np.uint16)),
    ):
        one = name[:-2]
        bits = [
            np.concatenate([samples(one, 40, s), rng.permutation(samples(one, 40, s))])
            for s in (1, 2, 3)
        ]
        n = min(len(b) for b in bits) // 2 * 2
        words = [b[:n].view(np.uint32) for b in bits]
        for op, f in (("add.rn", ADD), ("mul.rn", MUL), ("fma.rn", FMA)):
            k = 3 if op == "fma.rn" else 2
            args = ", ".join(f"%a{j}" for j in range(k))
            got = unpack(execute(f"{op}.{name} %d0, {args};", words[:k], np.uint32))
            check(
                one,
                got,
                [
                    reference(f, f, one, "rn", *map(int, t))
                    for t in zip(*[b[:n] for b in bits[:k]], strict=True)
                ],
            )
    x = np.array([0xC0003C00], np.uint32)  # 1 and -2 as halves
    assert (
        execute(
            "fma.rn.relu.f16x2 %d0, %a0, %a1, %a2;",
            [x, np.array([0x3C003C00], np.uint32), np.array([0], np.uint32)],
            np.uint32,
        )[0]
        == 0x00003C00
    )


def test_sign_instructions_touch_the_sign_alone() -> None:
    a = np.array([0x7FC12345, 0xFFC12345, 0, 0x80000000, 0x3F800000], np.uint32)
    neg, size = execute("neg.f32 %d0, %a0; abs.f32 %d1, %a0;", [a], np.uint32, np.uint32)
    assert neg.tolist() == (a ^ np.uint32(0x80000000)).tolist()
    assert size.tolist() == (a & np.uint32(0x7FFFFFFF)).tolist()
    both = execute("neg.f16x2 %d0, %a0;", [a], np.uint32)
    assert both.tolist() == (a ^ np.uint32(0x80008000)).tolist()
    x, y = products(a, a)
    got = execute("copysign.f32 %d0, %a0, %a1;", [x, y], np.uint32)
    assert got.tolist() == ((x & np.uint32(0x80000000)) | (y & np.uint32(0x7FFFFFFF))).tolist()


@pytest.mark.parametrize("op", ["ex2", "lg2", "sin", "cos", "tanh", "rsqrt", "rcp", "sqrt", "div"])
def test_approximate_functions(op: str) -> None:
    """Rounded to nearest: within half a unit in the last place of float64's result."""
    x = np.random.default_rng(7).uniform(0.01, 30, 500).astype(np.float32)
    f = {
        "ex2": np.exp2,
        "lg2": np.log2,
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
        "rsqrt": lambda v: 1 / np.sqrt(v),
        "rcp": lambda v: 1 / v,
        "sqrt": np.sqrt,
        "div": lambda v: v / 3,
    }[op]
    y = np.full(500, 3, np.float32)
    body = f"{op}.approx.f32 %d0, %a0{', %a1' if op == 'div' else ''};"
    got = execute(body, [as_bits(x), as_bits(y)], np.uint32).view(np.float32)
    want = f(x.astype(np.float64))
    # float64 functions are good to 1e-15 relative, so the sum is half a unit: 2**-24, and that
    assert np.all(np.abs(got - want) <= np.abs(want) * (2.0**-24 * 1.0001) + 1e-45)


def test_approximate_functions_at_the_ends() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, -1.0], np.float32)
    ex2, lg2, rsqrt = execute(
        "ex2.approx.ftz.f32 %d0, %a0; lg2.approx.f32 %d1, %a0; rsqrt.approx.f32 %d2, %a0;",
        [as_bits(x)],
        *[np.uint32] * 3,
    )
    ex2, lg2, rsqrt = (v.view(np.float32) for v in (ex2, lg2, rsqrt))
    np.testing.assert_array_equal(ex2, [np.inf, 0, np.nan, 1, 1, 0.5])
    np.testing.assert_array_equal(lg2, [np.inf, np.nan, np.nan, -np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(rsqrt, [0, np.nan, np.nan, np.inf, -np.inf, np.nan])
    big = as_bits(np.array([2.0**127], np.float32))
    assert execute("div.approx.f32 %d0, %a0, %a0;", [big], np.uint32)[0] == 0  # as PTX says
    assert execute("div.full.f32 %d0, %a0, %a0;", [big], np.uint32).view(np.float32)[0] == 1


def test_kinds_of_floats() -> None:
    x = as_bits(np.array([1, np.inf, np.nan, 2**-130, 0], np.float32))
    names = ["finite", "infinite", "number", "notanumber", "normal", "subnormal"]
    body = "".join(f"testp.{n}.f32 %q, %a0; selp.u32 %d{k}, 1, 0, %q;" for k, n in enumerate(names))
    got = dict(zip(names, execute(body, [x], *[np.uint32] * 6), strict=True))
    assert got["finite"].tolist() == [1, 0, 0, 1, 1]
    assert got["infinite"].tolist() == [0, 1, 0, 0, 0]
    assert got["number"].tolist() == [1, 1, 0, 1, 1]
    assert got["notanumber"].tolist() == [0, 0, 1, 0, 0]
    assert got["normal"].tolist() == [1, 0, 0, 0, 0]
    assert got["subnormal"].tolist() == [0, 0, 0, 1, 0]
