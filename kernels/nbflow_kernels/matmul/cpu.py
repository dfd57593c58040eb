"""Matrix product on the CPU with row-major weights: 16 lanes along K, panels of K, register tiles.

Order of additions, the same for every output element however many tokens or threads there are:
K is cut into panels of `PANEL`; within a panel, lane i adds the products of columns i, i + 16, ...
one after the other (fused multiply-add); the lanes are added as a tree (`simd.sum`); the panels
are added, from left to right, to what the output starts with.  Zeros pad the end of the last one.

==================  ===============================================================================
`_matmul_stream`    one token, a large weight: row after row, one stream of addresses
`_matmul_tiles`     few tokens: tiles of 4 rows x 4 tokens read `w` where it lies, once
`transposed`        many tokens: 16 rows are transposed panel by panel, so that a lane is a row,
                    what was a lane is a chain of additions, and no lanes are added
==================  ===============================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, register_tiles, simd, simd_memory
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_memory import read_f32, write_f32
from nbflow_kernels.matmul import cpu_gemm
from nbflow_kernels.matmul.cpu_gemm import PANEL

MIN_TRANSPOSED_TOKENS = 64  # below, transposing the weights costs more than it saves
ONE_STREAM_BYTES = 4 << 20  # a weight this large comes from memory, best as one stream of addresses
_NO_BIAS = np.zeros(0, np.float32)


def matmul(
    x: NDArray[np.float32],
    w: NDArray[Any],
    bias: NDArray[np.float32] | None,
    accumulate: bool,
    out: NDArray[np.float32],
) -> None:
    """See `nbflow_kernels.matmul`."""
    if w.dtype == np.float16:
        w = w.view(np.int16)  # int16 stands for float16 bits, uint16 for bfloat16 bits
    bias = _NO_BIAS if bias is None else bias
    work = float(x.shape[0] * w.size)
    if x.shape[0] >= MIN_TRANSPOSED_TOKENS:
        n_groups = -(-w.shape[0] // 16)
        parallel_for(cpu_gemm.multiply, n_groups, work, x, w, bias, accumulate, out)
        return
    stream = x.shape[0] == 1 and w.nbytes >= ONE_STREAM_BYTES
    kernel = _matmul_stream if stream else _matmul_tiles
    parallel_for(kernel, w.shape[0], work, x, w, bias, accumulate, out)


@jit.device_function
def _begin(bias, accumulate, out, start, stop):
    """Write what the sums are added to: nothing, the bias, the old output, or both."""
    for t in range(out.shape[0]):
        for n in range(start, stop):
            y = bias[n] if len(bias) else np.float32(0.0)
            out[t, n] = out[t, n] + y if accumulate else y


@jit.kernel
def _matmul_stream(x, w, bias, accumulate, out, start, stop):
    """Rows [start, stop) of `w` for one token, as one stream of addresses."""
    _begin(bias, accumulate, out, start, stop)
    n_columns, x_at, sums = w.shape[1], simd.address(x), simd_memory.allocate(64)
    for n in range(start, stop):
        row = simd.address(w) + n * w.strides[0]
        y = out[0, n]
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


@jit.device_function(inline="always")
def _tile(n_tokens, w, row, distance, x, token, n_columns, ahead, stride):
    """Return the lanes of 4 rows, `distance` bytes apart, times a literal number of tokens.

    Meanwhile ask for memory from address `ahead` on, `stride` bytes for each vector.
    """
    tile = register_tiles.zero(4, n_tokens)
    for _ in range(n_columns // 16):
        simd_memory.prefetch(ahead)
        ahead += stride
        tile = register_tiles.step_lanes(tile, w, row, distance, x, token)
        row += 16 * w.itemsize
        x += 64
    if n_columns % 16:
        tile = register_tiles.step_first(tile, w, row, distance, x, token, n_columns % 16)
    return tile


@jit.device_function
def _rows_panel(x, w, first, distance, n, n_rows, k, stop, out, sums):
    """Add columns [k, stop) of rows [n, n + n_rows) to `out`, of the 4 rows from `first` on.

    The rows lie `distance` bytes apart.  Meanwhile ask for the panel of the 4 rows after them.
    """
    n_tokens, n_columns, token = x.shape[0], stop - k, x.strides[0]
    row = simd.address(w) + first * w.strides[0] + k * w.itemsize
    # a quarter of the tiles for each of the next four rows
    per_row = max(1, n_tokens // 16)
    row_bytes = n_columns * w.itemsize
    n_vectors = n_columns // 16
    stride = (row_bytes // per_row + n_vectors) // max(1, n_vectors)
    t = 0
    tile_number = 0
    while t < n_tokens:
        tokens = 4 if t + 4 <= n_tokens else 1
        x_at = simd.address(x) + t * token + 4 * k
        ahead = row + (4 + tile_number // per_row) * w.strides[0]
        ahead += tile_number % per_row * (row_bytes // per_row)
        if tokens == 4:
            tile = _tile(4, w, row, distance, x_at, token, n_columns, ahead, stride)
            simd.store_f32(sums, register_tiles.lane_sums(tile))
        else:
            one = _tile(1, w, row, distance, x_at, token, n_columns, ahead, stride)
            register_tiles.store(sums + 64, one)
            for r in range(4):
                write_f32(sums + 4 * r, simd.sum(simd.load_f32(sums + 64 + 64 * r)))
        for i in range(tokens):
            for r in range(n - first, n - first + n_rows):
                out[t + i, first + r] += read_f32(sums + 16 * i + 4 * r)
        t += tokens
        tile_number += 1


@jit.kernel
def _matmul_tiles(x, w, bias, accumulate, out, start, stop):
    """Rows [start, stop) of `w` for any number of tokens."""
    _begin(bias, accumulate, out, start, stop)
    sums = simd_memory.allocate(5 * 64)
    # a tile of four rows at the end has some of the rows before; of fewer than four, one four times
    last = w.shape[0] - 4
    step, distance = (4, w.strides[0]) if last >= 0 else (1, 0)
    for k in range(0, w.shape[1], PANEL):
        end = min(k + PANEL, w.shape[1])
        for n in range(start, stop, step):
            first = min(n, last) if last >= 0 else n
            _rows_panel(x, w, first, distance, n, min(step, stop - n), k, end, out, sums)
    simd_memory.release(sums)
