"""Row-major weights times many tokens: panels of 16 rows, transposed, in register tiles.

The order of additions is that of `nbflow_kernels.matmul.cpu`, whose lanes become chains here: chain
i of 16 adds the products of columns i, i + 16, ... of a panel, one after the other; the chains are
added as the tree `simd.sum`, and the panels to the output, from left to right.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd, simd_memory
from nbflow_kernels.matmul import cpu_packed_tiles

PANEL = 2048  # columns; as float32, 16 rows of a panel are 128 KB, a part of a second-level cache
QUARTER_BYTES = 16 * PANEL  # of a transposed panel: columns 0, 4, 8, ..., then 1, 5, 9, ...


@jit.device_function(inline="always")
def _four_chains(like, n_tokens, w, x, token, width, first, to, ahead, stride):
    """Write (c0 + c8) + (c4 + c12), the chains counted from chain `first` on, to address `to`."""
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
    register_tiles.store(to, register_tiles.add(register_tiles.add(a, c), register_tiles.add(b, d)))


@jit.device_function
def _quarter(like, n_tokens, w, x, token, width, first, to, ahead, stride):
    """Do `_four_chains` for 6, 4, 2 or 1 tokens."""
    if n_tokens == 6:
        _four_chains(like, 6, w, x, token, width, first, to, ahead, stride)
    elif n_tokens == 4:
        _four_chains(like, 4, w, x, token, width, first, to, ahead, stride)
    elif n_tokens == 2:
        _four_chains(like, 2, w, x, token, width, first, to, ahead, stride)
    else:
        _four_chains(like, 1, w, x, token, width, first, to, ahead, stride)


@jit.device_function
def _add_panel(w, x, token, n_tokens, width, quarters, sums, ahead, row_bytes, item_bytes):
    """Add a transposed panel of `width` columns times some tokens to their `sums` (tokens, 16).

    Meanwhile ask for what is transposed next: as many columns of 16 rows at address `ahead`.
    """
    at = simd.address(quarters)
    t = row = 0
    while t < n_tokens:
        count = cpu_packed_tiles.tile_width(n_tokens - t)
        for first in range(4):
            to = at + 64 * count * first
            stride = 16 * item_bytes if row < 16 else 0
            _quarter(quarters, count, w, x, token, width, first, to, ahead, stride)
            row += 1
            ahead += row_bytes
        for i in range(count):
            to = simd.address(sums) + 64 * (t + i)
            t0, t1 = simd.load_f32(at + 64 * i), simd.load_f32(at + 64 * (count + i))
            t2 = simd.load_f32(at + 64 * (2 * count + i))
            t3 = simd.load_f32(at + 64 * (3 * count + i))
            total = simd.add(simd.add(t0, t2), simd.add(t1, t3))
            simd.store_f32(to, simd.add(simd.load_f32(to), total))
        t += count
        x += count * token


@jit.device_function
def _transpose(w, row, k, width, scratch, panel):
    """Write columns k to k + width of 16 rows as float32 to the quarters of the address `panel`."""
    n_rows = min(16, w.shape[0] - row)
    at = simd.address(w) + row * w.strides[0] + k * w.itemsize
    row_bytes = w.strides[0]
    to = panel
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
        register_tiles.transpose_f32(w, at, row_bytes, to, QUARTER_BYTES)
        at += 16 * w.itemsize
        to += 256


@jit.kernel
def multiply(x, w, bias, accumulate, out, start, stop):
    """Rows 16 * start to 16 * stop of `w`; any number of columns."""
    n_tokens, n_columns = x.shape
    room = np.empty(16 * PANEL + 16, np.float32)
    scratch = np.empty((16, PANEL + 16), w.dtype)
    quarters = np.empty((24, 16), np.float32)
    sums = np.empty((min(n_tokens, cpu_packed_tiles.BLOCK_TOKENS), 16), np.float32)
    for token in range(0, n_tokens, cpu_packed_tiles.BLOCK_TOKENS):
        tokens = min(cpu_packed_tiles.BLOCK_TOKENS, n_tokens - token)
        x_at = simd.address(x) + token * x.strides[0]
        for row in range(16 * start, min(16 * stop, w.shape[0]), 16):
            n_rows = min(16, w.shape[0] - row)
            _begin(sums, bias, accumulate, out, token, tokens, row, n_rows)
            for k in range(0, n_columns, PANEL):
                width = min(PANEL, n_columns - k)
                # `room` lives as long as its array is used; a vector should not cross cache lines
                panel = (simd.address(room) + 63) // 64 * 64
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
def _begin(sums, bias, accumulate, out, token, n_tokens, row, n_rows):
    """Write what the panels are added to: nothing, the bias, the old output, or both."""
    for t in range(n_tokens):
        for r in range(16):
            y = np.float32(0.0)
            if r < n_rows:
                if len(bias):
                    y = bias[row + r]
                if accumulate:
                    y = out[token + t, row + r] + y
            sums[t, r] = y
