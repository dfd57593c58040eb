"""The gated delta rule on the CPU: chunks of tokens, 16 columns of the state in a vector.

With a_t = exp(g_t) and c_t the product of the decays of a chunk up to token t, both for each of
the Dk rows of the state, a chunk of n tokens that begins with the state S is

    L[t, s] = k_t . (c_t / c_s k_s)    for s < t        A[t, s] = q_t . (c_t / c_s k_s)  for s <= t
    u_t = beta_t (v_t - S^T (c_t k_t) - sum_s L[t, s] u_s)
    o_t = S^T (c_t q_t) + sum_s A[t, s] u_s
    S <- c_n S + sum_s (c_n / c_s k_s) u_s^T

(`c_t k_t` etc. row by row; `loops.chunk`).  This is the WY form, its triangular system solved by
substitution.  The ratios c_t / c_s are products of decays, so that a quotient of vanishing numbers
never occurs: one for each channel multiplies the keys token by token, one for the whole head the
dot products and the sums (`cpu_chunk`).

Of n tokens, S^T is multiplied with 2 n vectors and S is read and written once: with n = 8
(`cpu_chunk.chunk`) these are products of matrices in register tiles, 3 multiply-adds per number of
the state and token and one multiplication per chunk, at the processor's rate of multiply-adds
almost; with n = 1 (`_step`) they are four operations, and the state is read and written for each
token.  The dot products and the substitution take 20 % of a chunk's time with heads of 128 columns,
30 % with 64.  The columns of the state are independent but for the dot products: threads divide
heads and columns, which leaves all bits alone.

A single token works in the caller's state (`direct`).  For more tokens, other formats and ragged
sizes the columns are copied: strips of 16, the rows of a strip contiguous.  Another format than
float32 is rounded to after each chunk and each step, so that the roundings, too, do not depend on
the division into calls.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd
from nbflow_kernels.cpu.parallel_for import get_num_threads, hold, parallel_for
from nbflow_kernels.cpu.simd_memory import (
    address_of,
    allocate,
    read_f32,
    read_i32,
    release,
    write_f32,
)
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to
from nbflow_kernels.delta_rule.cpu_chunk import (
    CHUNK,
    WIDE,
    chunk,
    copy_row,
    prepare_chunk,
    write_decay,
)
from nbflow_kernels.delta_rule.cpu_state import copy_from_strips, copy_to_strips
from nbflow_kernels.state_format import F32, KINDS, Q8_0
from nbflow_kernels.state_format.cpu import block_offset, load, row_bytes, store, store_blocks

_GROUPS = 4 if WIDE else 2  # strips of a register tile of the step form
_SCRATCH_BYTES = 448 * CHUNK + 64  # products, factors, sums and corrections
_PARTS_PER_THREAD = 4  # heads or parts of heads; more of them are divided more evenly


def gated_delta_rule(
    q, k, v, g, beta, state, indptr, state_indices, start_positions, scale, normalize_qk, chunked,
    out
):  # fmt: skip
    """See `nbflow_kernels.gated_delta_rule`."""
    hold(q, k, v, g, beta, state, indptr, state_indices, start_positions, out)
    T, Hk, Dk = q.shape
    _, Hv, Dv = v.shape
    n_parts, columns = divide_columns(Hv, Dv)
    rows = [(address_of(a), a.strides[0]) if T else (0, 0) for a in (q, k, v, g, beta, out)]
    parallel_for(
        _gated_delta_rule, Hv * n_parts, 4.0 * T * Hv * Dk * Dv,
        *rows[0], *rows[1], *rows[2], *rows[3], int(g.ndim == 3), *rows[4],
        address_of(state), KINDS[state.dtype.name], address_of(indptr), address_of(state_indices),
        0 if start_positions is None else address_of(start_positions), *rows[5],
        len(state_indices), Hk, Hv, Dk, Dv, n_parts, columns, scale, normalize_qk, chunked,
    )  # fmt: skip


def divide_columns(Hv, Dv):
    """Return the number of parts of a head's columns, and the columns of a part."""
    step = 16 * _GROUPS
    wanted = _ceil_div(_PARTS_PER_THREAD * get_num_threads(), Hv)
    columns = _ceil_div(_ceil_div(Dv, wanted), step) * step
    return _ceil_div(Dv, columns), columns


def _ceil_div(a, b):
    return -(-a // b)


@jit.device_function
def _prepare_steps(
    q, q_bytes, k, k_bytes, g, g_bytes, per_channel, n, Dk, scale, normalize, keys, vectors, decays,
    products
):  # fmt: skip
    """Write what the columns of n steps share.

    `keys`: k_t; `vectors`: a_t k_t and a_t q_t, neighbours; `decays`: a_t; `products`: q_t . k_t.
    """
    n_bytes = -(-Dk // 16) * 64
    for t in range(n):
        key, decay = keys + t * n_bytes, decays + t * n_bytes
        of_k = vectors + 2 * t * n_bytes
        query = of_k + n_bytes
        copy_row(k + t * k_bytes, Dk, np.float32(1.0), normalize, key)
        copy_row(q + t * q_bytes, Dk, scale, normalize, query)
        write_decay(g + t * g_bytes, per_channel, Dk, decay)
        with_q = simd.splat(0.0)
        for i in range(0, n_bytes, 64):
            a, x, y = simd.load_f32(decay + i), simd.load_f32(key + i), simd.load_f32(query + i)
            with_q = simd.fma(y, x, with_q)
            simd.store_f32(of_k + i, simd.mul(a, x))
            simd.store_f32(query + i, simd.mul(a, y))
        write_f32(products + 4 * t, simd.sum(with_q))


@jit.device_function
def _step(
    strips, strip_bytes, row_bytes, Dk, vectors, key, decay, upper, beta, v, out, lanes, sums, u
):  # fmt: skip
    """Compute one token for a register tile of strips, `strip_bytes` apart."""
    n_bytes = -(-Dk // 16) * 64
    like = np.float32(0.0)
    tile = register_tiles.zero(_GROUPS, 2)
    for i in range(Dk):
        at = strips + i * row_bytes
        tile = register_tiles.step(tile, like, at, strip_bytes, vectors + 4 * i, n_bytes)
    register_tiles.store(sums, tile)
    for j in range(_GROUPS):
        n = lanes - 16 * j
        if n > 0:
            residual = simd.sub(load_up_to(v + 64 * j, n), simd.load_f32(sums + 64 * j))
            residual = simd.mul(residual, simd.splat(read_f32(beta)))
            simd.store_f32(u + 64 * j, residual)
            o = simd.load_f32(sums + 64 * (_GROUPS + j))
            o = simd.fma(simd.splat(read_f32(upper)), residual, o)
            store_up_to(out + 64 * j, n, o)
    for i in range(0, -(-Dk // 4) * 4, 4):
        for j in range(_GROUPS):
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
def _steps(
    S, strip_bytes, strip_row, stored, kind, Dk, Dv, first, width, n, vectors, keys, decays,
    products, beta, beta_bytes, v, v_bytes, out, out_bytes, sums, u
):  # fmt: skip
    """Compute n tokens one after the other for `width` columns from `first` on.

    float32 is at `S` (see `_step`); another state at `stored`, and `S` has room for 32 columns.
    """
    n_bytes = -(-Dk // 16) * 64
    for j in range(0, width, 16 * _GROUPS):
        lanes = min(16 * _GROUPS, width - j)
        for i in range(n):
            pair, key, decay = vectors + 2 * i * n_bytes, keys + i * n_bytes, decays + i * n_bytes
            with_key, beta_i = products + 4 * i, beta + i * beta_bytes
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


@jit.kernel
def _gated_delta_rule(
    q, q_bytes, k, k_bytes, v, v_bytes, g, g_bytes, per_channel, beta, beta_bytes, state, kind,
    indptr, state_indices, positions, out, out_bytes, B, Hk, Hv, Dk, Dv, n_parts, columns, scale,
    normalize, chunked, start, stop
):  # fmt: skip
    """Compute parts [start, stop) of the columns of heads, for all sequences."""
    n_bytes = -(-Dk // 16) * 64
    n_strips = -(-min(columns, Dv) // (16 * _GROUPS)) * _GROUPS
    rows = allocate(5 * CHUNK * n_bytes + _SCRATCH_BYTES + n_strips * 16 * n_bytes)
    vectors = rows + 2 * CHUNK * n_bytes
    decays = vectors + 2 * CHUNK * n_bytes
    products = decays + CHUNK * n_bytes
    factors = products + 64 * CHUNK
    sums = factors + 64
    u = sums + 256 * CHUNK
    strips = u + 128 * CHUNK
    factor = np.float32(scale)
    for part in range(start, stop):
        h, first = part // n_parts, part % n_parts * columns
        width = min(columns, Dv - first)
        head = h // (Hv // Hk)
        for b in range(B):
            begin, end = read_i32(indptr + 4 * b), read_i32(indptr + 4 * b + 4)
            if begin >= end:
                continue
            stored = state + (read_i32(state_indices + 4 * b) * Hv + h) * Dk * row_bytes(kind, Dv)
            direct = (
                kind == F32 and end - begin == 1 and width % (16 * _GROUPS) == 0 and Dk % 4 == 0
            )
            S, strip_bytes, strip_row = stored + 4 * first, 64, 4 * Dv
            if not direct:
                S, strip_bytes, strip_row = strips, 16 * n_bytes, 64
                if kind == F32:
                    copy_to_strips(stored, kind, Dk, Dv, first, width, n_strips, strips, sums)
            position = 0 if positions == 0 else read_i32(positions + 4 * b)
            t = begin
            while t < end:
                border = (position + t - begin) % CHUNK
                is_chunk = chunked and border == 0 and end - t >= CHUNK
                n = CHUNK if is_chunk else min(end - t, CHUNK - border)
                q_at, k_at = q + t * q_bytes + 4 * head * Dk, k + t * k_bytes + 4 * head * Dk
                g_at = g + t * g_bytes + 4 * h * (Dk if per_channel else 1)
                beta_at = beta + t * beta_bytes + 4 * h
                v_at = v + t * v_bytes + 4 * (h * Dv + first)
                out_at = out + t * out_bytes + 4 * (h * Dv + first)
                t += n
                if not is_chunk:
                    _prepare_steps(
                        q_at, q_bytes, k_at, k_bytes, g_at, g_bytes, per_channel, n, Dk, factor,
                        normalize, rows, vectors, decays, products,
                    )  # fmt: skip
                    _steps(
                        S, strip_bytes, strip_row, stored, kind, Dk, Dv, first, width, n, vectors,
                        rows, decays, products, beta_at, beta_bytes, v_at, v_bytes, out_at,
                        out_bytes, sums, u,
                    )  # fmt: skip
                    continue
                prepare_chunk(
                    q_at, q_bytes, k_at, k_bytes, g_at, g_bytes, per_channel, Dk, factor,
                    normalize, rows, vectors, decays, products, factors,
                )  # fmt: skip
                if kind != F32:
                    copy_to_strips(stored, kind, Dk, Dv, first, width, n_strips, strips, sums)
                for j in range(0, width, 32):
                    chunk(
                        S + j // 16 * strip_bytes, strip_bytes, Dk,
                        vectors if per_channel else rows, rows, decays, 4 if per_channel else 0,
                        products, factors, beta_at, beta_bytes, v_at + 4 * j, v_bytes,
                        out_at + 4 * j, out_bytes, width - j, sums, u,
                    )  # fmt: skip
                if kind != F32:
                    copy_from_strips(strips, kind, Dk, Dv, first, width, stored, sums)
            if kind == F32 and not direct:
                copy_from_strips(strips, kind, Dk, Dv, first, width, stored, sums)
    release(rows)
