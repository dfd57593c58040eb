"""One chunk of a linear recurrence as three small products, for prompts.

The recurrence of a head, with a state h of P values by N keys and log decays s_j <= 0::

    h_j = exp(s_j) h_(j-1) + w_j x_j b_j^T        y_j = scale h_j c_j + d x_j

gives, for a chunk of tokens with A_i = s_0 + ... + s_i and the state h before it::

    y_i = scale (exp(A_i) h c_i + sum over j <= i of exp(A_i - A_j) w_j (c_i . b_j) x_j) + d x_i
    h  <- exp(A_last) h + sum over j of exp(A_last - A_j) w_j x_j b_j^T

A step reads and writes the whole state for each token; a chunk does so once for `CHUNK` tokens,
and its products run in register tiles (`nbflow_kernels.cpu.register_tiles`): `LANES` values of x in
the lanes, and `TOKENS` tokens, or keys, side by side.  The state lies transposed in scratch memory
meanwhile, blocks of `LANES` values interleaved key by key (`rows_to_lanes`).

Differences A_i - A_j of nearby tokens are small while A may be large, so A is summed in float64
and kept as two float32.

Scratch memory of a head (offsets in bytes from its address): per token the weight w, the two parts
of A, scale exp(A_i), and w_j exp(A_last - A_j); exp(A_last); a ramp of 32 ones and 32 zeros, a part
of which is the causal mask of a row; the weights of the intra-chunk product; a block of x, plain
and scaled; a tile of results; two blocks of 16 x 16 for transposing; then the state, and
copies of the chunk's c and b, whose rows are not apart by a power of two as in the input (32 rows
of which would share a few places of the first cache).
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd
from nbflow_kernels.cpu.simd_math import select
from nbflow_kernels.cpu.simd_memory import read_f32, write_f32
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to

CHUNK = 32
"""Tokens of a chunk; the ramp and the two vectors of a mask row rely on it."""
TOKENS = 4
GROUPS = 2 if register_tiles.has_wide_registers() else 1
"""Vectors of 16 values in a tile: with `TOKENS` they fill the multiply-add units."""
LANES = 16 * GROUPS

WEIGHT, HIGH, LOW, BEFORE, AFTER = (4 * CHUNK * i for i in range(5))
DECAY = 4 * CHUNK * 5
RAMP = DECAY + 64
PRODUCT = RAMP + 4 * 2 * CHUNK
VALUES = PRODUCT + 4 * CHUNK * CHUNK
SCALED = VALUES + 4 * LANES * CHUNK
RESULT = SCALED + 4 * LANES * CHUNK
TRANSPOSED = RESULT + 4 * LANES * TOKENS
STATE = TRANSPOSED + 2 * 1024


@jit.device_function(inline="llvm")
def row_bytes(n_keys):
    """Return the distance of rows of c and b in scratch memory."""
    return (n_keys + 15) // 16 * 64 + 64


@jit.device_function(inline="llvm")
def rows_at(n_values, n_keys):
    """Return the offset of the copies of c, then b, in scratch memory."""
    return STATE + 4 * n_keys * ((n_values + LANES - 1) // LANES * LANES)


@jit.device_function(inline="llvm")
def scratch_bytes(n_values, n_keys):
    """Return the bytes of scratch memory for heads of n_values x n_keys."""
    return rows_at(n_values, n_keys) + 2 * CHUNK * row_bytes(n_keys)


@jit.device_function
def rows_to_lanes(like, at, row_bytes, n_rows, n_columns, lanes, to, scratch):
    """Interleave blocks of `lanes` rows column by column; missing rows of the last are zero.

    `like` is an array of float32, `scratch` an address of 1 KB.
    """
    for row in range(0, (n_rows + lanes - 1) // lanes * lanes, 16):
        block = to + (row // lanes) * n_columns * 4 * lanes + (row % lanes) * 4
        for column in range(0, n_columns, 16):
            corner, n = at + row * row_bytes + 4 * column, min(16, n_columns - column)
            if n_rows - row >= 16 and n == 16:
                register_tiles.transpose(like, corner, row_bytes, scratch)
            else:
                for i in range(16):
                    for j in range(n):
                        v = np.float32(0.0)
                        if row + i < n_rows:
                            v = read_f32(corner + i * row_bytes + 4 * j)
                        write_f32(scratch + 64 * j + 4 * i, v)
            for j in range(n):
                simd.store_f32(block + (column + j) * 4 * lanes, simd.load_f32(scratch + 64 * j))


@jit.device_function
def lanes_to_rows(like, at, row_bytes, n_rows, n_columns, lanes, to, scratch):
    """Write blocks of `rows_to_lanes`, at `to`, back to rows at `at`; `scratch` has 2 KB."""
    for row in range(0, n_rows, 16):
        block = to + (row // lanes) * n_columns * 4 * lanes + (row % lanes) * 4
        for column in range(0, n_columns, 16):
            n = min(16, n_columns - column)
            for j in range(n):
                simd.store_f32(scratch + 64 * j, simd.load_f32(block + (column + j) * 4 * lanes))
            for j in range(n, 16):
                simd.store_f32(scratch + 64 * j, simd.splat(0.0))
            register_tiles.transpose(like, scratch, 64, scratch + 1024)
            corner = at + row * row_bytes + 4 * column
            for i in range(min(16, n_rows - row)):
                store_up_to(corner + i * row_bytes, n, simd.load_f32(scratch + 1024 + 64 * i))


@jit.device_function
def scores(like, c, c_bytes, b, b_bytes, n_keys, scratch, out, out_bytes):
    """Write c_i . b_j of a chunk to row i of `out`, for all j; `scratch` has room for both.

    `scratch` is 1 KB and CHUNK * n_keys float32.
    """
    rows_to_lanes(like, b, b_bytes, CHUNK, n_keys, LANES, scratch + 1024, scratch)
    for block in range(CHUNK // LANES):
        w = scratch + 1024 + block * n_keys * 4 * LANES
        for i in range(0, CHUNK, TOKENS):
            tile = register_tiles.zero(GROUPS, TOKENS)
            for n in range(n_keys):
                tile = register_tiles.step(
                    tile, like, w + 4 * LANES * n, 64, c + i * c_bytes + 4 * n, c_bytes
                )
            register_tiles.store_strided(out + i * out_bytes + 4 * LANES * block, out_bytes, tile)


@jit.device_function
def prepare(log_decay, scratch, scale):
    """Fill the scratch memory of a chunk from the weights; s_j = `log_decay` times weight j."""
    total = 0.0
    for j in range(CHUNK):
        total += np.float64(log_decay) * np.float64(read_f32(scratch + WEIGHT + 4 * j))
        high = np.float32(total)
        write_f32(scratch + HIGH + 4 * j, high)
        write_f32(scratch + LOW + 4 * j, np.float32(total - np.float64(high)))
    last_high = simd.splat(read_f32(scratch + HIGH + 4 * (CHUNK - 1)))
    last_low = simd.splat(read_f32(scratch + LOW + 4 * (CHUNK - 1)))
    simd.store_f32(scratch + DECAY, decay_factor(simd.add(last_high, last_low)))
    for at in range(scratch, scratch + 4 * CHUNK, 64):
        high, low = simd.load_f32(at + HIGH), simd.load_f32(at + LOW)
        before = decay_factor(simd.add(high, low))
        simd.store_f32(at + BEFORE, simd.mul(before, simd.splat(scale)))
        after = simd.add(simd.sub(last_high, high), simd.sub(last_low, low))
        weight = simd.load_f32(at + WEIGHT)
        simd.store_f32(at + AFTER, simd.mul(weight, decay_factor(after)))
    for i in range(4):
        simd.store_i32(scratch + RAMP + 64 * i, simd.splat_i32(1 if i < 2 else 0))


@jit.device_function(inline="llvm")
def decay_factor(v):
    """Return e**v of 16 log decays."""
    return simd.exp(v)


@jit.device_function
def _weigh(scores_at, scores_bytes, scratch, scale):
    """Write scale exp(A_i - A_j) w_j (c_i . b_j) for j <= i, and 0 for later ones."""
    for i in range(CHUNK):
        high = simd.splat(read_f32(scratch + HIGH + 4 * i))
        low = simd.splat(read_f32(scratch + LOW + 4 * i))
        for v in range(2):
            at = scratch + 64 * v
            difference = simd.add(
                simd.sub(high, simd.load_f32(at + HIGH)), simd.sub(low, simd.load_f32(at + LOW))
            )
            factor = simd.mul(decay_factor(difference), simd.splat(scale))
            factor = simd.mul(factor, simd.load_f32(at + WEIGHT))
            product = simd.mul(factor, simd.load_f32(scores_at + i * scores_bytes + 64 * v))
            mask = simd.load_i32(scratch + RAMP + 4 * (CHUNK - 1 - i) + 64 * v)
            to = scratch + PRODUCT + 4 * CHUNK * i + 64 * v
            simd.store_f32(to, select(mask, product, simd.splat(0.0)))


@jit.device_function
def _copy_rows(at, bytes_apart, n_keys, to):
    """Copy the rows of a chunk's b or c to scratch memory."""
    for j in range(CHUNK):
        for i in range(0, n_keys, 16):
            v = load_up_to(at + j * bytes_apart + 4 * i, n_keys - i)
            simd.store_f32(to + j * row_bytes(n_keys) + 4 * i, v)


@jit.device_function
def _pack_values(x, x_bytes, n, scratch):
    """Copy `n` of `LANES` values of the chunk's tokens, plain and times w_j exp(A_last - A_j)."""
    for j in range(CHUNK):
        after = simd.splat(read_f32(scratch + AFTER + 4 * j))
        for g in range(GROUPS):
            v = simd.splat(0.0)
            if n > 16 * g:
                v = load_up_to(x + j * x_bytes + 64 * g, n - 16 * g)
            at = scratch + 4 * LANES * j + 64 * g
            simd.store_f32(at + VALUES, v)
            simd.store_f32(at + SCALED, simd.mul(v, after))


@jit.device_function
def _results(like, c, c_bytes, n_keys, state, skip, scratch, n, out, out_bytes):
    """Write `n` of `LANES` values of the results of a chunk."""
    d = simd.splat(skip)
    for i in range(0, CHUNK, TOKENS):
        tile = register_tiles.zero(GROUPS, TOKENS)
        for k in range(n_keys):
            tile = register_tiles.step(
                tile, like, state + 4 * LANES * k, 64, c + i * c_bytes + 4 * k, c_bytes
            )
        tile = register_tiles.scale(tile, scratch + BEFORE + 4 * i, 4)
        weights = scratch + PRODUCT + 4 * CHUNK * i
        for j in range(i + TOKENS):
            values = scratch + VALUES + 4 * LANES * j
            tile = register_tiles.step(tile, like, values, 64, weights + 4 * j, 4 * CHUNK)
        register_tiles.store(scratch + RESULT, tile)
        for t in range(TOKENS):
            for g in range(GROUPS):
                if n > 16 * g:
                    at = 4 * LANES * t + 64 * g
                    x = simd.load_f32(scratch + VALUES + 4 * LANES * i + at)
                    y = simd.fma(d, x, simd.load_f32(scratch + RESULT + at))
                    store_up_to(out + (i + t) * out_bytes + 64 * g, n - 16 * g, y)


@jit.device_function
def _update(like, b, b_bytes, n_keys, state, scratch):
    """Decay a block of the state and add the outer products of the chunk."""
    whole = n_keys - n_keys % TOKENS
    for k in range(0, whole, TOKENS):
        tile = register_tiles.load(GROUPS, TOKENS, state + 4 * LANES * k)
        tile = register_tiles.scale(tile, scratch + DECAY, 0)
        for j in range(CHUNK):
            tile = register_tiles.step(
                tile, like, scratch + SCALED + 4 * LANES * j, 64, b + j * b_bytes + 4 * k, 4
            )
        register_tiles.store(state + 4 * LANES * k, tile)
    for k in range(whole, n_keys):
        tile = register_tiles.load(GROUPS, 1, state + 4 * LANES * k)
        tile = register_tiles.scale(tile, scratch + DECAY, 0)
        for j in range(CHUNK):
            tile = register_tiles.step(
                tile, like, scratch + SCALED + 4 * LANES * j, 64, b + j * b_bytes + 4 * k, 4
            )
        register_tiles.store(state + 4 * LANES * k, tile)


@jit.device_function
def chunk(
    like, x, x_bytes, b, b_bytes, c, c_bytes, scores_at, scores_bytes, n_values, n_keys, log_decay,
    scale, skip, scratch, out, out_bytes
):  # fmt: skip
    """Compute a chunk whose weights w are in the scratch memory, and update the state there.

    `log_decay` times w_j is s_j; x, b, c and out are addresses of the chunk's first token.
    """
    prepare(log_decay, scratch, scale)
    _weigh(scores_at, scores_bytes, scratch, scale)
    distance = row_bytes(n_keys)
    queries = scratch + rows_at(n_values, n_keys)
    keys = queries + CHUNK * distance
    _copy_rows(c, c_bytes, n_keys, queries)
    _copy_rows(b, b_bytes, n_keys, keys)
    for p in range(0, n_values, LANES):
        state = scratch + STATE + 4 * p * n_keys
        _pack_values(x + 4 * p, x_bytes, n_values - p, scratch)
        _results(
            like, queries, distance, n_keys, state, skip, scratch, n_values - p, out + 4 * p,
            out_bytes,
        )  # fmt: skip
        _update(like, keys, distance, n_keys, state, scratch)
