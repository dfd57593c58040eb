"""The layout float weights are computed from: 16 rows side by side, column after column."""

from __future__ import annotations

import math
from typing import Any

from nbflow_kernels import huge_pages, registers, simd
from nbflow_kernels.cpu import jit
from nbflow_kernels.threads import split_rows

ROWS = 16  # rows of a group: the lanes of a simd vector
COLUMNS = 8  # columns are padded to a multiple: four chains of pairs of columns


def interleave(rows: Any) -> Any:
    """Return rows (N, K) of float32, int16 or uint16 as (groups, columns, 16), zeros as padding."""
    n_rows, n_columns = rows.shape
    padded = -(-n_columns // COLUMNS) * COLUMNS
    shape = (-(-n_rows // ROWS), padded, ROWS)
    out = huge_pages.zeros(math.prod(shape) * rows.itemsize).view(rows.dtype).reshape(shape)
    split_rows(_interleave, len(out), 4.0 * out.size, rows, out)
    return out


@jit.kernel
def _interleave(rows, out, start, stop):
    """Write groups [start, stop)."""
    n_rows, n_columns = rows.shape
    for group in range(start, stop):
        first = group * ROWS
        count = min(ROWS, n_rows - first)
        done = n_columns // 16 * 16 if count == ROWS else 0
        for k in range(0, done, 16):
            at = simd.address(rows) + first * rows.strides[0] + k * rows.itemsize
            to = simd.address(out) + group * out.strides[0] + k * out.strides[1]
            registers.transpose(rows, at, rows.strides[0], to)
        for k in range(done, out.shape[1]):
            for lane in range(ROWS):
                inside = lane < count and k < n_columns
                out[group, k, lane] = rows[first + lane, k] if inside else 0
