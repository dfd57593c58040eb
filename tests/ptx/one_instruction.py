"""Runs one PTX instruction on arrays of operands, one thread per element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow_ptx import Checks, Emulator

_BITS = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def kernel_text(body: str, inputs: Sequence[int], outputs: Sequence[int], declare: str = "") -> str:
    """Return a kernel that loads operands %a0, %a1.. and stores results %d0, %d1..

    Widths are in bytes; one-byte operands live in 16-bit registers, as PTX has no smaller ones.
    """
    arrays = [*(f"i{k}" for k in range(len(inputs))), *(f"o{k}" for k in range(len(outputs)))]
    params = ", ".join(f".param .u64 {a}" for a in arrays)
    lines = [
        f".visible .entry k({params}) {{",
        ".reg .b64 %p, %at; .reg .b32 %t, %n, %c; .reg .pred %q, %q2;",
    ]
    lines += [f".reg .{_BITS[max(w, 2)]} %a{k};" for k, w in enumerate(inputs)]
    lines += [f".reg .{_BITS[max(w, 2)]} %d{k};" for k, w in enumerate(outputs)]
    lines += [declare, "mov.u32 %t, %tid.x; mov.u32 %n, %ntid.x; mov.u32 %c, %ctaid.x;"]
    lines += ["mad.lo.u32 %t, %n, %c, %t;"]

    def place(array: str, width: int) -> list[str]:
        return [f"ld.param.u64 %p, [{array}];", f"mad.wide.u32 %at, %t, {width}, %p;"]

    for k, w in enumerate(inputs):
        lines += [*place(f"i{k}", w), f"ld.global.{_BITS[w]} %a{k}, [%at];"]
    lines.append(body)
    for k, w in enumerate(outputs):
        lines += [*place(f"o{k}", w), f"st.global.{_BITS[w]} [%at], %d{k};"]
    return "\n".join([".version 8.4", ".target sm_90", ".address_size 64", *lines, "ret;", "}"])


def execute(body: str, inputs: Sequence[np.ndarray], *outputs: Any, declare: str = "") -> Any:
    """Run `body` on every row of the inputs; return one array per output type."""
    n = len(inputs[0]) if inputs else 32
    padded = -(-n // 64) * 64
    arrays = [np.concatenate([a, np.repeat(a[-1:], padded - n)]) for a in inputs]
    results = [np.zeros(padded, o) for o in outputs]
    text = kernel_text(body, [a.itemsize for a in arrays], [r.itemsize for r in results], declare)
    Emulator(text, checks=Checks(races=False)).launch("k", padded // 64, 64, *arrays, *results)
    found = [r[:n] for r in results]
    return found[0] if len(found) == 1 else found


def products(*axes: np.ndarray) -> list[np.ndarray]:
    """Return every combination of the values of the axes, one array per axis."""
    grids = np.meshgrid(*axes, indexing="ij")
    return [
        np.ascontiguousarray(g.ravel()).astype(a.dtype) for g, a in zip(grids, axes, strict=True)
    ]


def as_bits(a: np.ndarray) -> np.ndarray:
    """Return the bit patterns of an array."""
    return np.ascontiguousarray(a).view(_UINT[a.itemsize])
