"""Tensor-core instructions: ``mma.sync``, ``ldmatrix`` and ``movmatrix``.

Fragment layouts are those of the PTX ISA's chapter on matrix multiply-accumulate.  Sums of
floating-point products are those of the emulated device (`tensor_cores`), or with `exact_mma` exact
and rounded once, as those of float64 always are; sums of integers are exact.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from nbflow_ptx.instructions import floats
from nbflow_ptx.instructions.binder import Binder, full, threads
from nbflow_ptx.instructions.floating import pack16
from nbflow_ptx.instructions.tensor_cores import multiply_add, sum_rule
from nbflow_ptx.instructions.warp_collectives import Collective
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.parsing.syntax import Instruction, Vec
from nbflow_ptx.parsing.types import TYPES

_LANE = np.arange(32)
_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1, "f64": 8}
#: (m, n, k) and the type of A, as built and tested.
SHAPES = {
    ("m16n8k8", "f16"), ("m16n8k16", "f16"), ("m16n8k8", "bf16"), ("m16n8k16", "bf16"),
    ("m16n8k4", "tf32"), ("m16n8k8", "tf32"), ("m16n8k16", "s8"), ("m16n8k32", "s8"),
    ("m16n8k16", "u8"), ("m16n8k32", "u8"), ("m16n8k32", "e4m3"), ("m16n8k32", "e5m2"),
    ("m8n8k16", "s8"), ("m8n8k16", "u8"), ("m8n8k4", "f64"),
}  # fmt: skip


def mma(b: Binder, ins: Instruction) -> Collective:
    """``mma.sync.aligned``: D = A B + C for one warp."""
    names = [p for p in ins.op if p in _BYTES or p in ("f32", "s32")]
    shape = next((p for p in ins.op if re.fullmatch(r"m\d+n\d+k\d+", p)), "")
    if len(names) != 4 or (shape, names[1]) not in SHAPES or not ins.has("row"):
        raise b.unsupported(ins)
    m_, n_, k_ = (int(x) for x in re.findall(r"\d+", shape))
    to, ta, tb, tc = names
    writes = b.writes(ins.args[0])
    wide = ta == "f64"
    word = TYPES["b64"] if wide else TYPES["b32"]
    ra, rb, rc = (b.reads(a.items if isinstance(a, Vec) else (a,), word) for a in ins.args[1:4])
    arow, acol = fragment_a(m_, k_, _BYTES[ta], len(ra))
    bcol, brow = fragment_b(k_, _BYTES[tb], len(rb))
    saturate = ins.has("satfinite")
    always_exact = ta in ("s8", "u8", "f64")
    row, col = _results(len(writes), to)
    row_c, col_c = _results(len(rc), tc)

    def run(m: Machine, i: Any, masks: Any) -> None:
        n_warps = _whole_warps(m, threads(m, i), ins)

        def table(reads: Any) -> Any:
            return np.stack([full(m, i, x(m, i)) for x in reads], axis=1).reshape(n_warps, 32, -1)

        if always_exact or m.launch.exact_mma:
            exact = np.int64 if ta in ("s8", "u8") else np.float64
            a, c = np.zeros((n_warps, m_, k_), exact), np.zeros((n_warps, k_, n_), exact)
            a[:, arow, acol] = decode(table(ra), ta)
            c[:, brow, bcol] = decode(table(rb), tb)
            product = np.matmul(a, c)
            _accumulate(m, i, writes, product, table(rc), to, tc, m_, saturate)
            return
        a, b = np.zeros((k_, m_, n_warps), np.float32), np.zeros((k_, n_, n_warps), np.float32)
        a[acol, arow] = decode(table(ra), ta).transpose(1, 2, 3, 0)
        b[brow, bcol] = decode(table(rb), tb).transpose(1, 2, 3, 0)
        old = np.ascontiguousarray(table(rc))
        old = old.view(np.float32)[..., None] if tc == "f32" else decode(old, tc)
        c = np.zeros((m_, n_, n_warps), np.float32)
        c[row_c, col_c] = old.transpose(1, 2, 3, 0)
        rule = sum_rule(m.launch.arch, ta)
        found = multiply_add(a, b, c, ta, rule, c_kind=tc, to=to)[row, col]
        for d, v in zip(writes, found.swapaxes(0, 1), strict=True):  # v: (32, numbers, warps)
            if to == "f16":
                words = floats.join16(pack16(v[:, 0].T, "f16"), pack16(v[:, 1].T, "f16"))
            else:
                words = np.ascontiguousarray(v[:, 0].T)
            d(m, i, words.reshape(-1))

    return run


def _results(registers: int, kind: str) -> tuple[Any, Any]:
    """Return row and column of each number of C and D: arrays (32 lanes, registers, numbers)."""
    r, e = np.arange(registers)[:, None], np.arange(2 if kind == "f16" else 1)
    row, col = (_LANE >> 2)[:, None, None], 2 * (_LANE & 3)[:, None, None]
    if kind == "f16":
        return row + 8 * r + 0 * e, col + e + 0 * r
    return row + 8 * (r >> 1) + 0 * e, col + (r & 1) + 0 * e


def _whole_warps(m: Machine, t: Any, ins: Instruction) -> int:
    if len(t) % 32 or not (m.lane[t].reshape(-1, 32) == _LANE).all():
        raise m.error("masks", f"{ins.opcode} executed by part of a warp", int(t[0]))
    return len(t) // 32


def fragment_a(rows: int, depth: int, nbytes: int, registers: int) -> tuple[Any, Any]:
    """Return row and column of each element of A: arrays (32 lanes, registers, elements)."""
    per = max(4 // nbytes, 1)
    r, e = np.arange(registers), np.arange(per)
    group, member = (_LANE >> 2)[:, None, None], (_LANE & 3)[:, None, None]
    two_halves = rows == 16
    row = group + 8 * (r & 1)[None, :, None] * two_halves + 0 * e
    half = r >> 1 if two_halves else r
    n_halves = max(registers // (2 if two_halves else 1), 1)
    col = member * per + e + (depth // n_halves) * half[None, :, None] + 0 * row
    return row, col


def fragment_b(depth: int, nbytes: int, registers: int) -> tuple[Any, Any]:
    """Return column and row (the depth) of each element of B."""
    per = max(4 // nbytes, 1)
    r, e = np.arange(registers), np.arange(per)
    group, member = (_LANE >> 2)[:, None, None], (_LANE & 3)[:, None, None]
    depth_index = member * per + e + (depth // registers) * r[None, :, None]
    return group + 0 * depth_index, depth_index


def elements(raw: Any, name: str) -> Any:
    """Return the numbers of a type in an array of bytes or words, along its last axis."""
    if name == "bf16":
        return floats.bf16_to_f32(raw.view(np.uint16))
    if name == "tf32":  # the hardware reads the upper 19 bits
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    if name in floats.FP8:
        return floats.FP8[name][raw.view(np.uint8)]
    return raw.view({"f16": np.float16, "f64": np.float64, "s8": np.int8, "u8": np.uint8}[name])


def decode(words: Any, name: str) -> Any:
    """Return the elements of fragment registers: (warps, 32, registers, elements)."""
    w = np.ascontiguousarray(words)
    return elements(w.reshape(*w.shape, 1), name)


def _accumulate(
    m: Machine,
    i: Any,
    writes: Any,
    product: Any,
    c: Any,
    to: str,
    tc: str,
    rows: int,
    saturate: bool,
) -> None:
    """Add C and write D: each lane holds two neighbours of row ``lane / 4`` (and of row + 8)."""
    row, col = _LANE >> 2, 2 * (_LANE & 3)
    if to == "f16":
        old = decode(c, "f16").astype(np.float64)
        for r, d in enumerate(writes):
            both = [
                pack16(product[:, row + 8 * r, col + e] + old[:, :, r, e], "f16") for e in (0, 1)
            ]
            d(m, i, floats.join16(*both).reshape(-1))
        return
    kind = {"f32": np.float32, "s32": np.int32, "f64": np.float64}[to]
    old = (
        np.ascontiguousarray(c).view(kind) if tc == to else decode(c, tc).reshape(*c.shape[:2], -1)
    )
    for r, d in enumerate(writes):
        total = product[:, row + 8 * (r >> 1), col + (r & 1)] + old[:, :, r]
        if saturate and kind is np.int32:
            total = np.clip(total, -(2**31), 2**31 - 1)
        d(m, i, total.astype(kind).reshape(-1))


def load_matrix(b: Binder, ins: Instruction) -> Collective:
    """``ldmatrix``: 8 x 8 matrices of 16-bit elements; lane `l` gives row ``l`` of all of them."""
    if not ins.has("m8n8") or not ins.has("b16"):
        raise b.unsupported(ins)
    writes, address = b.writes(ins.args[0]), b.address(ins.args[1])
    n, transposed = len(writes), ins.has("trans")
    space = "shared" if any(p.startswith("shared") for p in ins.op) else "generic"
    row, col = _LANE >> 2, 2 * (_LANE & 3)

    def run(m: Machine, i: Any, masks: Any) -> None:
        t = threads(m, i)
        n_warps = _whole_warps(m, t, ins)
        m.touch()
        at = full(m, i, address(m, i)).reshape(n_warps, 32)[:, : 8 * n].reshape(-1)
        who = t.reshape(n_warps, 32)[:, : 8 * n].reshape(-1)
        got = m.memory.load(who, at, space, 8, 2, what="ldmatrix")
        values = np.stack(got, axis=1).view(np.uint16).reshape(n_warps, n, 8, 8)
        for r, d in enumerate(writes):
            if transposed:
                low, high = values[:, r, col, row], values[:, r, col + 1, row]
            else:
                low, high = values[:, r, row, col], values[:, r, row, col + 1]
            d(m, i, floats.join16(low, high).reshape(-1))

    return run


def store_matrix(b: Binder, ins: Instruction) -> Collective:
    """``stmatrix``: the inverse of ``ldmatrix``."""
    if not ins.has("m8n8") or not ins.has("b16") or not isinstance(ins.args[1], Vec):
        raise b.unsupported(ins)
    reads, address = b.reads(ins.args[1].items, TYPES["b32"]), b.address(ins.args[0])
    n, transposed = len(reads), ins.has("trans")
    row, col = _LANE >> 2, 2 * (_LANE & 3)

    def run(m: Machine, i: Any, masks: Any) -> None:
        t = threads(m, i)
        n_warps = _whole_warps(m, t, ins)
        m.touch()
        values = np.zeros((n_warps, n, 8, 8), np.uint16)
        for r, x in enumerate(reads):
            v = full(m, i, x(m, i)).reshape(n_warps, 32)
            low, high = floats.split16(v)
            if transposed:
                values[:, r, col, row], values[:, r, col + 1, row] = low, high
            else:
                values[:, r, row, col], values[:, r, row, col + 1] = low, high
        at = full(m, i, address(m, i)).reshape(n_warps, 32)[:, : 8 * n].reshape(-1)
        who = t.reshape(n_warps, 32)[:, : 8 * n].reshape(-1)
        words = values.reshape(-1, 8).view(np.uint64)
        m.memory.store(who, at, "shared", [words[:, 0].copy(), words[:, 1].copy()], what="stmatrix")

    return run


def transpose(b: Binder, ins: Instruction) -> Collective:
    """``movmatrix``: transpose an 8 x 8 matrix of 16-bit elements held by a warp."""
    d, x = b.write(ins.args[0]), b.read(ins.args[1], TYPES["b32"])
    row, col = _LANE >> 2, 2 * (_LANE & 3)

    def run(m: Machine, i: Any, masks: Any) -> None:
        n_warps = _whole_warps(m, threads(m, i), ins)
        v = full(m, i, x(m, i)).reshape(n_warps, 32)
        values = np.zeros((n_warps, 8, 8), np.uint16)
        values[:, row, col], values[:, row, col + 1] = floats.split16(v)
        d(m, i, floats.join16(values[:, col, row], values[:, col + 1, row]).reshape(-1))

    return run
