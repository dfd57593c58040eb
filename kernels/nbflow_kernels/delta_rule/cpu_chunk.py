"""Chunks of the gated delta rule on the CPU: what the columns share, and two strips of columns.

The formulas are in `cpu`.  A decay for each channel multiplies the keys and the queries; one for
the whole head multiplies sums instead (c_t S^T k_t, and c_n / c_s u_s), and the products of keys
and queries, so that these need no decayed copies.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd
from nbflow_kernels.cpu.simd_math import keep_nan
from nbflow_kernels.cpu.simd_memory import prefetch, read_f32, write_f32
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to

CHUNK = 8
"""Tokens of the chunked form: with 16, its triangular part costs more than the loads it saves."""
_EPS = 1e-6  # of the length of queries and keys
WIDE = register_tiles.has_wide_registers()
_ROWS = 16 if WIDE else 4  # rows of the state in a register tile
_VECTORS = _ROWS // 2  # vectors in a tile, times two strips


@jit.device_function
def copy_row(at, Dk, factor, normalize, to):
    """Copy a query or key, times `factor`, divided by its length if wanted; pad it with zeros."""
    if normalize:
        squares = simd.splat(0.0)
        for i in range(0, Dk, 16):
            x = load_up_to(at + 4 * i, Dk - i)
            squares = simd.fma(x, x, squares)
        factor = factor / np.sqrt(simd.sum(squares) + np.float32(_EPS))
    for i in range(0, Dk, 16):
        simd.store_f32(to + 4 * i, simd.mul(load_up_to(at + 4 * i, Dk - i), simd.splat(factor)))


@jit.device_function
def _prefetch_row(at, n_numbers):
    """Prefetch a row of float32, which other heads' rows separate from the one before."""
    for i in range(0, 4 * n_numbers, 64):
        prefetch(at + i)


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


@jit.device_function
def _write_ratios(g, g_bytes, per_channel, decays, products, factors):
    """Write the decays of a head's products and sums, or 1 where keys and queries have them.

    Row t of `products`: -c_t / c_s, then c_t / c_s, for s up to t; `factors`: c_t, then c_n / c_t;
    first of `decays`: c_n.
    """
    for t in range(CHUNK):
        write_f32(decays + 4 * t, np.float32(0.0) if per_channel else read_f32(g + t * g_bytes))
    log = load_up_to(decays, CHUNK)
    simd.store_f32(decays, keep_nan(simd.exp(log), log))
    c = np.float32(1.0)
    for t in range(CHUNK):
        decay, row = read_f32(decays + 4 * t), products + 64 * t
        c = c * decay
        write_f32(factors + 4 * t, c)
        for s in range(t):
            ratio = decay * read_f32(row - 32 + 4 * s)
            write_f32(row + 4 * s, -ratio)
            write_f32(row + 32 + 4 * s, ratio)
        write_f32(row + 32 + 4 * t, np.float32(1.0))
    for s in range(CHUNK):
        write_f32(factors + 4 * (CHUNK + s), read_f32(products + 64 * (CHUNK - 1) + 32 + 4 * s))
    write_f32(decays, c)


@jit.device_function
def _decay_channels(g, Dk, t, rows, vectors, decays):
    """Decay the keys before token t, and write c_t k_t and c_t q_t to `vectors`.

    The first row of `decays` becomes c_t; the second has room for one.
    """
    n_bytes = -(-Dk // 16) * 64
    half = CHUNK * n_bytes
    decay = decays + (0 if t == 0 else n_bytes)
    write_decay(g, 1, Dk, decay)
    for i in range(0, n_bytes, 64):
        a = c = simd.load_f32(decay + i)
        if t > 0:
            c = simd.mul(simd.load_f32(decays + i), a)
            simd.store_f32(decays + i, c)
        at = t * n_bytes + i
        simd.store_f32(vectors + at, simd.mul(c, simd.load_f32(rows + at)))
        simd.store_f32(vectors + half + at, simd.mul(c, simd.load_f32(rows + half + at)))
    for key in range(rows, rows + t * n_bytes, n_bytes):
        for i in range(0, n_bytes, 64):
            a = simd.load_f32(decay + i)
            simd.store_f32(key + i, simd.mul(a, simd.load_f32(key + i)))


@jit.device_function
def prepare_chunk(
    q, q_bytes, k, k_bytes, g, g_bytes, per_channel, Dk, scale, normalize, rows, vectors, decays,
    products, factors
):  # fmt: skip
    """Write what the columns of a chunk share.

    `rows`: keys, then queries; of a decay for each channel, `vectors`: c_t k_t, then c_t q_t, the
    keys of `rows` become c_n / c_t k_t, and the first of `decays` is c_n.  Row t of `products`:
    -L[t], then A[t].  See `_write_ratios` for the rest.
    """
    n_bytes, like = -(-Dk // 16) * 64, np.float32(0.0)
    _write_ratios(g, g_bytes, per_channel, decays, products, factors)
    for t in range(CHUNK):
        copy_row(k + t * k_bytes, Dk, np.float32(1.0), normalize, rows + t * n_bytes)
        copy_row(q + t * q_bytes, Dk, scale, normalize, rows + (CHUNK + t) * n_bytes)
        _prefetch_row(k + (CHUNK + t) * k_bytes, Dk)  # of the next chunk
        _prefetch_row(q + (CHUNK + t) * q_bytes, Dk)
    for t in range(CHUNK):
        if per_channel:
            _decay_channels(g + t * g_bytes, Dk, t, rows, vectors, decays)
            _prefetch_row(g + (CHUNK + t) * g_bytes, Dk)
        tile = register_tiles.zero(CHUNK, 2)
        for i in range(0, n_bytes, 64):
            x = rows + t * n_bytes + i
            tile = register_tiles.step_lanes(tile, like, rows + i, n_bytes, x, CHUNK * n_bytes)
        at = products + 64 * t
        simd.store_f32(at, simd.mul(simd.load_f32(at), register_tiles.lane_sums(tile)))


@jit.device_function(inline="llvm")
def _store_token(u, out, lanes, r0, r1, o0, o1):
    """Write a token's correction and output in two strips."""
    simd.store_f32(u, r0)
    simd.store_f32(u + 64, r1)
    store_up_to(out, lanes, o0)
    if lanes > 16:
        store_up_to(out + 64, lanes - 16, o1)


@jit.device_function
def _solve(
    sums, products, factors, beta, beta_bytes, v, v_bytes, out, out_bytes, lanes, u
):  # fmt: skip
    """Write o_t of two strips to `out` and c_n / c_t u_t to `u`.

    `sums` has S^T times the vectors, k_t first.  Each u_t waits for the one before; the second
    strip and the next token, r2, r3, o2 and o3, give the processor other work meanwhile.
    """
    for t in range(0, CHUNK, 2):
        row, at = products + 64 * t, sums + 128 * t
        c, d = read_f32(factors + 4 * t), read_f32(factors + 4 * t + 4)
        v_at = v + t * v_bytes
        _prefetch_row(v_at + CHUNK * v_bytes, min(lanes, 32))
        _prefetch_row(v_at + (CHUNK + 1) * v_bytes, min(lanes, 32))
        r0 = simd.fma(simd.splat(-c), simd.load_f32(at), load_up_to(v_at, lanes))
        r1 = simd.fma(simd.splat(-c), simd.load_f32(at + 64), load_up_to(v_at + 64, lanes - 16))
        v_at += v_bytes
        r2 = simd.fma(simd.splat(-d), simd.load_f32(at + 128), load_up_to(v_at, lanes))
        r3 = simd.fma(simd.splat(-d), simd.load_f32(at + 192), load_up_to(v_at + 64, lanes - 16))
        at += 128 * CHUNK
        o0 = simd.mul(simd.splat(c), simd.load_f32(at))
        o1 = simd.mul(simd.splat(c), simd.load_f32(at + 64))
        o2 = simd.mul(simd.splat(d), simd.load_f32(at + 128))
        o3 = simd.mul(simd.splat(d), simd.load_f32(at + 192))
        for s in range(t):
            u0, u1 = simd.load_f32(u + 128 * s), simd.load_f32(u + 128 * s + 64)
            x = simd.splat(read_f32(row + 4 * s))
            r0, r1 = simd.fma(x, u0, r0), simd.fma(x, u1, r1)
            x = simd.splat(read_f32(row + 32 + 4 * s))
            o0, o1 = simd.fma(x, u0, o0), simd.fma(x, u1, o1)
            x = simd.splat(read_f32(row + 64 + 4 * s))
            r2, r3 = simd.fma(x, u0, r2), simd.fma(x, u1, r3)
            x = simd.splat(read_f32(row + 96 + 4 * s))
            o2, o3 = simd.fma(x, u0, o2), simd.fma(x, u1, o3)
        x = simd.splat(read_f32(beta + t * beta_bytes))
        r0, r1 = simd.mul(x, r0), simd.mul(x, r1)
        row += 4 * t
        x = simd.splat(read_f32(row + 32))
        o0, o1 = simd.fma(x, r0, o0), simd.fma(x, r1, o1)
        x = simd.splat(read_f32(row + 64))
        r2, r3 = simd.fma(x, r0, r2), simd.fma(x, r1, r3)
        x = simd.splat(read_f32(row + 96))
        o2, o3 = simd.fma(x, r0, o2), simd.fma(x, r1, o3)
        x = simd.splat(read_f32(beta + (t + 1) * beta_bytes))
        r2, r3 = simd.mul(x, r2), simd.mul(x, r3)
        x = simd.splat(read_f32(row + 100))
        o2, o3 = simd.fma(x, r2, o2), simd.fma(x, r3, o3)
        out_at = out + t * out_bytes
        _store_token(u + 128 * t, out_at, lanes, r0, r1, o0, o1)
        _store_token(u + 128 * (t + 1), out_at + out_bytes, lanes, r2, r3, o2, o3)
    for t in range(CHUNK):
        ratio = simd.splat(read_f32(factors + 4 * (CHUNK + t)))
        for at in range(u + 128 * t, u + 128 * (t + 1), 64):
            simd.store_f32(at, simd.mul(ratio, simd.load_f32(at)))


@jit.device_function
def chunk(
    strips, strip_bytes, Dk, vectors, keys, decay, decay_step, products, factors, beta, beta_bytes,
    v, v_bytes, out, out_bytes, lanes, sums, u
):  # fmt: skip
    """Compute CHUNK tokens for two strips of the state, whose rows are contiguous.

    The decay of row i is at ``decay + decay_step * i``.
    """
    n_bytes = -(-Dk // 16) * 64
    like = np.float32(0.0)
    for t in range(0, 2 * CHUNK, _VECTORS):
        tile = register_tiles.zero(2, _VECTORS)
        x = vectors + t * n_bytes
        for i in range(Dk):
            tile = register_tiles.step(tile, like, strips + 64 * i, strip_bytes, x + 4 * i, n_bytes)
        register_tiles.store(sums + 128 * t, tile)
    _solve(sums, products, factors, beta, beta_bytes, v, v_bytes, out, out_bytes, lanes, u)
    for j in range(2):
        strip = strips + j * strip_bytes
        for i in range(0, n_bytes // 4, _ROWS):
            tile = register_tiles.load(1, _ROWS, strip + 64 * i)
            tile = register_tiles.scale(tile, decay + decay_step * i, decay_step)
            for s in range(CHUNK):
                x = keys + s * n_bytes + 4 * i
                tile = register_tiles.step(tile, like, u + 128 * s + 64 * j, 0, x, 4)
            register_tiles.store(strip + 64 * i, tile)
