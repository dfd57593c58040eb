"""Steps of the gated delta rule on the CPU: one token after the other.

The formulas are those of `cpu` with one token per chunk.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd
from nbflow_kernels.cpu.simd_memory import read_f32, write_f32
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to
from nbflow_kernels.delta_rule.cpu_chunk import EPS, WIDE, write_decay
from nbflow_kernels.state_format import F32, Q8_0
from nbflow_kernels.state_format.cpu import block_offset, load, row_bytes, store, store_blocks

GROUPS = 4 if WIDE else 2
"""Strips of a register tile."""


@jit.device_function
def copy_row(at, Dk, factor, normalize, to):
    """Copy a query or key, times `factor`, divided by its length if wanted; pad it with zeros."""
    if normalize:
        squares = simd.splat(0.0)
        for i in range(0, Dk, 16):
            x = load_up_to(at + 4 * i, Dk - i)
            squares = simd.fma(x, x, squares)
        factor = factor / np.sqrt(simd.sum(squares) + np.float32(EPS))
    for i in range(0, Dk, 16):
        simd.store_f32(to + 4 * i, simd.mul(load_up_to(at + 4 * i, Dk - i), simd.splat(factor)))


@jit.device_function(inline="llvm")
def _token_bytes(Dk):
    """Return the bytes of what the columns of a token share: four rows and a number."""
    return -(-Dk // 16) * 256 + 64


@jit.device_function
def _prepare(q, k, g, per_channel, Dk, scale, normalize, key):
    """Write what the columns of a token share: rows k, a k, a q and a, then q . k."""
    n_bytes = -(-Dk // 16) * 64
    of_k, query, decay = key + n_bytes, key + 2 * n_bytes, key + 3 * n_bytes
    copy_row(k, Dk, np.float32(1.0), normalize, key)
    copy_row(q, Dk, scale, normalize, query)
    write_decay(g, per_channel, Dk, decay)
    with_q = simd.splat(0.0)
    for i in range(0, n_bytes, 64):
        a, x, y = simd.load_f32(decay + i), simd.load_f32(key + i), simd.load_f32(query + i)
        with_q = simd.fma(y, x, with_q)
        simd.store_f32(of_k + i, simd.mul(a, x))
        simd.store_f32(query + i, simd.mul(a, y))
    write_f32(decay + n_bytes, simd.sum(with_q))


@jit.device_function
def _step(
    strips, strip_bytes, row_bytes, Dk, vectors, key, decay, upper, beta, v, out, lanes, sums, u
):  # fmt: skip
    """Compute one token for a register tile of strips, `strip_bytes` apart."""
    n_bytes = -(-Dk // 16) * 64
    like = np.float32(0.0)
    tile = register_tiles.zero(GROUPS, 2)
    for i in range(Dk):
        at = strips + i * row_bytes
        tile = register_tiles.step(tile, like, at, strip_bytes, vectors + 4 * i, n_bytes)
    register_tiles.store(sums, tile)
    for j in range(GROUPS):
        n = lanes - 16 * j
        if n > 0:
            residual = simd.sub(load_up_to(v + 64 * j, n), simd.load_f32(sums + 64 * j))
            residual = simd.mul(residual, simd.splat(read_f32(beta)))
            simd.store_f32(u + 64 * j, residual)
            o = simd.load_f32(sums + 64 * (GROUPS + j))
            o = simd.fma(simd.splat(read_f32(upper)), residual, o)
            store_up_to(out + 64 * j, n, o)
    for i in range(0, -(-Dk // 4) * 4, 4):
        for j in range(GROUPS):
            at = strips + j * strip_bytes + i * row_bytes
            rows = register_tiles.load_strided(1, 4, at, row_bytes)
            rows = register_tiles.scale(rows, decay + 4 * i, 4)
            rows = register_tiles.step(rows, like, u + 64 * j, 0, key + 4 * i, 4)
            register_tiles.store_strided(at, row_bytes, rows)


@jit.device_function
def _narrow_step(
    stored, kind, Dk, Dv, column, end, vectors, key, decay, upper, beta, v, out, strip, narrow
):  # fmt: skip
    """Compute one token for 32 columns of a state that is not float32, and round them.

    The operations are those of `_step`; `strip` has room for the columns in float32, `narrow` 1 KB.
    """
    n_bytes, row_size, lanes = -(-Dk // 16) * 64, row_bytes(kind, Dv), end - column
    k0 = k1 = q0 = q1 = second = simd.splat(0.0)
    for i in range(Dk):
        row = stored + i * row_size
        first = load(row, kind, column, end, narrow)
        if lanes > 16:
            second = load(row, kind, column + 16, end, narrow)
        simd.store_f32(strip + 128 * i, first)
        simd.store_f32(strip + 128 * i + 64, second)
        c_k = simd.splat(read_f32(vectors + 4 * i))
        c_q = simd.splat(read_f32(vectors + n_bytes + 4 * i))
        k0, k1 = simd.fma(first, c_k, k0), simd.fma(second, c_k, k1)
        q0, q1 = simd.fma(first, c_q, q0), simd.fma(second, c_q, q1)
    factor, with_key = simd.splat(read_f32(beta)), simd.splat(read_f32(upper))
    u0 = simd.mul(simd.sub(load_up_to(v, lanes), k0), factor)
    store_up_to(out, lanes, simd.fma(with_key, u0, q0))
    u1 = simd.splat(0.0)
    if lanes > 16:
        u1 = simd.mul(simd.sub(load_up_to(v + 64, lanes - 16), k1), factor)
        store_up_to(out + 64, lanes - 16, simd.fma(with_key, u1, q1))
    for i in range(Dk):
        a, k = simd.splat(read_f32(decay + 4 * i)), simd.splat(read_f32(key + 4 * i))
        first = simd.fma(u0, k, simd.mul(simd.load_f32(strip + 128 * i), a))
        second = simd.fma(u1, k, simd.mul(simd.load_f32(strip + 128 * i + 64), a))
        if kind == Q8_0:
            simd.store_f32(strip + 128 * i, first)
            simd.store_f32(strip + 128 * i + 64, second)
        else:
            store(stored + i * row_size, kind, column, end, first, second, narrow)
    if kind == Q8_0:
        for i in range(0, Dk, 16):
            at = stored + i * row_size + block_offset(column)
            store_blocks(at, row_size, min(16, Dk - i), lanes, strip + 128 * i, narrow)


@jit.device_function
def steps(
    n, S, strip_bytes, strip_row, stored, kind, first, width, Dk, Dv, q, q_bytes, k, k_bytes, g,
    g_bytes, per_channel, beta, beta_bytes, v, v_bytes, out, out_bytes, scale, normalize, rows,
    sums, u
):  # fmt: skip
    """Compute n tokens one after the other for `width` columns of a head from `first` on.

    float32 is at `S` (see `_step`); another state at `stored`, and `S` has room for 32 columns.
    """
    n_bytes, size = -(-Dk // 16) * 64, _token_bytes(Dk)
    for i in range(n):
        _prepare(
            q + i * q_bytes, k + i * k_bytes, g + i * g_bytes, per_channel, Dk, scale, normalize,
            rows + i * size,
        )  # fmt: skip
    for j in range(0, width, 16 * GROUPS):
        lanes = min(16 * GROUPS, width - j)
        for i in range(n):
            key, beta_i = rows + i * size, beta + i * beta_bytes
            pair, decay, with_key = key + n_bytes, key + 3 * n_bytes, key + 4 * n_bytes
            v_i, out_i = v + i * v_bytes + 4 * j, out + i * out_bytes + 4 * j
            if kind == F32:
                _step(
                    S + j // 16 * strip_bytes, strip_bytes, strip_row, Dk, pair, key, decay,
                    with_key, beta_i, v_i, out_i, lanes, sums, u,
                )  # fmt: skip
                continue
            for c in range(0, lanes, 32):
                column = first + j + c
                _narrow_step(
                    stored, kind, Dk, Dv, column, min(column + 32, first + width), pair, key,
                    decay, with_key, beta_i, v_i + 4 * c, out_i + 4 * c, S, sums,
                )  # fmt: skip
