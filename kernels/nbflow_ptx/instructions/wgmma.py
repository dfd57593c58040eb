"""Products of matrices by a warpgroup of 128 threads: ``wgmma``.

The sums are those of ``mma.sync`` on the same device (`tensor_cores`), so a kernel of ``wgmma`` and
one of ``mma.sync`` that take the same steps of 16 along K give the same bits.  Only FP8 products
are added with fewer bits.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from nbflow_ptx.instructions import mma
from nbflow_ptx.instructions.binder import Binder, Read, full, threads
from nbflow_ptx.instructions.tensor_cores import multiply_add, sum_rule
from nbflow_ptx.instructions.warp_collectives import Collective
from nbflow_ptx.instructions.wgmma_descriptors import core_rows, decode, problem
from nbflow_ptx.machine.async_proxy import read_units
from nbflow_ptx.machine.machine import Machine
from nbflow_ptx.machine.warpgroups import WARPGROUP
from nbflow_ptx.parsing.syntax import Imm, Instruction, Operand, Vec
from nbflow_ptx.parsing.types import TYPES

#: Bytes of an element of A and B.
_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_INTEGERS = ("s8", "u8")
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


def wgmma(b: Binder, ins: Instruction) -> Collective:
    """``wgmma.mma_async``, ``.fence``, ``.commit_group`` and ``.wait_group``."""
    if not b.kernel.target.startswith("sm_90a"):
        raise b.unsupported(ins, f"needs .target sm_90a, not {b.kernel.target or 'none'}")
    if ins.has("mma_async"):
        return _Product(b, ins).run
    if ins.has("fence"):
        return lambda m, i, masks: m.warpgroups.fence(threads(m, i))
    if ins.has("commit_group"):
        return lambda m, i, masks: m.warpgroups.commit(threads(m, i))
    if ins.has("wait_group") and isinstance(ins.args[0], Imm):
        left = ins.args[0].value
        return lambda m, i, masks: m.warpgroups.wait(threads(m, i), left)
    raise b.unsupported(ins)


class _Product:
    """One ``wgmma.mma_async``: D (64, n) = A (64, k) B (k, n), or D added to it."""

    def __init__(self, b: Binder, ins: Instruction) -> None:
        shape = next((s for p in ins.op if (s := _SHAPE.fullmatch(p))), None)
        kinds = [p for p in ins.op[3:] if p in _BYTES or p in ("f32", "s32")]
        if shape is None or len(kinds) != 3 or ins.has("sp"):
            raise b.unsupported(ins)
        self.n, self.k = int(shape[1]), int(shape[2])
        to, self.a_kind, self.b_kind = kinds
        integers = self.a_kind in _INTEGERS
        sizes = {_BYTES.get(kind) for kind in kinds[1:]}
        if sizes != {32 // self.k} or integers != (to == "s32"):
            raise b.unsupported(ins)
        allowed = (8, 24, *range(16, 257, 16)) if integers else range(8, 257, 8)
        self.writes = b.writes(ins.args[0])
        if self.n not in allowed or len(self.writes) != self.n // 2:
            raise b.unsupported(ins, f"n = {self.n} with {len(self.writes)} accumulators")
        self.exact: Any = np.int64 if integers else np.float64
        self.to: Any = np.int32 if integers else np.float32
        self.saturate = ins.has("satfinite")
        self._operands(b, ins)
        self._immediates(b, ins)

    def _operands(self, b: Binder, ins: Instruction) -> None:
        d, a = ins.args[:2]
        word = TYPES["b32"]
        assert isinstance(d, Vec)
        self.reads = b.reads(d.items, word)
        in_registers = isinstance(a, Vec)
        self.a_registers = b.reads(a.items, word) if isinstance(a, Vec) else []
        self.a = b.read(a, TYPES["u64"]) if not in_registers else None
        if in_registers and len(self.a_registers) != 4:
            raise b.unsupported(ins, "A takes 4 registers")
        self.b = b.read(ins.args[2], TYPES["u64"])
        self.scale = b.read(ins.args[3], TYPES["pred"])
        self.results = np.array(b.plan.rows_of(d), np.int64)
        self.sources = np.array(b.plan.rows_of(a) if in_registers else [], np.int64)

    def _immediates(self, b: Binder, ins: Instruction) -> None:
        """Read what follows scale-d: the signs of A and B, and which of them are transposed."""
        found = [_immediate(b, ins, a) for a in ins.args[4:]]
        signs = 0 if self.a_kind in _INTEGERS else 2
        orders = (1 if self.a is None else 2) if self.k == 16 else 0
        if len(found) != signs + orders or any(v not in (1, -1) for v in found[:signs]):
            raise b.unsupported(ins, f"{signs} signs and {orders} orders expected behind scale-d")
        self.sign = self.exact(np.prod(found[:signs], dtype=np.int64))
        self.a_mn = orders == 2 and bool(found[-2])
        self.b_mn = orders > 0 and bool(found[-1])

    # Running -----------------------------------------------------------------------------------

    def run(self, m: Machine, i: Any, masks: Any) -> None:
        lanes = threads(m, i)
        m.warpgroups.issue(lanes, self.results, self.sources)
        if self.a is None:
            table = self._table(m, i, self.a_registers).reshape(-1, 32, 4)
            row, col = mma.fragment_a(16, self.k, 32 // self.k, 4)
            a = np.zeros((len(table), 16, self.k), self.exact)
            a[:, row, col] = mma.decode(table, self.a_kind)
            a = a.reshape(-1, 64, self.k)
        else:
            a = self._shared(m, i, lanes, self.a, self.a_kind, 64, self.a_mn, "A")
        b = self._shared(m, i, lanes, self.b, self.b_kind, self.n, self.b_mn, "B")
        old = self._old(m, i, lanes)
        if self.a_kind in _INTEGERS or m.launch.exact_mma:
            total = self._registers(np.matmul(a, b.swapaxes(1, 2)) * self.sign) + old
        else:
            total = self._registers(self._rounded(m, a * self.sign, b, old))
        if self.saturate:
            total = np.clip(total, -(2**31), 2**31 - 1)
        words = total.astype(self.to).view(np.uint32)
        for d, v in zip(self.writes, words, strict=True):
            d(m, i, v)

    def _rounded(self, m: Machine, a: Any, b: Any, old: Any) -> Any:
        """Return A B + D as the device rounds it, (groups, 64, n)."""
        rule = sum_rule(m.launch.arch, self.a_kind, warpgroup=True)
        c = np.empty((len(a), 64, self.n), np.float32)
        by_thread = self._by_thread(c)  # a view
        by_thread[...] = old.reshape(by_thread.shape)
        a, b = (np.ascontiguousarray(x.transpose(2, 1, 0), np.float32) for x in (a, b))
        found = multiply_add(a, b, c.transpose(1, 2, 0), self.a_kind, rule)
        return np.ascontiguousarray(found.transpose(2, 0, 1))

    def _table(self, m: Machine, i: Any, reads: list[Read]) -> Any:
        return np.stack([full(m, i, x(m, i)) for x in reads], axis=1)

    def _shared(
        self, m: Machine, i: Any, lanes: Any, descriptor: Read, kind: str, lines: int, mn: bool,
        name: str,
    ) -> Any:  # fmt: skip
        """Return a matrix of each warpgroup in shared memory, (groups, lines, k)."""
        bits = self._one_each(m, lanes, full(m, i, descriptor(m, i)), f"descriptor of {name}")
        places: dict[int, Any] = {}
        for k, word in enumerate(bits.tolist()):
            if word not in places:
                found = decode(word)
                wrong = problem(found, lines, mn)
                if wrong and m.checks.aligned:
                    raise m.error("aligned", f"{name}: {wrong}", int(lanes[WARPGROUP * k]))
                places[word] = core_rows(found, lines, mn).reshape(-1)
        at = np.stack([places[word] for word in bits.tolist()])
        raw = read_units(m, lanes[::WARPGROUP], at, f"wgmma's read of {name}")
        values = mma.elements(raw, kind).astype(self.exact)  # (groups, core rows, elements of each)
        if mn:
            return values.reshape(len(bits), 16, lines).swapaxes(1, 2)
        return values.reshape(len(bits), lines, self.k)

    def _one_each(self, m: Machine, lanes: Any, values: Any, what: str) -> Any:
        """Return the value of each warpgroup, which all its threads must have."""
        table = values.reshape(-1, WARPGROUP)
        differ = table != table[:, :1]
        if differ.any() and m.checks.wgmma:
            lane = int(lanes[np.flatnonzero(differ.reshape(-1))[0]])
            raise m.error("wgmma", f"the threads of a warpgroup have more than one {what}", lane)
        return table[:, 0]

    def _registers(self, matrix: Any) -> Any:
        """Return a matrix (groups, 64, n) by accumulators, (n / 2, threads).

        Thread ``32 w + 4 g + t`` of a warpgroup holds, of each 8 columns, those from ``2 t`` on
        of the lines ``16 w + g`` and ``16 w + g + 8``.
        """
        return self._by_thread(matrix).reshape(self.n // 2, -1)

    def _by_thread(self, matrix: Any) -> Any:
        parts = matrix.reshape(-1, 4, 2, 8, self.n // 8, 4, 2)
        return parts.transpose(4, 2, 6, 0, 1, 3, 5)

    def _old(self, m: Machine, i: Any, lanes: Any) -> Any:
        """Return D before the product, (n / 2, threads); zeros where scale-d says so."""
        keep = self._one_each(m, lanes, full(m, i, self.scale(m, i)), "scale-d")
        if not keep.any():
            return np.zeros((self.n // 2, len(lanes)), self.to)
        old = np.stack([full(m, i, x(m, i)) for x in self.reads]).view(self.to)
        return np.where(keep.repeat(WARPGROUP), old, self.to(0))


def _immediate(b: Binder, ins: Instruction, a: Operand) -> int:
    if not isinstance(a, Imm):
        raise b.unsupported(ins, "an immediate expected")
    return a.value - (1 << 32) if a.value >> 31 == 1 else a.value
