"""Rows of a float matrix, chosen by index, as float32: one kernel for all element types."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_memory import (
    address_of,
    load_first,
    load_first_bf16,
    load_first_f16,
    store_first,
)

F32, F16, BF16 = 0, 1, 2
_KINDS = {"float32": F32, "float16": F16, "uint16": BF16}


def gather_rows(ids: NDArray[np.int32], table: NDArray[Any], out: NDArray[np.float32]) -> None:
    """Write ``table[ids]`` to `out`; a table of uint16 holds the bits of bfloat16.

    Rows of `out` may be strided; nothing is checked.
    """
    source = address_of(table), table.strides[0], _KINDS[table.dtype.name], table.shape[1]
    target = address_of(out), out.strides[0]
    parallel_for(_gather, len(ids), float(out.size), ids, *source, *target)


def known_rows(ids: NDArray[np.int32], n_rows: int, rows: NDArray[np.int32]) -> None:
    """Write `ids` that are rows of a table of `n_rows`, and 0 for others."""
    parallel_for(_known_rows, len(ids), float(len(ids)), ids, np.int32(n_rows), rows)


@jit.kernel
def _known_rows(ids, n_rows, rows, start, stop):
    for t in range(start, stop):
        rows[t] = ids[t] if 0 <= ids[t] < n_rows else 0


@jit.kernel(unroll=False)
def _gather(ids, table, row_bytes, kind, E, out, out_bytes, start, stop):
    """Write rows [start, stop) of the result."""
    size = 4 if kind == F32 else 2
    for t in range(start, stop):
        source, target = table + np.int64(ids[t]) * row_bytes, out + t * out_bytes
        for i in range(0, E - 15, 16):
            at = source + size * i
            if kind == F32:
                v = simd.load_f32(at)
            elif kind == F16:
                v = simd.load_f16(at)
            else:
                v = simd.load_bf16(at)
            simd.store_f32(target + 4 * i, v)
        rest, body = E % 16, E - E % 16
        if rest > 0:
            at = source + size * body
            if kind == F32:
                v = load_first(at, rest, 0.0)
            elif kind == F16:
                v = load_first_f16(at, rest)
            else:
                v = load_first_bf16(at, rest)
            store_first(target + 4 * body, rest, v)
