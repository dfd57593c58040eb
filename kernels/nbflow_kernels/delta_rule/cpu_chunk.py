"""Chunks of the gated delta rule on the CPU: what the columns share, and two strips of columns.

The formulas are in `cpu`.  A decay for each channel multiplies the keys and the queries; one for
the whole head multiplies sums instead (c_t S^T k_t, and c_n / c_s u_s), and the products of keys
and queries, so that these need no decayed copies, and the heads of one key share them.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, register_tiles_lower, simd, simd_compare
from nbflow_kernels.cpu.simd_math import keep_nan
from nbflow_kernels.cpu.simd_memory import (
    load_first,
    prefetch,
    prefetch_write,
    read_f32,
    store_quarters,
    sum16,
    write_f32,
)
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to
from nbflow_kernels.delta_rule.cpu_state import copy_from_strips, copy_to_strips
from nbflow_kernels.state_format import F32

CHUNK = 8
"""Tokens of the chunked form: with 16, its triangular part costs more than the scaling it saves."""
BLOCK = 4
"""Chunks that two strips take one after the other while they are in the first-level cache."""
EPS = 1e-6
"""Added to the sum of squares of a query or key."""
WIDE = register_tiles.has_wide_registers()
_ROWS = 16 if WIDE else 4  # rows of the state in a register tile
_TOKENS = _ROWS // 2  # tokens in a tile, times two strips


@jit.device_function
def write_decay(g, per_channel, Dk, to):
    """Write exp(g) for each row of the state."""
    log = simd.splat(0.0 if per_channel else read_f32(g))
    decay = keep_nan(simd.exp(log), log)
    for i in range(0, Dk, 16):
        if per_channel:
            log = load_up_to(g + 4 * i, Dk - i)
            decay = keep_nan(simd.exp(log), log)
        simd.store_f32(to + 4 * i, decay)


@jit.device_function(inline="llvm")
def record_bytes(per_channel, Dk):
    """Return the bytes of what the columns of a chunk share; see `_record`."""
    return (17 + 16 * per_channel) * -(-Dk // 16) * 64 + 128 * CHUNK + 256


@jit.device_function(inline="llvm")
def _record(at, per_channel, Dk):
    """Return the addresses of vectors, decay, products, factors and dot products of a chunk.

    The record begins with rows: keys, then queries.  They are also the vectors, unless there is a
    decay for each channel.
    """
    n_bytes = -(-Dk // 16) * 64
    vectors = at + 2 * CHUNK * n_bytes * per_channel
    decay = vectors + 2 * CHUNK * n_bytes
    products = decay + n_bytes
    factors = products + 64 * CHUNK
    return vectors, decay, products, factors, factors + 256


@jit.device_function
def _dot_products(rows, keys, n_bytes, dots):
    """Write the products of 4 keys and 4 queries with 4 keys to a corner of the dot products."""
    like = np.float32(0.0)
    for half in range(2):
        tile = register_tiles.zero(4, 4)
        for i in range(0, n_bytes, 64):
            x = rows + half * CHUNK * n_bytes + i
            tile = register_tiles.step_lanes(tile, like, keys + i, n_bytes, x, n_bytes)
        store_quarters(dots + 4 * CHUNK * half, 64, register_tiles.lane_sums(tile))


@jit.device_function(inline="llvm")
def _copy_and_square(at, Dk, to):
    """Copy a row, and zeros after it; return the lanes' sums of squares."""
    whole, squares = Dk - Dk % 16, simd.splat(0.0)
    for i in range(0, whole, 16):
        x = simd.load_f32(at + 4 * i)
        squares = simd.fma(x, x, squares)
        simd.store_f32(to + 4 * i, x)
    if whole < Dk:
        x = load_first(at + 4 * whole, Dk - whole, 0.0)
        squares = simd.fma(x, x, squares)
        simd.store_f32(to + 4 * whole, x)
    return squares


@jit.device_function
def _copy_rows(q, q_bytes, k, k_bytes, Dk, scale, normalize, rows, scratch):
    """Copy keys, then queries times `scale`, divided by their lengths if wanted.

    The numbers are those of `cpu_steps.copy_row`.  Rows of tokens often share their places in the
    first cache, so each is read once.
    """
    n_bytes = -(-Dk // 16) * 64
    for t in range(CHUNK):
        squares = _copy_and_square(k + t * k_bytes, Dk, rows + t * n_bytes)
        simd.store_f32(scratch + 64 * t, squares)
        squares = _copy_and_square(q + t * q_bytes, Dk, rows + (CHUNK + t) * n_bytes)
        simd.store_f32(scratch + 64 * (CHUNK + t), squares)
    squares = register_tiles.lane_sums(register_tiles.load(1, 16, scratch))
    simd.store_f32(scratch, simd.splat(1.0))
    simd.store_f32(scratch + 4 * CHUNK, simd.splat(scale))
    factors = simd.load_f32(scratch)
    if normalize:
        factors = simd.div(factors, simd_compare.sqrt(simd.add(squares, simd.splat(EPS))))
    simd.store_f32(scratch, factors)
    for t in range(2 * CHUNK):
        factor = simd.splat(read_f32(scratch + 4 * t))
        for at in range(rows + t * n_bytes, rows + (t + 1) * n_bytes, 64):
            simd.store_f32(at, simd.mul(simd.load_f32(at), factor))


@jit.device_function
def _prepare_tokens(
    q, q_bytes, k, k_bytes, per_channel, Dk, scale, normalize, record, scratch
):  # fmt: skip
    """Write what the heads of one key share: rows, and their dot products if decays leave them.

    Row t of the dot products: k_t . k_s, then q_t . k_s, for s up to t.
    """
    n_bytes = -(-Dk // 16) * 64
    _copy_rows(q, q_bytes, k, k_bytes, Dk, scale, normalize, record, scratch)
    if not per_channel:
        dots = _record(record, per_channel, Dk)[4]
        for t in range(0, CHUNK, 4):
            for s in range(0, t + 4, 4):
                at = dots + 64 * t + 4 * s
                _dot_products(record + t * n_bytes, record + s * n_bytes, n_bytes, at)


@jit.device_function
def _decay_channels(g, g_bytes, Dk, rows, vectors, decay, dots, scratch):
    """Write vectors, keys, decay and dot products of a chunk with a decay for each channel.

    Tokens 4 to 7 and 0 to 3 meet with the decays from token 4 on and up to token 3, each a product
    of numbers of at most 1.  `scratch` has room for 8 rows.
    """
    n_bytes = -(-Dk // 16) * 64
    for t in range(CHUNK):
        write_decay(g + t * g_bytes, 1, Dk, scratch + t * n_bytes)
    for t in range(0, CHUNK, 4):
        at = t * n_bytes
        _decay_4(rows + at, scratch + at, n_bytes, vectors + at, dots + 68 * t)
    _dot_products(vectors + 4 * n_bytes, rows, n_bytes, dots + 256)
    first, last = scratch + 3 * n_bytes, scratch + 7 * n_bytes
    for i in range(0, n_bytes, 64):
        c, d = simd.load_f32(first + i), simd.load_f32(last + i)
        simd.store_f32(decay + i, simd.mul(c, d))
        for t in range(4):
            at = rows + t * n_bytes + i
            simd.store_f32(at, simd.mul(d, simd.load_f32(at)))
            at = vectors + (4 + t) * n_bytes + i
            simd.store_f32(at, simd.mul(c, simd.load_f32(at)))
            at += CHUNK * n_bytes
            simd.store_f32(at, simd.mul(c, simd.load_f32(at)))


@jit.device_function(inline="llvm")
def _load_token(key, decay, half):
    """Return 16 channels of a token's decay, key and query, `half` a chunk's rows apart."""
    return simd.load_f32(decay), simd.load_f32(key), simd.load_f32(key + half)


@jit.device_function(inline="llvm")
def _store_vectors(c, k, q, to, half):
    simd.store_f32(to, simd.mul(c, k))
    simd.store_f32(to + half, simd.mul(c, q))


@jit.device_function
def _decay_4(keys, decays, row, vectors, dots):
    """Decay 4 keys to the last of their tokens, write their products, and decay the vectors.

    Rows are `row` bytes long.  The last of the decays becomes the product of the four.
    """
    half = CHUNK * row
    k10 = k20 = k21 = k30 = k31 = k32 = _ = simd.splat(0.0)
    q00 = q10 = q11 = q20 = q21 = q22 = q30 = q31 = q32 = q33 = _
    for i in range(0, row, 64):
        key, decay, to = keys + i, decays + i, vectors + i
        c, k0, q0 = _load_token(key, decay, half)
        q00 = simd.fma(q0, k0, q00)
        _store_vectors(c, k0, q0, to, half)
        a, k1, q1 = _load_token(key + row, decay + row, half)
        c, k0 = simd.mul(c, a), simd.mul(a, k0)
        k10, q10, q11 = simd.fma(k1, k0, k10), simd.fma(q1, k0, q10), simd.fma(q1, k1, q11)
        _store_vectors(c, k1, q1, to + row, half)
        a, k2, q2 = _load_token(key + 2 * row, decay + 2 * row, half)
        c, k0, k1 = simd.mul(c, a), simd.mul(a, k0), simd.mul(a, k1)
        k20, k21, q20 = simd.fma(k2, k0, k20), simd.fma(k2, k1, k21), simd.fma(q2, k0, q20)
        q21, q22 = simd.fma(q2, k1, q21), simd.fma(q2, k2, q22)
        _store_vectors(c, k2, q2, to + 2 * row, half)
        a, k3, q3 = _load_token(key + 3 * row, decay + 3 * row, half)
        c, k0, k1, k2 = simd.mul(c, a), simd.mul(a, k0), simd.mul(a, k1), simd.mul(a, k2)
        k30, k31, k32 = simd.fma(k3, k0, k30), simd.fma(k3, k1, k31), simd.fma(k3, k2, k32)
        q30, q31 = simd.fma(q3, k0, q30), simd.fma(q3, k1, q31)
        q32, q33 = simd.fma(q3, k2, q32), simd.fma(q3, k3, q33)
        _store_vectors(c, k3, q3, to + 3 * row, half)
        simd.store_f32(decay + 3 * row, c)
        simd.store_f32(key, k0)
        simd.store_f32(key + row, k1)
        simd.store_f32(key + 2 * row, k2)
    sums = sum16(_, _, _, _, k10, _, _, _, k20, k21, _, _, k30, k31, k32, _)
    store_quarters(dots, 64, sums)
    sums = sum16(q00, _, _, _, q10, q11, _, _, q20, q21, q22, _, q30, q31, q32, q33)
    store_quarters(dots + 4 * CHUNK, 64, sums)


@jit.device_function
def _prepare_head(g, g_bytes, per_channel, beta, beta_bytes, Dk, record, units, scratch):
    """Write what the columns of a head share.

    With u_t = beta_t x_t, row t of the products: -beta_s L[t, s], then beta_s A[t, s]; the factors:
    -c_t, c_t, then beta_t c_n / c_t.  With a decay for each channel these c are 1, the vectors are
    c_t k_t and c_t q_t, the keys become c_n / c_t k_t, and the decay is c_n.
    """
    vectors, decay, products, factors, dots = _record(record, per_channel, Dk)
    if per_channel:
        _decay_channels(g, g_bytes, Dk, record, vectors, decay, dots, scratch)
    betas, decays = factors + 128, factors + 192
    for t in range(CHUNK):
        factor = read_f32(beta + t * beta_bytes)
        write_f32(betas + 4 * t, -factor)
        write_f32(betas + 4 * (CHUNK + t), factor)
        write_f32(decays + 4 * t, np.float32(0.0) if per_channel else read_f32(g + t * g_bytes))
    log = load_up_to(decays, CHUNK)
    simd.store_f32(decays, keep_nan(simd.exp(log), log))
    ratios, factor, c = simd.splat(0.0), simd.load_f32(betas), np.float32(1.0)
    for t in range(CHUNK):
        a = read_f32(decays + 4 * t)
        c = c * a
        write_f32(factors + 4 * t, -c)
        write_f32(factors + 4 * (CHUNK + t), c)
        ratios = simd.fma(simd.splat(a), ratios, simd.load_f32(units - 4 * t))
        row = simd.mul(simd.mul(ratios, factor), simd.load_f32(dots + 64 * t))
        simd.store_f32(products + 64 * t, row)
    simd.store_f32(factors + 64, simd.mul(ratios, factor))
    if not per_channel:
        write_f32(decay, c)


@jit.device_function(inline="llvm")
def _multiply(strips, strip_bytes, Dk, vectors, to):
    """Write the products of the columns of two strips with 8 vectors."""
    n_bytes, like = -(-Dk // 16) * 64, np.float32(0.0)
    for t in range(0, CHUNK, _TOKENS):
        tile, at = register_tiles.zero(2, _TOKENS), vectors + t * n_bytes
        for i in range(Dk):
            x = at + 4 * i
            tile = register_tiles.step(tile, like, strips + 64 * i, strip_bytes, x, n_bytes)
        register_tiles.store(to + 128 * t, tile)


@jit.device_function
def _chunk(strips, strip_bytes, per_channel, Dk, record, v, v_bytes, out, out_bytes, u):
    """Compute CHUNK tokens for two strips of the state, whose rows are contiguous.

    `u` has room for two vectors of both strips per token.
    """
    n_bytes, like = -(-Dk // 16) * 64, np.float32(0.0)
    vectors, decay, products, factors, _ = _record(record, per_channel, Dk)
    decay_step, sums = 4 * per_channel, u + 128 * CHUNK
    _multiply(strips, strip_bytes, Dk, vectors, u)
    tile = register_tiles.scale(register_tiles.load(2, 8, u), factors, 4)
    tile = register_tiles.add(tile, register_tiles.load_strided(2, 8, v, v_bytes))
    register_tiles.store(u, register_tiles_lower.substitute(tile, products, 64))
    _multiply(strips, strip_bytes, Dk, vectors + CHUNK * n_bytes, sums)
    tile = register_tiles.scale(register_tiles.load(2, 8, sums), factors + 4 * CHUNK, 4)
    tile = register_tiles_lower.add_lower(tile, products + 4 * CHUNK, 64, u)
    register_tiles.store_strided(out, out_bytes, tile)
    tile = register_tiles.scale(register_tiles.load(2, 8, u), factors + 4 * (3 * CHUNK), 4)
    register_tiles.store(u, tile)
    for j in range(2):
        strip = strips + j * strip_bytes
        for i in range(0, n_bytes // 4, _ROWS):
            tile = register_tiles.load(1, _ROWS, strip + 64 * i)
            tile = register_tiles.scale(tile, decay + decay_step * i, decay_step)
            for s in range(CHUNK):
                x = record + s * n_bytes + 4 * i
                tile = register_tiles.step(tile, like, u + 128 * s + 64 * j, 0, x, 4)
            register_tiles.store(strip + 64 * i, tile)


@jit.device_function
def _prefetch_columns(at, token_bytes, n_columns, is_written):
    """Prefetch up to 32 columns of a chunk; other heads' separate those of two tokens."""
    for t in range(CHUNK):
        row = at + t * token_bytes
        for line in range(row - row % 64, row + 4 * min(n_columns, 32), 64):
            if is_written:
                prefetch_write(line)
            else:
                prefetch(line)


@jit.device_function
def _prefetch_part(at, n_bytes, i, n):
    """Prefetch part i of n of consecutive bytes."""
    size = -(-n_bytes // (64 * n)) * 64
    for line in range(i * size, min((i + 1) * size, n_bytes), 64):
        prefetch(at + line)


@jit.device_function
def _columns(
    strips, strip_bytes, per_channel, Dk, record, v, v_bytes, out, out_bytes, lanes, u, scratch
):  # fmt: skip
    """Compute a chunk for two strips of which `lanes` columns exist."""
    is_whole, values, result, row_bytes = lanes >= 32, v, out, out_bytes
    if not is_whole:
        values, result, row_bytes = scratch, scratch + 128 * CHUNK, 128
        for t in range(CHUNK):
            for i in range(0, 32, 16):
                x = load_up_to(v + t * v_bytes + 4 * i, max(lanes - i, 0))
                simd.store_f32(values + 128 * t + 4 * i, x)
        v_bytes = 128
    _chunk(strips, strip_bytes, per_channel, Dk, record, values, v_bytes, result, row_bytes, u)
    if not is_whole:
        for t in range(CHUNK):
            for i in range(0, lanes, 16):
                x = simd.load_f32(result + 128 * t + 4 * i)
                store_up_to(out + t * out_bytes + 4 * i, lanes - i, x)


@jit.device_function
def chunks(
    n, heads, S, strip_bytes, next_S, stored, kind, head_bytes, first, width, Dk, Dv, q, q_bytes,
    k, k_bytes, g, g_bytes, per_channel, beta, beta_bytes, v, v_bytes, out, out_bytes, scale,
    normalize, load_state, store_state, ahead, heads_ahead, keys_ahead, records, units, u, scratch
):  # fmt: skip
    """Compute n chunks, at most BLOCK, for `width` columns of the heads of one key.

    float32 is in strips at `S`, or comes there if `load_state`, and is copied to `stored` if
    `store_state`.  Another state is at `stored`, rounded to after each chunk, and `S` has room for
    two strips.  The next call's tokens, `ahead` of these, are prefetched, and its states if it has
    other heads.  `scratch` has room for 8 rows, and 2 KB.
    """
    size, g_step = record_bytes(per_channel, Dk), 4 * Dk if per_channel else 4
    q_ahead = q + ahead * q_bytes + 4 * keys_ahead * Dk
    k_ahead = k + ahead * k_bytes + 4 * keys_ahead * Dk
    g_ahead = g + ahead * g_bytes + heads_ahead * g_step
    v_ahead = v + ahead * v_bytes + 4 * heads_ahead * Dv
    for i in range(n):
        t = i * CHUNK
        _prepare_tokens(
            q + t * q_bytes, q_bytes, k + t * k_bytes, k_bytes, per_channel, Dk, scale, normalize,
            records + i * size, scratch,
        )  # fmt: skip
    for h in range(heads):
        for i in range(n):
            t = i * CHUNK
            _prepare_head(
                g + h * g_step + t * g_bytes, g_bytes, per_channel, beta + 4 * h + t * beta_bytes,
                beta_bytes, Dk, records + i * size, units, scratch,
            )  # fmt: skip
        strips, state = S + h * next_S, stored + h * head_bytes
        for j in range(0, width, 32):
            column, n_columns = first + j, min(32, width - j)
            pair = strips + (j // 16 * strip_bytes if kind == F32 else 0)
            for i in range(n):
                t, at = i * CHUNK, 4 * (h * Dv + j)
                out_at = out + at + t * out_bytes
                _prefetch_columns(out_at, out_bytes, n_columns, True)
                _prefetch_columns(v_ahead + at + t * v_bytes, v_bytes, n_columns, False)
                if per_channel:
                    _prefetch_columns(g_ahead + t * g_bytes + 4 * j, g_bytes, Dk - j, False)
                if h == 0:
                    _prefetch_columns(k_ahead + t * k_bytes + 4 * j, k_bytes, Dk - j, False)
                    _prefetch_columns(q_ahead + t * q_bytes + 4 * j, q_bytes, Dk - j, False)
                if heads_ahead != 0:
                    state_ahead, n_parts = state + heads_ahead * head_bytes, -(-width // 32) * n
                    _prefetch_part(state_ahead, head_bytes, j // 32 * n + i, n_parts)
                if store_state and kind == F32:
                    for row in range(i * Dk // n, (i + 1) * Dk // n):
                        prefetch(state + 4 * (row * Dv + column))
                        prefetch(state + 4 * (row * Dv + column) + 64)
                if kind != F32 or (load_state and i == 0):
                    copy_to_strips(state, kind, Dk, Dv, column, n_columns, 2, pair, scratch)
                _columns(
                    pair, strip_bytes, per_channel, Dk, records + i * size, v + at + t * v_bytes,
                    v_bytes, out_at, out_bytes, n_columns, u, scratch,
                )  # fmt: skip
                if kind != F32 or (store_state and i == n - 1):
                    copy_from_strips(pair, kind, Dk, Dv, column, n_columns, state, scratch)
