"""Tensor-core instructions against NumPy, with fragment layouts written out from the PTX ISA."""

from __future__ import annotations

import numpy as np
import pytest

from nbflow_ptx import Emulator
from nbflow_ptx.instructions.floats import FP8, f32_to_bf16

HEAD = ".version 8.4\n.target sm_90\n.address_size 64\n"


def a_place(lane: int, i: int, shape: str, nbytes: int) -> tuple[int, int]:
    """Row and column of element `i` of lane's part of A, as the PTX ISA's formulas have it."""
    group, member = lane >> 2, lane & 3
    if nbytes == 2:  # m16n8k8, m16n8k16
        row = group if i % 4 < 2 else group + 8
        return row, member * 2 + (i & 1) + (8 if i >= 4 else 0)
    if nbytes == 4:  # tf32: a0 a1 a2 a3
        return (group if i % 2 == 0 else group + 8), (member if i < 2 else member + 4)
    if shape == "m8n8k16":
        return group, member * 4 + i
    row = group if i % 8 < 4 else group + 8
    return row, member * 4 + (i & 3) + (16 if i >= 8 else 0)


def b_place(lane: int, i: int, nbytes: int) -> tuple[int, int]:
    """Row and column of element `i` of lane's part of B."""
    group, member = lane >> 2, lane & 3
    per = 4 // nbytes
    step = 4 * per  # the second register lies 16 bytes further down the column
    return member * per + i % per + step * (i // per), group


CASES = [
    ("m16n8k16", "f16", "f32", 8, 4),
    ("m16n8k8", "f16", "f32", 4, 2),
    ("m16n8k16", "bf16", "f32", 8, 4),
    ("m16n8k8", "bf16", "f32", 4, 2),
    ("m16n8k8", "tf32", "f32", 4, 2),
    ("m16n8k4", "tf32", "f32", 2, 1),
    ("m16n8k32", "s8", "s32", 16, 8),
    ("m16n8k32", "u8", "s32", 16, 8),
    ("m16n8k16", "s8", "s32", 8, 4),
    ("m8n8k16", "s8", "s32", 4, 4),
    ("m16n8k32", "e4m3", "f32", 16, 8),
    ("m16n8k16", "f16", "f16", 8, 4),
]


@pytest.mark.parametrize(("shape", "kind", "to", "na", "nb"), CASES)
def test_mma(shape: str, kind: str, to: str, na: int, nb: int) -> None:
    m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    rng = np.random.default_rng(0)
    size = {"f16": 2, "bf16": 2, "tf32": 4}.get(kind, 1)
    if kind in ("s8", "u8"):
        low, high = (-128, 128) if kind == "s8" else (0, 256)
        a, b = rng.integers(low, high, (m, k)), rng.integers(low, high, (k, n))
        raw = [v.astype(np.uint8) for v in (a, b)]
    elif kind == "e4m3":
        # 2**-3 to 7.5: sums are exact
        codes = [rng.integers(0x20, 0x50, s).astype(np.uint8) for s in ((m, k), (k, n))]
        raw, (a, b) = codes, (FP8["e4m3"][c] for c in codes)
    else:  # eighths up to 2: exact in every format
        a, b = rng.integers(-16, 17, (m, k)) / 8, rng.integers(-16, 17, (k, n)) / 8
        kinds = {
            "f16": lambda v: v.astype(np.float16).view(np.uint16),
            "bf16": lambda v: f32_to_bf16(v.astype(np.float32)),
            "tf32": lambda v: v.astype(np.float32).view(np.uint32),
        }
        raw = [kinds[kind](v) for v in (a, b)]
    fa = np.array(
        [[raw[0][a_place(lane, i, shape, size)] for i in range(na)] for lane in range(32)]
    ).view(np.uint32)
    fb = np.array([[raw[1][b_place(lane, i, size)] for i in range(nb)] for lane in range(32)]).view(
        np.uint32
    )
    c = rng.integers(-5, 6, (m, n))
    out_dtype = {"f32": np.float32, "s32": np.int32, "f16": np.float16}[to]
    nc = 2 * m // 8
    where = [
        [((lane >> 2) + 8 * (i >> 1), (lane & 3) * 2 + (i & 1)) for i in range(nc)]
        for lane in range(32)
    ]
    fc = np.array([[c[p] for p in row] for row in where]).astype(out_dtype).view(np.uint32)

    def registers(name: str, count: int) -> str:
        return "{" + ", ".join(f"%{name}{j}" for j in range(count)) + "}"

    wa, wb, wc = fa.shape[1], fb.shape[1], fc.shape[1]
    load = "".join(
        f"mad.wide.u32 %at, %t, {4 * w}, %p{x};"
        + "".join(f"ld.global.b32 %{x}{j}, [%at+{4 * j}];" for j in range(w))
        for x, w in (("a", wa), ("b", wb), ("c", wc))
    )
    save = "".join(f"st.global.b32 [%at+{4 * j}], %d{j};" for j in range(wc))
    text = f"""{HEAD}.visible .entry k(.param .u64 xa, .param .u64 xb, .param .u64 xc) {{
    .reg .b32 %a<4>, %b<2>, %c<4>, %d<4>, %t; .reg .b64 %pa, %pb, %pc, %at; mov.u32 %t, %tid.x;
    ld.param.u64 %pa, [xa]; ld.param.u64 %pb, [xb]; ld.param.u64 %pc, [xc]; {load}
    mma.sync.aligned.{shape}.row.col.{to}.{kind}.{kind}.{to}
        {registers("d", wc)}, {registers("a", wa)}, {registers("b", wb)}, {registers("c", wc)};
    {save} ret; }}"""
    fc = np.ascontiguousarray(fc)
    Emulator(text).launch("k", 1, 32, fa, fb, fc)
    want = np.asarray(a) @ np.asarray(b) + c
    found = fc.view(out_dtype)
    np.testing.assert_array_equal(
        found, np.array([[want[p] for p in row] for row in where]).astype(out_dtype)
    )


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(trans: str, count: int) -> None:
    x = np.arange(count * 64, dtype=np.uint16)
    out = np.zeros((32, count, 2), np.uint16)
    regs = ", ".join(f"%d{j}" for j in range(count))
    save = "".join(f"st.global.b32 [%at+{4 * j}], %d{j};" for j in range(count))
    text = f"""{HEAD}.visible .entry k(.param .u64 x, .param .u64 y) {{
    .shared .align 16 .b8 s[512];
    .reg .b32 %t, %s, %i, %n, %d<4>; .reg .b64 %p, %q, %at; .reg .b128 %unused; .reg .pred %k;
    .reg .b32 %v<4>;
    ld.param.u64 %p, [x]; ld.param.u64 %q, [y]; mov.u32 %t, %tid.x; mov.u32 %s, s;
    setp.lt.u32 %k, %t, {8 * count}; shl.b32 %i, %t, 4; add.u32 %s, %s, %i;
    mad.wide.u32 %at, %t, 16, %p;
    @%k ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%at];
    @%k st.shared.v4.b32 [%s], {{%v0, %v1, %v2, %v3}}; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{regs}}}, [%s];
    mad.wide.u32 %at, %t, {4 * count}, %q; {save} ret; }}"""
    Emulator(text.replace(".reg .b128 %unused;", "")).launch("k", 1, 32, x, out)
    tiles = x.reshape(count, 8, 8)
    for lane in range(32):
        for r in range(count):
            for e in range(2):
                row, col = lane >> 2, (lane & 3) * 2 + e
                assert out[lane, r, e] == (tiles[r, col, row] if trans else tiles[r, row, col])


def test_matrix_transposes_in_registers_and_stores() -> None:
    """movmatrix, then stmatrix of the result, is the transposed tile in memory."""
    x, out = np.arange(64, dtype=np.uint16).reshape(8, 8), np.zeros((8, 8), np.uint16)
    lanes = np.array([[x[k >> 2, (k & 3) * 2 + e] for e in range(2)] for k in range(32)], np.uint16)
    text = f"""{HEAD}.visible .entry k(.param .u64 x, .param .u64 y) {{
    .shared .align 16 .b8 s[128];
        .reg .b32 %t, %s, %i, %a, %d, %v<4>;
    .reg .b64 %p, %q, %at; .reg .pred %k; ld.param.u64 %p, [x]; ld.param.u64 %q, [y];
    mov.u32 %t, %tid.x; mad.wide.u32 %at, %t, 4, %p;
    ld.global.b32 %a, [%at]; movmatrix.sync.aligned.m8n8.trans.b16 %d, %a; mov.u32 %s, s;
    and.b32 %i, %t, 7; shl.b32 %i, %i, 4; add.u32 %s, %s, %i;
    stmatrix.sync.aligned.m8n8.x1.shared.b16 [%s], {{%d}}; bar.sync 0; setp.lt.u32 %k, %t, 8;
    @!%k bra $end;
    ld.shared.v4.b32 {{%v0, %v1, %v2, %v3}}, [%s]; mad.wide.u32 %at, %t, 16, %q;
    st.global.v4.b32 [%at], {{%v0, %v1, %v2, %v3}}; $end: ret; }}"""
    Emulator(text).launch("k", 1, 32, lanes, out)
    np.testing.assert_array_equal(out, x.T)
