"""CPU GEMM with row-major float weights: register tiles along K, or of a transposed panel.

`gemm_rows` (few tokens): tiles of 4 rows x 4 tokens, 16 lanes along K, `w` read in place.
`gemm_transposed` (many tokens): panels of 16 rows are transposed, so that a lane is a row and no
lanes are added.

Both add in the order of `nbflow_kernels.matmul.cpu`.  What is a lane in `gemm_rows` is a chain of
additions in `gemm_transposed`: chain i of 16 adds the products of columns i, i + 16, ... of a
panel, one after the other; the chains are added as the tree `simd.sum`.  As plain loops:
`loops.row_major`.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd, simd_memory
from nbflow_kernels.cpu.simd_memory import read_f32, write_f32
from nbflow_kernels.matmul import cpu_packed_tiles

PANEL = 2048  # columns; 16 rows as float32 are 128 KB, which fit a second-level cache
QUARTER_BYTES = 16 * PANEL  # quarter j of a transposed panel holds columns j, j + 4, j + 8, ...


@jit.device_function
def _init_outputs(bias, accumulate, out, start, stop):
    """Initialize outputs with the bias, the old output, both or zero."""
    for t in range(out.shape[0]):
        for n in range(start, stop):
            y = bias[n] if len(bias) else np.float32(0.0)
            out[t, n] = out[t, n] + y if accumulate else y


@jit.device_function(inline="always")
def _tile(n_tokens, w, row, distance, x, token, n_columns, ahead, stride):
    """Multiply 4 rows, `distance` bytes apart, by a literal number of tokens; lanes not added yet.

    Prefetches from address `ahead` on, `stride` bytes for each vector.
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
def _add_panel_rows(x, w, first, distance, n, n_rows, k, stop, out, sums):
    """Add a panel, columns [k, stop) of rows [n, n + n_rows), to `out`.

    The tile is the 4 rows from `first` on, `distance` bytes apart.  Prefetches the same panel of
    the next 4 rows.
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
def gemm_rows(x, w, bias, accumulate, out, start, stop):
    """Multiply rows [start, stop) of `w` by a few tokens, reading `w` once."""
    _init_outputs(bias, accumulate, out, start, stop)
    sums = simd_memory.allocate(5 * 64)
    # the last tile overlaps the one before it; fewer than 4 rows are tiles of one row, repeated
    last = w.shape[0] - 4
    step, distance = (4, w.strides[0]) if last >= 0 else (1, 0)
    for k in range(0, w.shape[1], PANEL):
        end = min(k + PANEL, w.shape[1])
        for n in range(start, stop, step):
            first = min(n, last) if last >= 0 else n
            _add_panel_rows(x, w, first, distance, n, min(step, stop - n), k, end, out, sums)
    simd_memory.release(sums)


@jit.device_function(inline="always")
def _four_chains(like, n_tokens, w, x, token, width, first, dst, ahead, stride):
    """Write (c0 + c8) + (c4 + c12), the chains counted from chain `first` on, to address `dst`."""
    w += QUARTER_BYTES * first
    x += 4 * first
    a = register_tiles.zero(1, n_tokens)
    b = register_tiles.zero(1, n_tokens)
    c = register_tiles.zero(1, n_tokens)
    d = register_tiles.zero(1, n_tokens)
    for _ in range(width // 16):
        simd_memory.prefetch(ahead)
        ahead += stride
        a = register_tiles.step(a, like, w, 0, x, token)
        b = register_tiles.step(b, like, w + 64, 0, x + 16, token)
        c = register_tiles.step(c, like, w + 128, 0, x + 32, token)
        d = register_tiles.step(d, like, w + 192, 0, x + 48, token)
        w += 256
        x += 64
    rest = width % 16
    if first < rest:
        a = register_tiles.step(a, like, w, 0, x, token)
    if first + 4 < rest:
        b = register_tiles.step(b, like, w + 64, 0, x + 16, token)
    if first + 8 < rest:
        c = register_tiles.step(c, like, w + 128, 0, x + 32, token)
    if first + 12 < rest:
        d = register_tiles.step(d, like, w + 192, 0, x + 48, token)
    total = register_tiles.add(register_tiles.add(a, c), register_tiles.add(b, d))
    register_tiles.store(dst, total)


@jit.device_function
def _quarter(like, n_tokens, w, x, token, width, first, dst, ahead, stride):
    """Dispatch `_four_chains` on 6, 4, 2 or 1 tokens."""
    if n_tokens == 6:
        _four_chains(like, 6, w, x, token, width, first, dst, ahead, stride)
    elif n_tokens == 4:
        _four_chains(like, 4, w, x, token, width, first, dst, ahead, stride)
    elif n_tokens == 2:
        _four_chains(like, 2, w, x, token, width, first, dst, ahead, stride)
    else:
        _four_chains(like, 1, w, x, token, width, first, dst, ahead, stride)


@jit.device_function
def _add_panel(w, x, token, n_tokens, width, quarters, sums, ahead, row_bytes, item_bytes):
    """Add the product of a transposed panel of `width` columns and tokens to `sums` (tokens, 16).

    Prefetches the panel that is transposed next: 16 rows at address `ahead`.
    """
    at = simd.address(quarters)
    t = row = 0
    while t < n_tokens:
        count = cpu_packed_tiles.tile_width(n_tokens - t)
        for first in range(4):
            dst = at + 64 * count * first
            stride = 16 * item_bytes if row < 16 else 0
            _quarter(quarters, count, w, x, token, width, first, dst, ahead, stride)
            row += 1
            ahead += row_bytes
        for i in range(count):
            sum_at = simd.address(sums) + 64 * (t + i)
            t0, t1 = simd.load_f32(at + 64 * i), simd.load_f32(at + 64 * (count + i))
            t2 = simd.load_f32(at + 64 * (2 * count + i))
            t3 = simd.load_f32(at + 64 * (3 * count + i))
            total = simd.add(simd.add(t0, t2), simd.add(t1, t3))
            simd.store_f32(sum_at, simd.add(simd.load_f32(sum_at), total))
        t += count
        x += count * token


@jit.device_function
def _transpose(w, row, k, width, scratch, panel):
    """Transpose columns k to k + width of 16 rows, as float32, to the panel at address `panel`."""
    n_rows = min(16, w.shape[0] - row)
    at = simd.address(w) + row * w.strides[0] + k * w.itemsize
    row_bytes = w.strides[0]
    dst = panel
    if n_rows < 16 or width % 16:
        for r in range(n_rows):
            for i in range(width):
                scratch[r, i] = w[row + r, k + i]
            for i in range(width, (width + 15) // 16 * 16):
                scratch[r, i] = 0
        for r in range(n_rows, 16):
            scratch[r] = 0
        at, row_bytes = simd.address(scratch), scratch.strides[0]
    for _ in range(0, width, 16):
        register_tiles.transpose_f32(w, at, row_bytes, dst, QUARTER_BYTES)
        at += 16 * w.itemsize
        dst += 256


@jit.kernel
def gemm_transposed(x, w, bias, accumulate, out, start, stop):
    """Multiply rows 16 * start to 16 * stop of `w` by many tokens."""
    n_tokens, n_columns = x.shape
    buffer = np.empty(16 * PANEL + 16, np.float32)
    scratch = np.empty((16, PANEL + 16), w.dtype)
    quarters = np.empty((24, 16), np.float32)
    sums = np.empty((min(n_tokens, cpu_packed_tiles.BLOCK_TOKENS), 16), np.float32)
    for token in range(0, n_tokens, cpu_packed_tiles.BLOCK_TOKENS):
        tokens = min(cpu_packed_tiles.BLOCK_TOKENS, n_tokens - token)
        x_at = simd.address(x) + token * x.strides[0]
        for row in range(16 * start, min(16 * stop, w.shape[0]), 16):
            n_rows = min(16, w.shape[0] - row)
            _init_sums(sums, bias, accumulate, out, token, tokens, row, n_rows)
            for k in range(0, n_columns, PANEL):
                width = min(PANEL, n_columns - k)
                # taken in the loop: an array lives until its last use by name
                panel = (simd.address(buffer) + 63) // 64 * 64
                _transpose(w, row, k, width, scratch, panel)
                ahead = simd.address(w) + row * w.strides[0] + (k + width) * w.itemsize
                if k + width == n_columns:
                    ahead = simd.address(w) + (row + 16) * w.strides[0]
                _add_panel(
                    panel, x_at + 4 * k, x.strides[0], tokens, width, quarters, sums,
                    ahead, w.strides[0], w.itemsize,
                )  # fmt: skip
            for t in range(tokens):
                for r in range(n_rows):
                    out[token + t, row + r] = sums[t, r]


@jit.device_function(inline="always")
def _init_sums(sums, bias, accumulate, out, token, n_tokens, row, n_rows):
    """Initialize the sums with the bias, the old output, both or zero."""
    for t in range(n_tokens):
        for r in range(16):
            y = np.float32(0.0)
            if r < n_rows:
                if len(bias):
                    y = bias[row + r]
                if accumulate:
                    y = out[token + t, row + r] + y
            sums[t, r] = y
