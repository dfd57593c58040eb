"""Products of weights that lie 16 rows side by side, in register tiles.

A *row group* is 16 weight rows; a *unit* is a column of them, or a pair of columns of bfloat16
(`nbflow_kernels.registers`).  Weights of a group lie unit by unit.

The order of additions of one output, the same for one row of activations and for many, for any
number of threads, and for every format that is multiplied here: chain j of four adds the products
of units j, j + 4, j + 8, ..., one after the other, fused; then (c0 + c1) + (c2 + c3); then the
bias; then the old output.  Units of zeros pad the end.

`one_group` keeps all four chains in registers and reads the weights once, as one stream.

`multiply_blocks` decodes a panel of `PANEL` units of `GROUPS` groups at a time and takes one chain
after the other, so that a tile of `GROUPS` groups and `TOKENS` tokens fills the registers; between
panels the chains lie in memory.  A chain's quarter of a panel (16 KB) stays in the first-level
cache while the activations stream past it; the activations of a panel (256 KB), the panel (64 KB)
and the chains (512 KB, read and written once a panel) are shared by the second and third level.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import lanes, registers, simd
from nbflow_kernels._jit import inline, njit

# 32 registers hold 2 x 8 sums and what a step needs; 16 registers of 8 lanes hold 1 x 4
GROUPS, TOKENS = (2, 8) if registers.has_wide_registers() else (1, 4)
REST = 4  # tokens of the tile that ends a block: at most three of its places stay empty
PANEL = 512  # units: a chain of a panel is 128 steps, loading and storing its sums 3 % of the time
BLOCK_TOKENS = 128  # share one decoding of a panel of weights
BLOCK_CHAINS = 2048  # groups x tokens whose chains are kept: 512 KB
PREFETCH = 4096  # bytes ahead

CHAIN_BYTES = 16 * PANEL  # of a decoded group: units 0, 4, 8, ... of the panel, then 1, 5, 9, ...
GROUP_BYTES = 4 * CHAIN_BYTES
TOKEN_BYTES = PANEL  # of a token's activations for one chain


@inline
def slots(n_tokens: Any) -> Any:
    """Return how many tokens the tiles of `n_tokens` have room for."""
    return (n_tokens + REST - 1) // REST * REST


@njit
def write_group(total: Any, bias: Any, accumulate: Any, out: Any, token: Any, group: Any) -> None:
    """Write the sums of a row group and a token, with the bias and the old output added."""
    first = 16 * group
    at = simd.address(out) + token * out.strides[0] + 4 * first
    count = min(out.shape[1] - first, 16)
    if count == 16:
        if len(bias):
            total = simd.add(total, simd.load_f32(simd.address(bias) + 4 * first))
        if accumulate:
            total = simd.add(total, simd.load_f32(at))
        simd.store_f32(at, total)
        return
    lane = np.empty(16, np.float32)
    simd.store_f32(simd.address(lane), total)
    for i in range(count):
        y = lane[i]
        if len(bias):
            y += bias[first + i]
        if accumulate:
            y += out[token, first + i]
        out[token, first + i] = y


# ---- all chains in registers ----------------------------------------------------------------


@inline
def one_group(like: Any, w: Any, x: Any, token: Any, n_units: Any, n_tokens: Any) -> Any:
    """Return the sums of one group and a literal number of tokens, at address x, x + token, ..."""
    size = 16 * like.itemsize
    a = registers.zero(1, n_tokens)
    b = registers.zero(1, n_tokens)
    c = registers.zero(1, n_tokens)
    d = registers.zero(1, n_tokens)
    for _ in range(n_units // 4):
        lanes.prefetch(w + PREFETCH)  # every line is slower: the neighbours come by themselves
        a = registers.step(a, like, w, 0, x, token)
        b = registers.step(b, like, w + size, 0, x + 4, token)
        c = registers.step(c, like, w + 2 * size, 0, x + 8, token)
        d = registers.step(d, like, w + 3 * size, 0, x + 12, token)
        w += 4 * size
        x += 16
    rest = n_units % 4
    if rest > 0:
        a = registers.step(a, like, w, 0, x, token)
    if rest > 1:
        b = registers.step(b, like, w + size, 0, x + 4, token)
    if rest > 2:
        c = registers.step(c, like, w + 2 * size, 0, x + 8, token)
    return registers.add(registers.add(a, b), registers.add(c, d))


# ---- one chain after the other, panel by panel ----------------------------------------------


@inline
def chain_tile(
    like: Any, n_tokens: Any, w: Any, x: Any, n_steps: Any, sums: Any, ahead: Any, stride: Any
) -> None:
    """Add `n_steps` units of one chain to the tile of sums at address `sums`.

    Meanwhile ask for memory from address `ahead` on, `stride` bytes a step.
    """
    tile = registers.load(GROUPS, n_tokens, sums)
    size = 16 * like.itemsize
    for _ in range(n_steps):
        lanes.prefetch(ahead)
        tile = registers.step(tile, like, w, GROUP_BYTES, x, TOKEN_BYTES)
        w += size
        x += 4
        ahead += stride
    registers.store(sums, tile)


@njit
def full_tile(
    like: Any, w: Any, x: Any, n_steps: Any, sums: Any, ahead: Any, stride: Any
) -> None:
    """Add to a chain of `TOKENS` tokens."""
    chain_tile(like, TOKENS, w, x, n_steps, sums, ahead, stride)


@njit
def rest_tile(
    like: Any, w: Any, x: Any, n_steps: Any, sums: Any, ahead: Any, stride: Any
) -> None:
    """Add to a chain of `REST` tokens."""
    chain_tile(like, REST, w, x, n_steps, sums, ahead, stride)


@njit
def panel(
    like: Any, w: Any, x: Any, n_units: Any, n_tokens: Any, sums: Any, ahead: Any, group: Any,
    n_bytes: Any,
) -> None:  # fmt: skip
    """Add a decoded panel of `GROUPS` groups to the chains of all tokens of a block.

    Meanwhile ask for what is decoded next: `n_bytes` at ``ahead``, ``ahead + group``, ...
    """
    full = (n_tokens + TOKENS - REST - 1) // TOKENS * TOKENS
    x_bytes = TOKEN_BYTES * slots(n_tokens)
    n_steps = n_units // 4
    n_tiles = full // TOKENS + (1 if full < n_tokens else 0)
    per_chain = n_bytes * GROUPS // 4
    per_tile = (per_chain + n_tiles - 1) // n_tiles
    stride = (per_tile + n_steps - 1) // n_steps
    for chain in range(4):
        w_at = w + CHAIN_BYTES * chain
        x_at = x + x_bytes * chain
        next_at = ahead + chain * GROUPS // 4 * group + chain % (4 // GROUPS) * per_chain
        for t in range(0, full, TOKENS):
            at = sums + 64 * GROUPS * (4 * t + TOKENS * chain)
            full_tile(like, w_at, x_at + TOKEN_BYTES * t, n_steps, at, next_at, stride)
            next_at += per_tile
        if full < n_tokens:
            at = sums + 64 * GROUPS * (4 * full + REST * chain)
            rest_tile(like, w_at, x_at + TOKEN_BYTES * full, n_steps, at, next_at, stride)


@njit
def finish(
    sums: Any, first: Any, bias: Any, accumulate: Any, out: Any, token: Any, n_tokens: Any
) -> None:
    """Write the outputs of `GROUPS` groups from group `first` on, for a block of tokens."""
    n_groups = min(GROUPS, (out.shape[1] + 15) // 16 - first)
    for t in range(n_tokens):
        start = t // TOKENS * TOKENS
        width = TOKENS if n_tokens - start > REST else REST
        at = sums + 64 * GROUPS * (4 * start + t - start)
        chain = 64 * GROUPS * width
        for g in range(n_groups):
            low = simd.add(simd.load_f32(at), simd.load_f32(at + chain))
            high = simd.add(simd.load_f32(at + 2 * chain), simd.load_f32(at + 3 * chain))
            write_group(simd.add(low, high), bias, accumulate, out, token + t, first + g)
            at += 64


@inline
def deal_row(at: Any, count: Any, n_units: Any, to: Any, chain: Any) -> None:
    """Copy `count` units of a token to its four chains, then zeros up to `n_units`."""
    full = count // 64 * 64
    for i in range(0, full, 64):
        registers.deal(registers.load(1, 4, at + 4 * i), to + i, chain)
    for i in range(full, n_units):
        value = lanes.read_f32(at + 4 * i) if i < count else np.float32(0.0)
        lanes.write_f32(to + i % 4 * chain + i // 4 * 4, value)


@njit
def pack_f32(x: Any, token: Any, n_tokens: Any, k: Any, n_units: Any, to: Any) -> None:
    """Copy a panel of activations from unit k on to address `to`: chain, token, unit of chain."""
    chain = TOKEN_BYTES * slots(n_tokens)
    count = min(n_units, x.shape[1] - k)
    for t in range(n_tokens):
        at = simd.address(x) + (token + t) * x.strides[0] + 4 * k
        deal_row(at, count, n_units, to + TOKEN_BYTES * t, chain)


@njit
def pack_pairs(x: Any, token: Any, n_tokens: Any, k: Any, n_units: Any, to: Any) -> None:
    """Do as `pack_f32`, rounded to bfloat16: unit i is columns 2i and 2i + 1."""
    row, pairs = np.zeros(2 * PANEL, np.float32), np.empty(PANEL, np.float32)
    chain = TOKEN_BYTES * slots(n_tokens)
    count = min(2 * n_units, x.shape[1] - 2 * k)
    for t in range(n_tokens):
        at = simd.address(x) + (token + t) * x.strides[0] + 8 * k
        if count % 32:  # the last vector would reach over the end of the row
            for i in range(count):
                row[i] = lanes.read_f32(at + 4 * i)
            at = simd.address(row)
        for i in range(0, count, 32):
            halves = registers.to_bf16(simd.load_f32(at + 4 * i), simd.load_f32(at + 4 * i + 64))
            simd.store_i32(simd.address(pairs) + 2 * i, halves)
        deal_row(simd.address(pairs), (count + 1) // 2, n_units, to + TOKEN_BYTES * t, chain)


@inline
def multiply_blocks(
    decode: Any, pack: Any, like: Any, source: Any, at: Any, group_bytes: Any, n_units: Any,
    x: Any, bias: Any, accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """Multiply the activations `x` by weight groups GROUPS * start to GROUPS * stop.

    ``decode(source, group, k, n, to)`` writes units k to k + n of a weight group to address `to`
    as `like` says, ordered by chain; `pack` is `pack_f32` or `pack_pairs`.  `n_units` and n are
    multiples of 4.  Undecoded groups lie at address `at`, each `group_bytes` long.
    """
    n_tokens, n_groups = x.shape[0], (out.shape[1] + 15) // 16
    block = min(n_tokens, BLOCK_TOKENS)
    per_block = min(max(1, BLOCK_CHAINS // (slots(block) * GROUPS)), stop - start)
    packed = np.empty(4 * slots(block) * TOKEN_BYTES, np.uint8)
    decoded = np.empty(GROUPS * GROUP_BYTES, np.uint8)
    sums = np.empty(per_block * GROUPS * slots(block) * 64, np.float32)
    for token in range(0, n_tokens, BLOCK_TOKENS):
        tokens = min(BLOCK_TOKENS, n_tokens - token)
        sums_bytes = 256 * GROUPS * slots(tokens)
        for first in range(start, stop, per_block):
            count = min(per_block, stop - first)
            sums[:] = 0.0
            for k in range(0, n_units, PANEL):
                width = min(PANEL, n_units - k)
                pack(x, token, tokens, k, width, simd.address(packed))
                for i in range(count):
                    group = GROUPS * (first + i)
                    for g in range(min(GROUPS, n_groups - group)):
                        to = simd.address(decoded) + GROUP_BYTES * g
                        decode(source, group + g, k, width, to)
                    # next are the following groups, or the next panel of the first ones
                    ahead = at + (group + GROUPS) * group_bytes + k * group_bytes // n_units
                    if i + 1 == count:
                        ahead = at + GROUPS * first * group_bytes
                        ahead += (k + PANEL) * group_bytes // n_units
                    panel(
                        like, simd.address(decoded), simd.address(packed), width, tokens,
                        simd.address(sums) + sums_bytes * i,
                        ahead, group_bytes, width * group_bytes // n_units,
                    )  # fmt: skip
            for i in range(count):
                sums_at = simd.address(sums) + sums_bytes * i
                finish(sums_at, GROUPS * (first + i), bias, accumulate, out, token, tokens)
