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

from nbflow_kernels import lanes, registers, simd
from nbflow_kernels._jit import inline, njit, part
from nbflow_kernels.matmul import transposed
from nbflow_kernels.matmul.transposed import PANEL
from nbflow_kernels.threads import split_rows

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
        split_rows(transposed.multiply, n_groups, work, x, w, bias, accumulate, out)
        return
    stream = x.shape[0] == 1 and w.nbytes >= ONE_STREAM_BYTES
    kernel = _matmul_stream if stream else _matmul_tiles
    split_rows(kernel, w.shape[0], work, x, w, bias, accumulate, out)


@part
def _begin(bias: Any, accumulate: Any, out: Any, start: Any, stop: Any) -> None:
    """Write what the sums are added to: nothing, the bias, the old output, or both."""
    for t in range(out.shape[0]):
        for n in range(start, stop):
            y = bias[n] if len(bias) else np.float32(0.0)
            out[t, n] = out[t, n] + y if accumulate else y


@inline
def _tails(rows: Any, first: Any, n_rows: Any, tails: Any) -> None:
    """Copy the columns after the last multiple of 16 of some rows to `tails` (rows, 16)."""
    full = rows.shape[1] // 16 * 16
    for r in range(n_rows):
        for i in range(full, rows.shape[1]):
            tails[r, i - full] = rows[first + r, i]


@njit
def _matmul_stream(
    x: Any, w: Any, bias: Any, accumulate: Any, out: Any, start: Any, stop: Any
) -> None:
    """Rows [start, stop) of `w` for one token, as one stream of addresses."""
    _begin(bias, accumulate, out, start, stop)
    n_columns = w.shape[1]
    x_tail, w_tail = np.zeros((1, 16), np.float32), np.zeros((1, 16), w.dtype)
    _tails(x, 0, 1, x_tail)
    for n in range(start, stop):
        row = simd.address(w) + n * w.strides[0]
        y = out[0, n]
        for k in range(0, n_columns, PANEL):
            a = simd.splat(0.0)
            stop_at = min(k + PANEL, n_columns // 16 * 16)
            for i in range(k, stop_at, 16):
                v = registers.load_widened(w, row + i * w.itemsize)
                a = simd.fma(v, simd.load_f32(simd.address(x) + i * 4), a)
            if stop_at < min(k + PANEL, n_columns):
                _tails(w, n, 1, w_tail)
                v = registers.load_widened(w, simd.address(w_tail))
                a = simd.fma(v, simd.load_f32(simd.address(x_tail)), a)
            y += simd.sum(a)
        out[0, n] = y


@inline
def _tile(
    n_rows: Any, n_tokens: Any, w: Any, row: Any, x: Any, token: Any, n_vectors: Any, w_tail: Any,
    x_tail: Any, ahead: Any, stride: Any,
) -> Any:  # fmt: skip
    """Return the lanes of a literal number of rows and tokens, from addresses `row` and `x` on.

    Meanwhile ask for memory from address `ahead` on, `stride` bytes for each vector.
    """
    tile = registers.zero(n_rows, n_tokens)
    for _ in range(n_vectors):
        lanes.prefetch(ahead)
        ahead += stride
        tile = registers.step_lanes(tile, w, row, w.strides[0], x, token)
        row += 16 * w.itemsize
        x += 64
    if x_tail:
        tile = registers.step_lanes(tile, w, w_tail, 16 * w.itemsize, x_tail, 64)
    return tile


@inline
def _sum_lanes(tile: Any, count: Any, sums: Any) -> None:
    """Write the sums over the lanes of a tile of `count` vectors to sums[:count]."""
    at = simd.address(sums) + 64
    registers.store(at, tile)
    for i in range(count):
        sums[i] = simd.sum(simd.load_f32(at + 64 * i))


@part
def _rows_panel(
    x: Any, x_tails: Any, w: Any, w_tails: Any, n: Any, n_rows: Any, k: Any, stop: Any, out: Any,
    sums: Any,
) -> None:  # fmt: skip
    """Add columns [k, stop) of 4 rows, or one, from row n on to `out`.

    Meanwhile ask for the panel of as many rows after them.
    """
    n_vectors, ragged, token = (stop - k) // 16, (stop - k) % 16 > 0, x.strides[0]
    row = simd.address(w) + n * w.strides[0] + k * w.itemsize
    w_tail, n_tokens = simd.address(w_tails), x.shape[0]
    # a quarter of the tiles for each of the next four rows
    per_row = max(1, n_tokens // 16)
    row_bytes = (stop - k) * w.itemsize
    stride = (row_bytes // per_row + n_vectors) // max(1, n_vectors)
    t = 0
    tile_number = 0
    while t < n_tokens:
        tokens = 4 if t + 4 <= n_tokens else 1
        x_at = simd.address(x) + t * token + 4 * k
        x_tail = simd.address(x_tails) + 64 * t if ragged else 0
        ahead = row + (n_rows + tile_number // per_row) * w.strides[0]
        ahead += tile_number % per_row * (row_bytes // per_row)
        if n_rows == 4 and tokens == 4:
            tile = _tile(4, 4, w, row, x_at, token, n_vectors, w_tail, x_tail, ahead, stride)
            simd.store_f32(simd.address(sums), registers.lane_sums(tile))
        elif n_rows == 4:
            tile = _tile(4, 1, w, row, x_at, token, n_vectors, w_tail, x_tail, ahead, stride)
            _sum_lanes(tile, 4, sums)
        elif tokens == 4:
            tile = _tile(1, 4, w, row, x_at, token, n_vectors, w_tail, x_tail, ahead, stride)
            _sum_lanes(tile, 4, sums)
        else:
            tile = _tile(1, 1, w, row, x_at, token, n_vectors, w_tail, x_tail, ahead, stride)
            _sum_lanes(tile, 1, sums)
        for i in range(tokens):
            for r in range(n_rows):
                out[t + i, n + r] += sums[i * n_rows + r]
        t += tokens
        tile_number += 1


@njit
def _matmul_tiles(
    x: Any, w: Any, bias: Any, accumulate: Any, out: Any, start: Any, stop: Any
) -> None:
    """Rows [start, stop) of `w` for any number of tokens."""
    _begin(bias, accumulate, out, start, stop)
    n_tokens, n_columns = x.shape
    ragged = n_columns % 16 > 0
    x_tails = np.zeros((n_tokens if ragged else 0, 16), np.float32)
    w_tails = np.zeros((4, 16), w.dtype)
    sums = np.empty(16 + 4 * 16, np.float32)
    if ragged:
        _tails(x, 0, n_tokens, x_tails)
    for k in range(0, n_columns, PANEL):
        end = min(k + PANEL, n_columns)
        n = start
        while n < stop:
            n_rows = 4 if n + 4 <= stop else 1
            if end % 16:
                _tails(w, n, n_rows, w_tails)
            _rows_panel(x, x_tails, w, w_tails, n, n_rows, k, end, out, sums)
            n += n_rows
