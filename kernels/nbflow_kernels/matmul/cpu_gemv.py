"""CPU GEMV with row-major float weights: row after row, one stream of addresses.

The order of additions is that of `nbflow_kernels.matmul.cpu`; as plain loops: `loops.row_major`.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd, simd_memory
from nbflow_kernels.matmul.cpu_gemm import PANEL


@jit.kernel
def gemv(x, w, bias, accumulate, out, start, stop):
    """Multiply rows [start, stop) of `w` by one token."""
    n_columns, x_at, sums = w.shape[1], simd.address(x), simd_memory.allocate(64)
    for n in range(start, stop):
        row = simd.address(w) + n * w.strides[0]
        y = bias[n] if len(bias) else np.float32(0.0)
        y = out[0, n] + y if accumulate else y
        for k in range(0, n_columns, PANEL):
            end = min(k + PANEL, n_columns)
            tile = register_tiles.zero(1, 1)
            for i in range(k, end - 15, 16):
                at = row + i * w.itemsize
                tile = register_tiles.step_lanes(tile, w, at, 0, x_at + 4 * i, 0)
            if end % 16:
                i = end // 16 * 16
                at = row + i * w.itemsize
                tile = register_tiles.step_first(tile, w, at, 0, x_at + 4 * i, 0, end - i)
            register_tiles.store(sums, tile)
            y += simd.sum(simd.load_f32(sums))
        out[0, n] = y
    simd_memory.release(sums)
