"""The loops of the quantized product that do not depend on the layout of the codes.

The order of additions of one output element, however many rows and threads there are: even columns
and odd columns are added separately, one after the other (fused multiply-add), then the two sums
are added; then the bias; then the old output if wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import simd
from nbflow_kernels._jit import inline, njit
from nbflow_kernels.qmatmul.layouts import broadcast_f32
from nbflow_kernels.quants.packed import F16_PAIR, F16_SCALE

TILE_COLUMNS = 256  # decoded columns of 16 rows: 16 KB, half of a first-level cache
TILE_GROUPS = 4  # row groups that share the activations while these are in the second-level cache
TILE_TOKENS = 64  # activations of a tile: 64 KB


@inline
def parameters_at(at: Any, parameters: Any, zero: Any) -> Any:
    """Return the bases, scales and the address of the codes of the block at `at`."""
    if parameters == F16_PAIR:
        return simd.load_f16(at + 32), simd.load_f16(at), at + 64
    if parameters == F16_SCALE:
        scale = simd.load_f16(at)
        return simd.mul(scale, simd.splat(-zero)), scale, at + 32
    scale = simd.div(simd.to_f32(simd.load_u8(at)), simd.splat(1000.0))
    base = simd.div(simd.to_f32(simd.load_u8(at + 16)), simd.splat(100.0))
    return simd.sub(base, simd.splat(1.0)), scale, at + 32


@njit
def finish(
    even: Any, odd: Any, bias: Any, accumulate: Any, out: Any, token: Any, group: Any
) -> None:
    """Write one row group of one token: the two sums, the bias, the old output."""
    first = 16 * group
    total = simd.add(even, odd)
    at = simd.address(out) + token * out.strides[0] + 4 * first
    count = min(out.shape[1] - first, 16)
    if count == 16:
        if len(bias):
            total = simd.add(total, simd.load_f32(simd.address(bias) + 4 * first))
        if accumulate:
            total = simd.add(total, simd.load_f32(at))
        simd.store_f32(at, total)
        return
    lanes = np.empty(16, np.float32)
    simd.store_f32(simd.address(lanes), total)
    for i in range(count):
        y = lanes[i]
        if len(bias):
            y += bias[first + i]
        if accumulate:
            y += out[token, first + i]
        out[token, first + i] = y


@inline
def one_row(
    words: Any, pair: Any, columns: Any, n_words: Any, unit_bytes: Any,
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any,
    bias: Any, accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """Multiply a single row of activations by row groups [start, stop), decoding in registers.

    A unit has `columns` columns in `n_words` low vectors and takes `unit_bytes` bytes.
    """
    per_word = columns // n_words
    group_bytes = len(packed) // max(1, (out.shape[1] + 15) // 16)
    for group in range(start, stop):
        at = simd.address(packed) + group * group_bytes
        x_at = simd.address(x)
        even = odd = simd.splat(0.0)
        for _ in range(n_blocks):
            base, scale, at = parameters_at(at, parameters, zero)
            for _ in range(block // columns):
                for v in range(n_words):
                    low, high = words(at, v)
                    for j in range(per_word // 2):
                        first, second = pair(low, high, j, base, scale)
                        even = simd.fma(first, broadcast_f32(x_at), even)
                        odd = simd.fma(second, broadcast_f32(x_at + 4), odd)
                        x_at += 8
                at += unit_bytes
        finish(even, odd, bias, accumulate, out, 0, group)


@inline
def decode_tile(
    words: Any, pair: Any, columns: Any, n_words: Any, unit_bytes: Any,
    at: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, tile: Any,
) -> None:  # fmt: skip
    """Write the weights of `n_blocks` blocks of a row group to address `tile`, 16 rows a column."""
    per_word = columns // n_words
    for _ in range(n_blocks):
        base, scale, at = parameters_at(at, parameters, zero)
        for _ in range(block // columns):
            for v in range(n_words):
                low, high = words(at, v)
                for j in range(per_word // 2):
                    first, second = pair(low, high, j, base, scale)
                    simd.store_f32(tile, first)
                    simd.store_f32(tile + 64, second)
                    tile += 128
            at += unit_bytes


@njit
def four_tokens(
    tile: Any, n_columns: Any, x: Any, token: Any, last: Any, column: Any, sums: Any
) -> None:
    """Add a tile of 16 rows times tokens token..token + 3 to the 8 vectors at address `sums`.

    Tokens past `last` repeat it; nobody reads their sums.
    """
    stride = x.strides[0]
    x0 = simd.address(x) + token * stride + 4 * column
    x1 = x0 + min(1, last - token) * stride
    x2 = x0 + min(2, last - token) * stride
    x3 = x0 + min(3, last - token) * stride
    even0, odd0 = simd.load_f32(sums), simd.load_f32(sums + 64)
    even1, odd1 = simd.load_f32(sums + 128), simd.load_f32(sums + 192)
    even2, odd2 = simd.load_f32(sums + 256), simd.load_f32(sums + 320)
    even3, odd3 = simd.load_f32(sums + 384), simd.load_f32(sums + 448)
    for i in range(0, 4 * n_columns, 8):
        w = simd.load_f32(tile + 16 * i)
        even0 = simd.fma(w, broadcast_f32(x0 + i), even0)
        even1 = simd.fma(w, broadcast_f32(x1 + i), even1)
        even2 = simd.fma(w, broadcast_f32(x2 + i), even2)
        even3 = simd.fma(w, broadcast_f32(x3 + i), even3)
        w = simd.load_f32(tile + 16 * i + 64)
        odd0 = simd.fma(w, broadcast_f32(x0 + i + 4), odd0)
        odd1 = simd.fma(w, broadcast_f32(x1 + i + 4), odd1)
        odd2 = simd.fma(w, broadcast_f32(x2 + i + 4), odd2)
        odd3 = simd.fma(w, broadcast_f32(x3 + i + 4), odd3)
    simd.store_f32(sums, even0)
    simd.store_f32(sums + 64, odd0)
    simd.store_f32(sums + 128, even1)
    simd.store_f32(sums + 192, odd1)
    simd.store_f32(sums + 256, even2)
    simd.store_f32(sums + 320, odd2)
    simd.store_f32(sums + 384, even3)
    simd.store_f32(sums + 448, odd3)


@inline
def many_rows(
    words: Any, pair: Any, columns: Any, n_words: Any, unit_bytes: Any,
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any,
    bias: Any, accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """Multiply several rows of activations by row groups [start, stop), tile by tile."""
    group_bytes = len(packed) // max(1, (out.shape[1] + 15) // 16)
    block_bytes = group_bytes // n_blocks
    tile = np.empty(TILE_GROUPS * TILE_COLUMNS * 16, np.float32)
    sums = np.empty(TILE_GROUPS * TILE_TOKENS * 32, np.float32)
    tile_blocks = TILE_COLUMNS // block
    for first in range(start, stop, TILE_GROUPS):
        n_groups = min(TILE_GROUPS, stop - first)
        for token in range(0, x.shape[0], TILE_TOKENS):
            n_tokens = min(TILE_TOKENS, x.shape[0] - token)
            sums[:] = 0
            for b in range(0, n_blocks, tile_blocks):
                n = min(tile_blocks, n_blocks - b)
                for g in range(n_groups):
                    tile_at = simd.address(tile) + 64 * TILE_COLUMNS * g
                    at = simd.address(packed) + (first + g) * group_bytes + b * block_bytes
                    decode_tile(
                        words, pair, columns, n_words, unit_bytes,
                        at, n, block, parameters, zero, tile_at,
                    )  # fmt: skip
                    for t in range(0, n_tokens, 4):
                        sums_at = simd.address(sums) + 128 * (TILE_TOKENS * g + t)
                        four_tokens(
                            tile_at,
                            n * block,
                            x,
                            token + t,
                            token + n_tokens - 1,
                            b * block,
                            sums_at,
                        )
            for g in range(n_groups):
                for t in range(n_tokens):
                    at = simd.address(sums) + 128 * (TILE_TOKENS * g + t)
                    even, odd = simd.load_f32(at), simd.load_f32(at + 64)
                    finish(even, odd, bias, accumulate, out, token + t, first + g)
