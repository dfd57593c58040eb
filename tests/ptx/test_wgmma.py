"""``wgmma`` against NumPy, with descriptors and layouts written out element by element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ptx.tensor_core_sums import tensor_core_sum

from nbflow_ptx import Emulator, UnsupportedInstruction
from nbflow_ptx.instructions.floats import FP8, bf16_to_f32, f32_to_bf16
from nbflow_ptx.instructions.tensor_cores import sum_rule
from nbflow_ptx.instructions.wgmma_descriptors import decode, problem

SWIZZLE_FIELD = {16: 0, 128: 1, 64: 2, 32: 3}
AREA = 48 * 1024
"""Bytes of each of the two areas of shared memory that hold A and B."""


@dataclass
class Tile:
    """Layout of a matrix in shared memory: rows of `row` bytes (16: no swizzle), K- or MN-major.

    Eight lines together are a group; `leading` and `stride` are the descriptor's offsets.
    """

    row: int
    mn: bool
    start: int
    leading: int
    stride: int

    def place(self, line: int, k: int, nbytes: int) -> int:
        """Return the byte of element (line, k), by the canonical layouts of the PTX ISA."""
        if not self.mn:  # the units of 16 bytes lie along K
            unit, inside = divmod(k * nbytes, 16)
            if self.row == 16:
                at = line % 8 * 16 + line // 8 * self.stride + unit * self.leading
            else:
                at = line % 8 * self.row + line // 8 * self.stride + unit * 16
        else:  # along M or N
            unit, inside = divmod(line * nbytes, 16)
            per_row = self.row // 16
            if self.row == 16:
                at = k % 8 * 16 + k // 8 * self.leading + unit * self.stride
            else:
                at = k % 8 * self.row + k // 8 * self.stride
                at += unit % per_row * 16 + unit // per_row * self.leading
        at += self.start + inside
        # Swizzle<B, 4, 3>: bits 4.. of the address are exchanged by those from bit 7 on
        return at ^ (at >> 3 & (self.row - 16))

    def descriptor(self, area: int) -> int:
        """Return the 64-bit descriptor."""
        bits = (area + self.start) >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32
        return bits | SWIZZLE_FIELD[self.row] << 62


def tile(lines: int, row: int, mn: bool, start: int = 0) -> Tile:
    """Return a dense layout of a matrix with this number of lines."""
    if not mn:
        return Tile(row, mn, start, 16 * lines if row == 16 else 16, 8 * row)
    groups = -(-2 * lines // row)
    if row == 16:
        return Tile(row, mn, start, 128 * groups, 128)
    return Tile(row, mn, start, 16 * row, 8 * row)


def program(
    shape: str, kinds: str, n_results: int, a_registers: bool, tail: str, scale: str
) -> str:
    """Return a kernel that copies both areas in, multiplies once and stores its accumulators."""
    d = ", ".join(f"%d{k}" for k in range(n_results))
    load_d = "".join(f"ld.global.b32 %d{k}, [%at+{4 * k}];" for k in range(n_results))
    save_d = "".join(f"st.global.b32 [%at+{4 * k}], %d{k};" for k in range(n_results))
    a = "{%a0, %a1, %a2, %a3}" if a_registers else "%da"
    return f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 image, .param .u64 regs, .param .u64 out, .param .u64 ad,
    .param .u64 bd) {{
  .shared .align 1024 .b8 s[{2 * AREA}];
  .reg .b32 %d<{n_results}>, %a<4>, %t, %i, %s, %v<4>;
  .reg .b64 %p, %at, %da, %db; .reg .pred %q, %k;
  mov.u32 %t, %tid.x; ld.param.u64 %p, [image]; mov.u32 %i, %t;
$copy: mad.wide.u32 %at, %i, 16, %p; ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%at];
  mov.u32 %s, s; mad.lo.u32 %s, %i, 16, %s; st.shared.v4.b32 [%s], {{%v0, %v1, %v2, %v3}};
  add.u32 %i, %i, 128; setp.lt.u32 %q, %i, {2 * AREA // 16}; @%q bra $copy;
  fence.proxy.async.shared::cta; bar.sync 0;
  ld.param.u64 %p, [regs]; mad.wide.u32 %at, %t, 16, %p;
  ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%at];
  ld.param.u64 %p, [out]; mad.wide.u32 %at, %t, {4 * n_results}, %p; {load_d}
  ld.param.u64 %da, [ad]; ld.param.u64 %db, [bd]; setp.eq.u32 %k, {scale}, 1;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.{shape}.{kinds} {{{d}}}, {a}, %db, %k{tail};
  wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
  {save_d} ret; }}"""


def numbers(rng: Any, shape: tuple[int, int], kind: str) -> tuple[Any, Any]:
    """Return random numbers as they are stored, and their values."""
    if kind in ("s8", "u8"):
        raw = rng.integers(0, 256, shape).astype(np.uint8)
        return raw, raw.view(np.int8).astype(np.int64) if kind == "s8" else raw.astype(np.int64)
    if kind in ("e4m3", "e5m2"):
        raw = rng.integers(0, 0x60, shape).astype(np.uint8)
        return raw, FP8[kind][raw].astype(np.float64)
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "f16":
        return (h := x.astype(np.float16)).view(np.uint16), h.astype(np.float64)
    if kind == "bf16":
        return (h := f32_to_bf16(x)), bf16_to_f32(h).astype(np.float64)
    cut = x.view(np.uint32) & np.uint32(0xFFFFE000)  # tf32
    return x.view(np.uint32), cut.view(np.float32).astype(np.float64)


def accumulator(lane: int, k: int) -> tuple[int, int]:
    """Return row and column of accumulator `k` of a thread, as the PTX ISA's figure has it."""
    warp, group, member = lane // 32, lane % 32 // 4, lane % 4
    return 16 * warp + group + 8 * (k // 2 % 2), 8 * (k // 4) + 2 * member + k % 2


def multiply(
    n: int,
    kind: str,
    a: Tile | None,
    b: Tile,
    *,
    signs: tuple[int, int] = (1, 1),
    scale: int = 1,
    exact: bool = True,
) -> None:
    """Multiply once and compare, bit for bit: with NumPy, or as Hopper rounds."""
    rng = np.random.default_rng(n)
    integers = kind in ("s8", "u8")
    nbytes = {"f16": 2, "bf16": 2, "tf32": 4}.get(kind, 1)
    k = 32 // nbytes
    ra, va = numbers(rng, (64, k), kind)
    rb, vb = numbers(rng, (n, k), kind)
    image = np.zeros(2 * AREA, np.uint8)
    for raw, layout, area in ((ra, a, 0), (rb, b, AREA)):
        for line in range(len(raw) if layout is not None else 0):
            for j in range(k):
                at = area + layout.place(line, j, nbytes)
                image[at : at + nbytes] = raw[line, j : j + 1].view(np.uint8)
    regs = np.zeros((128, 16 // nbytes), ra.dtype)  # A in registers: as mma.sync takes it, by warps
    per = 4 // nbytes
    for lane in range(128):
        for e in range(4 * per):
            register, inside = divmod(e, per)
            row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (register % 2)
            regs[lane, e] = ra[row, lane % 4 * per + inside + 4 * per * (register // 2)]
    dtype = np.int32 if integers else np.float32
    c = rng.integers(-99, 99, (64, n)).astype(dtype)
    where = np.array([[accumulator(t, j) for j in range(n // 2)] for t in range(128)])
    out = np.ascontiguousarray(c[where[..., 0], where[..., 1]])
    tail = "" if integers else f", {signs[0]}, {signs[1]}"
    if nbytes == 2:
        tail += (f", {int(a.mn)}" if a is not None else "") + f", {int(b.mn)}"
    kinds = f"{'s32' if integers else 'f32'}.{kind}.{kind}"
    text = program(f"m64n{n}k{k}", kinds, n // 2, a is None, tail, str(scale))
    descriptors = [
        layout.descriptor(area) if layout is not None else 0 for layout, area in ((a, 0), (b, AREA))
    ]
    emulator = Emulator(text, exact_mma=exact)
    emulator.launch("k", 1, 128, image, regs, out, *(np.uint64(v) for v in descriptors))
    product = np.prod(signs) * (va @ vb.T)
    want = (product + c * scale).astype(dtype)
    if not exact:
        rule = sum_rule("sm_90", kind, warpgroup=True)
        limits = {"terms": rule.terms, "bits": rule.fraction_bits, "smallest": -14}
        sums = [
            [
                tensor_core_sum(x, y, float(old), **limits)
                for y, old in zip(vb.tolist(), row, strict=True)
            ]
            for x, row in zip((np.prod(signs) * va).tolist(), c * scale, strict=True)
        ]
        assert (want != np.array(sums)).mean() > 0.2
        want = np.array(sums, dtype)
    np.testing.assert_array_equal(out, want[where[..., 0], where[..., 1]])


ROWS = (16, 32, 64, 128)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mn", [False, True])
def test_layouts(row: int, mn: bool) -> None:
    multiply(64, "f16", tile(64, row, mn), tile(64, row, mn))


@pytest.mark.parametrize("n", [8, 24, 256])
def test_widths(n: int) -> None:
    multiply(n, "bf16", None, tile(n, 128 if n > 8 else 16, mn=n == 256))


@pytest.mark.parametrize("kind", ["f16", "e4m3", "e5m2", "tf32", "s8", "u8"])
def test_types(kind: str) -> None:
    multiply(16, kind, tile(64, 128, mn=False), tile(16, 64, mn=False))
    multiply(16, kind, None, tile(16, 16, mn=False))


def test_signs_and_scale() -> None:
    multiply(8, "f16", None, tile(8, 32, mn=False), signs=(-1, 1))
    multiply(8, "f16", None, tile(8, 32, mn=False), signs=(-1, -1), scale=0)


@pytest.mark.parametrize("signs", [(1, 1), (-1, 1)])
def test_sums_are_rounded_like_those_of_mma(signs: tuple[int, int]) -> None:
    multiply(8, "f16", None, tile(8, 32, mn=False), signs=signs, exact=False)
    multiply(8, "f16", tile(64, 128, mn=False), tile(8, 64, mn=False), exact=False, scale=0)


def test_steps_along_k_within_a_row_and_a_pattern_anywhere() -> None:
    """Kernels step 32 bytes to the right within rows of 128 bytes; tiles begin at any pattern."""
    multiply(16, "f16", tile(64, 128, mn=False, start=2048 + 64), tile(16, 64, mn=False, start=544))


def test_descriptor_fields() -> None:
    d = decode(0x4002_0040_0010_0041 | 3 << 49)
    assert (d.start, d.leading, d.stride) == (0x410, 0x100, 0x400)
    assert (d.base_offset, d.row_bytes) == (3, 128)


@pytest.mark.parametrize(
    ("start", "base", "row", "mn", "why"),
    [
        (0x400, 0, 128, False, ""),
        (0x460, 0, 128, False, ""),
        (0x480, 1, 128, False, ""),
        (0x480, 0, 128, False, "in row 1 of a pattern"),
        (0x470, 0, 128, False, "go beyond"),
        (0x200, 0, 64, False, ""),
        (0x240, 0, 64, False, "in row 1 of a pattern"),
        (0x110, 0, 32, False, "go beyond"),
        (0x120, 0, 32, False, "in row 1 of a pattern"),
        (0x430, 0, 16, False, ""),
        (0x430, 2, 16, False, "base offset without a swizzle"),
        (0x410, 0, 128, True, "go beyond"),
    ],
)
def test_places_a_matrix_may_not_have(start: int, base: int, row: int, mn: bool, why: str) -> None:
    bits = start >> 4 | base << 49 | SWIZZLE_FIELD[row] << 62
    found = problem(decode(bits), 64, mn)
    assert why in found
    assert bool(found) == bool(why)


def test_what_is_refused() -> None:
    good = program("m64n8k16", "f32.f16.f16", 4, True, ", 1, 1, 0", "1")
    Emulator(good).program("k")
    for change in (
        ("sm_90a", "sm_90"),
        ("k16.f32", "k8.f32"),
        ("m64n8", "m64n16"),
        (".f16.f16", ".f16.e4m3"),
        (", 1, 1, 0;", ", 1, 2, 0;"),
        (", 1, 1, 0;", ", 1, 1;"),
    ):
        with pytest.raises(UnsupportedInstruction, match="wgmma"):
            Emulator(good.replace(*change)).program("k")
