"""Register-tile loops for weights with 16 rows interleaved (`nbflow_kernels.matmul.cpu_packed`).

A *row group* is 16 weight rows.  A *step* is what one multiply-add takes of
it: a column, or a pair of columns in bfloat16 (`nbflow_kernels.cpu.register_tiles`).

The order of additions of one output (`loops.interleaved`) is the same for one row of activations
and for many, for any number of threads, and for every format: chain j of four adds the products of
steps j, j + 4, j + 8, ..., one after the other, fused; then (c0 + c1) + (c2 + c3); then the bias;
then the old output.

`add_steps` adds steps of one group to the chains of any number of tokens, six at a time: with 32
registers all four chains of six tokens are in registers, and a weight vector is loaded once for
six multiply-adds; with 16 registers (of 8 lanes) it takes one chain after the other.  Chains are
kept in memory in between, the four of a token contiguous.

`gemm_decoded` decodes a panel of `PANEL` steps of a group (128 KB, in a second-level cache), adds
it to the chains of a block of tokens, and prefetches the next panel.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd, simd_memory
from nbflow_kernels.cpu.simd_memory import load_first, store_first

WIDE = register_tiles.has_wide_registers()
PANEL = 2048  # steps decoded at a time
# Few tokens in bfloat16 wait for the memory, which idles while a long panel is decoded.  With at
# least FEW_BYTES of weights per step and token, short panels keep prefetches going (bfloat16
# weights, 1 row: 140 ps a weight before, 75 since; float32 ones gain nothing).
FEW_BYTES, FEW_STEPS, FEW_LEAD = 8, 64, 4096
BLOCK_TOKENS = 384  # tokens that share one decoding of the weights; their activations fit a cache
TOKEN_BYTES = 4 * 64  # the four chains of a token
PREFETCH = 2048 + 64  # bytes ahead: the second cache line of a pair, which arrives last


@jit.device_function(inline="always")
def tile_width(n_tokens):
    """Return the number of tokens of the next tile, with `n_tokens` left."""
    if n_tokens >= 6:
        return 6
    if n_tokens >= 4:
        return 4
    return min(n_tokens, 2)


@jit.device_function(inline="llvm")
def zero_sums(sums, n_tokens):
    """Set the chains of some tokens to zero."""
    for at in range(sums, sums + TOKEN_BYTES * n_tokens, 64):
        simd.store_f32(at, simd.splat(0.0))


@jit.device_function(inline="llvm")
def prefetch_lines(ahead, stride):
    """Prefetch 1, 2 or 4 cache lines at `ahead`: at least `stride` bytes, up to 256."""
    simd_memory.prefetch(ahead)
    if stride > 64:
        simd_memory.prefetch(ahead + 64)
    if stride > 128:
        simd_memory.prefetch(ahead + 128)
        simd_memory.prefetch(ahead + 192)


@jit.device_function(inline="always")
def add_to_tile(like, n_tokens, w, x, x_stride, n_steps, sums, ahead, stride):
    """Add steps of a group to the four chains of a literal number of tokens, at address `sums`.

    Prefetches from address `ahead` on, `stride` bytes for every four steps.
    """
    size = 16 * like.itemsize
    if WIDE:
        tile = register_tiles.load(4, n_tokens, sums)
        for _ in range(n_steps // 4):
            if n_tokens > 2 or (n_tokens == 2 and stride <= 128):
                prefetch_lines(ahead, stride)
            else:  # bound by memory: prefetching one line of 2 or 4 is faster
                simd_memory.prefetch(ahead)
            ahead += stride
            tile = register_tiles.step_chains(tile, like, w, x, x_stride)
            w += 4 * size
            x += 16
        register_tiles.store(sums, tile)
        for i in range(n_steps % 4):
            chain = register_tiles.load_strided(1, n_tokens, sums + 64 * i, TOKEN_BYTES)
            chain = register_tiles.step(chain, like, w + size * i, 0, x + 4 * i, x_stride)
            register_tiles.store_strided(sums + 64 * i, TOKEN_BYTES, chain)
    else:
        for i in range(4):
            chain = register_tiles.load_strided(1, n_tokens, sums + 64 * i, TOKEN_BYTES)
            w_at = w + size * i
            x_at = x + 4 * i
            for _ in range((n_steps + 3 - i) // 4):
                chain = register_tiles.step(chain, like, w_at, 0, x_at, x_stride)
                w_at += 4 * size
                x_at += 16
            register_tiles.store_strided(sums + 64 * i, TOKEN_BYTES, chain)


@jit.device_function
def add_steps(like, w, x, x_stride, n_tokens, n_steps, sums, ahead, n_bytes):
    """Add steps of a group, at address `w`, times tokens at x, x + x_stride, ... to their chains.

    Prefetches `n_bytes` bytes at address `ahead`.
    """
    n_tiles = (n_tokens + 5) // 6
    total = max(1, n_tiles * n_steps)
    stride = (4 * n_bytes + total - 1) // total
    t = 0
    while t < n_tokens:
        width = tile_width(n_tokens - t)
        if width == 6:
            add_to_tile(like, 6, w, x, x_stride, n_steps, sums, ahead, stride)
        elif width == 4:
            add_to_tile(like, 4, w, x, x_stride, n_steps, sums, ahead, stride)
        elif width == 2:
            add_to_tile(like, 2, w, x, x_stride, n_steps, sums, ahead, stride)
        else:
            add_to_tile(like, 1, w, x, x_stride, n_steps, sums, ahead, stride)
        t += width
        x += width * x_stride
        sums += TOKEN_BYTES * width
        ahead += stride * n_steps // 4


@jit.device_function(inline="llvm")
def epilogue(total, bias, accumulate, out, token, group):
    """Write the outputs of a row group and a token: sums, plus the bias, plus the old output."""
    first = 16 * group
    at = simd.address(out) + token * out.strides[0] + 4 * first
    count = out.shape[1] - first
    if count >= 16:
        if len(bias):
            total = simd.add(total, simd.load_f32(simd.address(bias) + 4 * first))
        if accumulate:
            total = simd.add(total, simd.load_f32(at))
        simd.store_f32(at, total)
    else:
        if len(bias):
            total = simd.add(total, load_first(simd.address(bias) + 4 * first, count, 0.0))
        if accumulate:
            total = simd.add(total, load_first(at, count, 0.0))
        store_first(at, count, total)


@jit.device_function
def write_outputs(sums, bias, accumulate, out, token, n_tokens, group):
    """Add the chains at `sums` and write the outputs of a group for tokens from `token` on."""
    for t in range(n_tokens):
        at = sums + TOKEN_BYTES * t
        low = simd.add(simd.load_f32(at), simd.load_f32(at + 64))
        high = simd.add(simd.load_f32(at + 128), simd.load_f32(at + 192))
        epilogue(simd.add(low, high), bias, accumulate, out, token + t, group)


@jit.device_function
def round_rows(x, token, n_tokens, pairs):
    """Round rows of `x` to bfloat16 and write them to `pairs`, padded with zeros."""
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
def gemm_decoded(
    decode, is_pairs, source, first, group_bytes, n_steps, unit, like, x, bias, accumulate, out,
    start, stop
):  # fmt: skip
    """Multiply activations by weight groups [start, stop), decoded panel by panel.

    ``decode(source, at, k, n, to)`` writes steps k to k + n of the weight group at address `at` to
    address `to`, as float32 (`like` is an empty array of float32) or, if `is_pairs`, as pairs of
    bfloat16 (of int32); then `x` is rounded too.  Encoded groups have `n_steps` steps, at least as
    many as `x`, in `group_bytes` bytes, and are contiguous from address `first` on.  Panels are
    whole units of `unit` steps; the last one may be shorter.
    """
    n_tokens = x.shape[0]
    panel, lead = max(1, PANEL // unit) * unit, 0
    few = is_pairs and FEW_BYTES * n_tokens * n_steps <= group_bytes <= 64 * n_steps
    if few and unit % 4 == 0:  # the order of additions stays
        panel, lead = max(1, FEW_STEPS // unit) * unit, FEW_LEAD
    n_blocks = max(1, (n_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS)
    block = max(1, (n_tokens + 6 * n_blocks - 1) // (6 * n_blocks)) * 6
    buffer = np.empty(16 * min(n_steps, panel) + 16, np.float32)
    sums = simd_memory.allocate(TOKEN_BYTES * block)
    # 16 more columns, so that rows map to different cache sets
    pairs = np.empty((block if is_pairs else 0, (x.shape[1] + 31) // 32 * 16 + 16), np.int32)
    panel_bytes = min(n_steps, panel) * group_bytes // max(1, n_steps)
    for token in range(0, n_tokens, block):
        tokens = min(block, n_tokens - token)
        x_at, stride = simd.address(x) + token * x.strides[0], x.strides[0]
        x_steps = x.shape[1]
        if is_pairs:
            round_rows(x, token, tokens, pairs)
            x_at, stride, x_steps = simd.address(pairs), pairs.strides[0], (x_steps + 1) // 2
        for group in range(start, stop):
            zero_sums(sums, tokens)
            at = first + group * group_bytes
            for k in range(0, n_steps, panel):
                width = min(panel, n_steps - k)
                # taken in the loop: an array lives until its last use by name
                decoded = (simd.address(buffer) + 63) // 64 * 64
                decode(source, at, k, width, decoded)
                # the next panel or group
                ahead = at + (k + width) * group_bytes // n_steps + lead
                add_steps(
                    like, decoded, x_at + 4 * k, stride, tokens,
                    min(width, x_steps - k), sums, ahead, panel_bytes,
                )  # fmt: skip
            write_outputs(sums, bias, accumulate, out, token, tokens, group)
    simd_memory.release(sums)
