"""Rounding of tensor cores: cases whose results follow by hand, and a definition term by term."""

from __future__ import annotations

import numpy as np
import pytest
from ptx.tensor_core_sums import tensor_core_sum

from nbflow_ptx import Emulator
from nbflow_ptx.instructions.floats import FP8, bf16_to_f32, f32_to_bf16
from nbflow_ptx.instructions.tensor_cores import multiply_add, sum_rule

Terms = dict[int, tuple[float, float]]
"""Products by their index k: the number of A and the number of B."""


def kernel(arch: str, kind: str) -> str:
    """Return a kernel of one ``mma.m16n8k16`` with float16 operands and sums of type `kind`."""
    n = 4 if kind == "f32" else 2
    c, d = (", ".join(f"%{x}{k}" for k in range(n)) for x in "cd")
    load = "".join(
        f"mad.wide.u32 %at, %t, {4 * count}, %p{x};"
        + "".join(f"ld.global.b32 %{x}{k}, [%at+{4 * k}];" for k in range(count))
        for x, count in (("a", 4), ("b", 2), ("c", n))
    )
    save = "".join(f"st.global.b32 [%at+{4 * k}], %d{k};" for k in range(n))
    return f""".version 8.4
.target {arch}
.address_size 64
.visible .entry k(.param .u64 xa, .param .u64 xb, .param .u64 xc) {{
    .reg .b32 %a<4>, %b<2>, %c<4>, %d<4>, %t; .reg .b64 %pa, %pb, %pc, %at; mov.u32 %t, %tid.x;
    ld.param.u64 %pa, [xa]; ld.param.u64 %pb, [xb]; ld.param.u64 %pc, [xc]; {load}
    mma.sync.aligned.m16n8k16.row.col.{kind}.f16.f16.{kind}
        {{{d}}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{{c}}}; {save} ret; }}"""


def mma(terms: Terms, c: float, arch: str, *, kind: str = "f32", exact: bool = False) -> float:
    """Return the sum of products and C in row 0, column 0; all else is zero.

    Row 0 of A is in registers 0 and 2 of lanes 0 to 3, two numbers in each; column 0 of B is in
    their registers 0 and 1.
    """
    a, b = np.zeros((32, 4, 2), np.float16), np.zeros((32, 2, 2), np.float16)
    for k, (x, y) in terms.items():
        assert np.float16(x) == x
        assert np.float16(y) == y
        lane, half = k % 8 // 2, k // 8
        a[lane, 2 * half, k % 2], b[lane, half, k % 2] = x, y
    sums = np.zeros((32, 4), np.float32 if kind == "f32" else np.float16)
    sums[0, 0] = c
    emulator = Emulator(kernel(arch, kind), exact_mma=exact)
    emulator.launch("k", 1, 32, a.view(np.uint32), b.view(np.uint32), sums.view(np.uint32))
    return float(sums[0, 0])


AMPERE, ADA, HOPPER = "sm_80", "sm_89", "sm_90"
# 1 = 2**0 is the largest term, so Hopper keeps multiples of 2**-25, Ampere and Ada of 2**-24
SMALL = {0: (1.0, 1.0), 1: (1.5 * 2.0**-13, 2.0**-12)}  # the second is 1.5 * 2**-25
# A code in the low bits of a half: 2**-24 counts as 2**-14.  The first product is 2**-9, with an
# exponent of -14 + 15 = 1, so multiples of 2**-24 or 2**-23 are kept, and 2**-28 is not
CODES = {0: (2.0**-24, 2.0**15), 1: (2.0**-24, 2.0**-4)}
NORMAL = {0: (2.0**-4, 2.0**-5), 1: (2.0**-14, 2.0**-14)}  # the same products: 2**-34 is kept
CANCEL = {0: (32.0, 32.0), 1: (-32.0, 32.0)}  # 2**10: Hopper keeps multiples of 2**-15
# The first pass of Ampere: 2**10 + 2**-14 is a multiple of 2**-14, but no float32 number (2**10 has
# an ulp of 2**-13), and is cut; the second pass subtracts 2**10
PASSES = {0: (32.0, 32.0), 1: (2.0**-7, 2.0**-7), 8: (-32.0, 32.0)}
# 2.25 has the exponent 0 of its factors, not its own 1
SQUARE = {0: (1.5, 1.5), 1: (2.0**-12, 2.0**-13), 2: (-1.5, 1.5)}
CASES = {
    # terms, C, exact sum, and the sums of Hopper and of Ampere and Ada
    "a small product is cut": (SMALL, -1.0, 1.5 * 2.0**-25, 2.0**-25, 0.0),
    "towards zero": (
        {0: (-1.0, 1.0), 1: (-1.5 * 2.0**-13, 2.0**-12)}, 1.0, -1.5 * 2.0**-25, -(2.0**-25), 0.0
    ),
    "a subnormal operand counts as 2**-14": (CODES, -(2.0**-9), 2.0**-28, 0.0, 0.0),
    "normal operands with the same products": (NORMAL, -(2.0**-9), *[2.0**-28] * 3),
    "C is cut with the products": (CANCEL, 1 + 2.0**-15, 1 + 2.0**-15, 1 + 2.0**-15, 1.0),
    "C is cut to the same bits": (CANCEL, 1 + 2.0**-16, 1 + 2.0**-16, 1.0, 1.0),
    "passes of 8 and of 16 products": (PASSES, 0.0, 2.0**-14, 2.0**-14, 0.0),
    "exponents of factors": (SQUARE, 0.0, 2.0**-25, 2.0**-25, 0.0),
    # 1 + 1.5 * 2**-24 is above the middle of 1 and the next number, 1 + 2**-23
    "the result is cut": ({0: (1.5 * 2.0**-12, 2.0**-12)}, 1.0, 1 + 2.0**-23, 1.0, 1.0),
    "a negative one, too": ({0: (1.5 * 2.0**-12, -(2.0**-12))}, -1.0, -1 - 2.0**-23, -1.0, -1.0),
    "zeros have no exponent": ({0: (0.0, 2.0**15), 1: (2.0**-24, 2.0**-2)}, 0.0, *[2.0**-26] * 3),
    "infinity": ({0: (np.inf, 1.0), 1: (1.0, 1.0)}, 1.0, *[np.inf] * 3),
    "infinity times zero": ({0: (np.inf, 0.0), 1: (1.0, 1.0)}, 1.0, *[np.nan] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sums_derived_by_hand(name: str) -> None:
    terms, c, exact, hopper, ampere = CASES[name]
    np.testing.assert_equal(mma(terms, c, HOPPER, exact=True), exact)
    np.testing.assert_equal(mma(terms, c, HOPPER), hopper)
    np.testing.assert_equal(mma(terms, c, AMPERE), ampere)
    np.testing.assert_equal(mma(terms, c, ADA), ampere)


def test_float16_results_are_rounded_to_nearest() -> None:
    """1 + 1.5 * 2**-11 is above the middle of 1 and 1 + 2**-10."""
    terms = {0: (1.5 * 2.0**-5, 2.0**-6)}
    for arch in (HOPPER, AMPERE):
        assert mma(terms, 1.0, arch, kind="f16") == 1 + 2.0**-10


def test_the_device_decides_and_not_the_target_of_the_code() -> None:
    """Code for sm_80 runs on Hopper."""
    a = np.zeros((32, 4, 2), np.float16)
    b, sums = a[:, :2].copy(), np.zeros((32, 4), np.float32)
    (a[0, 0, 0], b[0, 0, 0]), (a[0, 0, 1], b[0, 0, 1]) = SMALL.values()
    sums[0, 0] = -1
    code = Emulator(kernel(AMPERE, "f32"), arch="sm_90a")
    code.launch("k", 1, 32, a.view(np.uint32), b.view(np.uint32), sums.view(np.uint32))
    assert sums[0, 0] == 2.0**-25


SMALLEST = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}


@pytest.mark.parametrize(
    ("kind", "arch", "terms", "bits"),
    [
        ("f16", "sm_70", 4, 23), ("f16", "sm_75", 8, 24), ("f16", "sm_86", 8, 24),
        ("f16", "sm_90a", 16, 25), ("f16", "sm_120", 16, 25), ("bf16", "sm_89", 8, 24),
        ("bf16", "sm_90", 16, 25), ("tf32", "sm_80", 4, 24), ("tf32", "sm_90", 8, 25),
        ("e4m3", "sm_90", 32, 25), ("e5m2", "sm_90", 32, 25),
    ],
)  # fmt: skip
def test_sums_equal_the_definition(kind: str, arch: str, terms: int, bits: int) -> None:
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        """Return numbers of all magnitudes, a fifth of them zero."""
        spread = {"f16": 12, "bf16": 60, "tf32": 60}.get(kind, 0)
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread // 3 + 1, shape)
        x = (x * (rng.random(shape) < 0.8)).astype(np.float32)
        if kind == "f16":
            return x.astype(np.float16).astype(np.float32)
        if kind == "bf16":
            return bf16_to_f32(f32_to_bf16(x))
        if kind == "tf32":
            return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return np.asarray(FP8[kind][rng.integers(0, 0x78, shape)], np.float32)

    a, b = numbers(32, 3, 5), numbers(32, 2, 5)
    c = (rng.standard_normal((3, 2, 5)) * 2.0 ** rng.integers(-20, 4, (3, 2, 5))).astype(np.float32)
    rule = sum_rule(arch, kind)
    found = multiply_add(a, b, c, kind, rule)
    want = [
        [
            [
                tensor_core_sum(
                    a[:, i, w].tolist(), b[:, j, w].tolist(), float(c[i, j, w]),
                    terms=terms, bits=bits, smallest=SMALLEST[kind],
                )
                for w in range(5)
            ]
            for j in range(2)
        ]
        for i in range(3)
    ]  # fmt: skip
    np.testing.assert_array_equal(found, np.array(want, np.float64))


def test_fp8_sums_of_ada_and_of_wgmma_have_fewer_bits() -> None:
    """1 + 2**-14 is cut to 13 bits behind the leading one; ``mma.sync`` on Hopper keeps it."""
    a = np.ones((32, 1, 1), np.float32)
    b = np.zeros((32, 1, 1), np.float32)
    b[0], b[1], a[1] = 1.0, 2.0**-7, 2.0**-7
    c = np.zeros((1, 1, 1), np.float32)
    found = [
        float(multiply_add(a, b, c, "e5m2", sum_rule(arch, "e5m2", warpgroup=warpgroup))[0, 0, 0])
        for arch, warpgroup in (("sm_89", False), ("sm_90", True), ("sm_90", False))
    ]
    assert found == [1.0, 1.0, 1 + 2.0**-14]


def test_results_below_the_smallest_normal_number_are_cut_too() -> None:
    """2**-126 - 2**-126 + 1.75 * 2**-149 is cut to 2**-149, the smallest float32 number."""
    a = np.array([2.0**-100, -(2.0**-100), 1.75 * 2.0**-100], np.float32).reshape(3, 1, 1)
    b = np.array([2.0**-26, 2.0**-26, 2.0**-49], np.float32).reshape(3, 1, 1)
    found = multiply_add(a, b, np.zeros((1, 1, 1), np.float32), "bf16", sum_rule("sm_90", "bf16"))
    assert found[0, 0, 0] == 2.0**-149
