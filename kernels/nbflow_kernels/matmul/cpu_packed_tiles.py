"""Products of weights that lie 16 rows side by side, in register tiles.

A *row group* is 16 weight rows; a *unit* is a column of them, or a pair of columns of bfloat16
(`nbflow_kernels.cpu.register_tiles`).  Weights of a group lie unit by unit.

The order of additions of one output, the same for one row of activations and for many, for any
number of threads, and for every format that is multiplied here: chain j of four adds the products
of units j, j + 4, j + 8, ..., one after the other, fused; then (c0 + c1) + (c2 + c3); then the
bias; then the old output.

`add_units` adds units of one group to the chains of any number of tokens, six at a time: with 32
registers all four chains of six tokens are in registers, and a weight vector is loaded once for
six multiply-adds; with 16 registers (of 8 lanes) it takes one chain after the other.  Chains lie
in memory in between, the four of a token behind each other.

`multiply_decoded` decodes a panel of `PANEL` units of a group (128 KB, in a second-level cache)
and adds it to the chains of a block of tokens; meanwhile it asks for the panel after it.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd, simd_memory
from nbflow_kernels.matmul.cpu_packed_outputs import epilogue

WIDE = register_tiles.has_wide_registers()
PANEL = 2048  # units decoded at a time, if the rows are that long
BLOCK_TOKENS = 384  # share one decoding of the weights, and keep their activations in a cache
TOKEN_BYTES = 4 * 64  # of a token's four chains
PREFETCH = 4096 + 64  # bytes ahead in a stream: of a pair of lines the second, which comes last


@jit.device_function(inline="always")
def tile_width(n_tokens):
    """Return how many of `n_tokens` tokens the next tile takes."""
    if n_tokens >= 6:
        return 6
    if n_tokens >= 4:
        return 4
    return min(n_tokens, 2)


@jit.device_function(inline="llvm")
def clear(sums, n_tokens):
    """Start the chains of some tokens."""
    for at in range(sums, sums + TOKEN_BYTES * n_tokens, 64):
        simd.store_f32(at, simd.splat(0.0))


@jit.device_function(inline="llvm")
def ask(ahead, stride):
    """Ask for one, two or four cache lines at `ahead`: no fewer than `stride` bytes up to 256."""
    simd_memory.prefetch(ahead)
    if stride > 64:
        simd_memory.prefetch(ahead + 64)
    if stride > 128:
        simd_memory.prefetch(ahead + 128)
        simd_memory.prefetch(ahead + 192)


@jit.device_function(inline="always")
def add_to_tile(like, n_tokens, w, x, token, n_units, sums, ahead, stride):
    """Add units of a group to the four chains of a literal number of tokens, at address `sums`.

    Meanwhile ask for memory from address `ahead` on, `stride` bytes for every four units.
    """
    size = 16 * like.itemsize
    if WIDE:
        tile = register_tiles.load(4, n_tokens, sums)
        for _ in range(n_units // 4):
            if n_tokens > 1:
                ask(ahead, stride)
            else:  # it waits for memory only: every second line is faster then
                simd_memory.prefetch(ahead)
            ahead += stride
            tile = register_tiles.step_chains(tile, like, w, x, token)
            w += 4 * size
            x += 16
        register_tiles.store(sums, tile)
        for i in range(n_units % 4):
            chain = register_tiles.load_strided(1, n_tokens, sums + 64 * i, TOKEN_BYTES)
            chain = register_tiles.step(chain, like, w + size * i, 0, x + 4 * i, token)
            register_tiles.store_strided(sums + 64 * i, TOKEN_BYTES, chain)
    else:
        for i in range(4):
            chain = register_tiles.load_strided(1, n_tokens, sums + 64 * i, TOKEN_BYTES)
            w_at = w + size * i
            x_at = x + 4 * i
            for _ in range((n_units + 3 - i) // 4):
                chain = register_tiles.step(chain, like, w_at, 0, x_at, token)
                w_at += 4 * size
                x_at += 16
            register_tiles.store_strided(sums + 64 * i, TOKEN_BYTES, chain)


@jit.device_function
def add_units(like, w, x, token, n_tokens, n_units, sums, ahead, n_bytes):
    """Add units of a group, at address `w`, times tokens at x, x + token, ... to their chains.

    Meanwhile ask for `n_bytes` bytes at address `ahead`.
    """
    n_tiles = (n_tokens + 5) // 6
    steps = max(1, n_tiles * n_units)
    stride = (4 * n_bytes + steps - 1) // steps
    t = 0
    while t < n_tokens:
        width = tile_width(n_tokens - t)
        if width == 6:
            add_to_tile(like, 6, w, x, token, n_units, sums, ahead, stride)
        elif width == 4:
            add_to_tile(like, 4, w, x, token, n_units, sums, ahead, stride)
        elif width == 2:
            add_to_tile(like, 2, w, x, token, n_units, sums, ahead, stride)
        else:
            add_to_tile(like, 1, w, x, token, n_units, sums, ahead, stride)
        t += width
        x += width * token
        sums += TOKEN_BYTES * width
        ahead += stride * n_units // 4


@jit.device_function
def finish(sums, bias, accumulate, out, token, n_tokens, group):
    """Write the outputs of a group and of tokens from `token` on, whose chains are at `sums`."""
    for t in range(n_tokens):
        at = sums + TOKEN_BYTES * t
        low = simd.add(simd.load_f32(at), simd.load_f32(at + 64))
        high = simd.add(simd.load_f32(at + 128), simd.load_f32(at + 192))
        epilogue(simd.add(low, high), bias, accumulate, out, token + t, group)


@jit.device_function
def round_rows(x, token, n_tokens, pairs):
    """Write rows of `x`, rounded to bfloat16, to the rows of `pairs`, zeros after the last."""
    n_columns = x.shape[1]
    full = n_columns // 32 * 32
    tail = np.zeros(32, np.float32)
    for t in range(n_tokens):
        at = simd.address(x) + (token + t) * x.strides[0]
        to = simd.address(pairs) + t * pairs.strides[0]
        for i in range(0, full, 32):
            halves = register_tiles.to_bf16(
                simd.load_f32(at + 4 * i), simd.load_f32(at + 4 * i + 64)
            )
            simd.store_i32(to + 2 * i, halves)
        if full < n_columns:
            for i in range(full, n_columns):
                tail[i - full] = x[token + t, i]
            tail_at = simd.address(tail)
            halves = register_tiles.to_bf16(simd.load_f32(tail_at), simd.load_f32(tail_at + 64))
            simd.store_i32(to + 2 * full, halves)


@jit.device_function(inline="always")
def multiply_decoded(
    decode, is_pairs, source, first, group_bytes, n_units, panel, like, x, bias, accumulate, out,
    start, stop
):  # fmt: skip
    """Multiply the activations `x` by weight groups [start, stop).

    ``decode(source, at, k, n, to)`` writes units k to k + n of the weight group at address `at` to
    address `to`, as float32 (`like` is an empty array of float32) or, if `is_pairs`, as pairs of
    bfloat16 (of int32); then `x` is rounded too.  A group has `n_units` units, not fewer than `x`,
    which lie undecoded in `group_bytes` bytes, one group after the other from address `first` on;
    at most `panel` of them, and always a multiple of that from the first on, are decoded at a time.
    """
    n_tokens = x.shape[0]
    n_blocks = max(1, (n_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS)
    block = max(1, (n_tokens + 6 * n_blocks - 1) // (6 * n_blocks)) * 6
    room = np.empty(16 * min(n_units, panel) + 16, np.float32)
    sums = simd_memory.allocate(TOKEN_BYTES * block)
    # 16 more, so that rows do not fall into the same sets of a cache
    pairs = np.empty((block if is_pairs else 0, (x.shape[1] + 31) // 32 * 16 + 16), np.int32)
    panel_bytes = min(n_units, panel) * group_bytes // max(1, n_units)
    for token in range(0, n_tokens, block):
        tokens = min(block, n_tokens - token)
        x_at, stride = simd.address(x) + token * x.strides[0], x.strides[0]
        x_units = x.shape[1]
        if is_pairs:
            round_rows(x, token, tokens, pairs)
            x_at, stride, x_units = simd.address(pairs), pairs.strides[0], (x_units + 1) // 2
        for group in range(start, stop):
            clear(sums, tokens)
            at = first + group * group_bytes
            for k in range(0, n_units, panel):
                width = min(panel, n_units - k)
                # `room` lives as long as its array is used; a vector should not cross cache lines
                decoded = (simd.address(room) + 63) // 64 * 64
                decode(source, at, k, width, decoded)
                ahead = at + (k + width) * group_bytes // n_units  # the next panel or group
                add_units(
                    like, decoded, x_at + 4 * k, stride, tokens,
                    min(width, x_units - k), sums, ahead, panel_bytes,
                )  # fmt: skip
            finish(sums, bias, accumulate, out, token, tokens, group)
    simd_memory.release(sums)
