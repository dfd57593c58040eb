"""Mamba-2 on the CPU: a head of a sequence at a time, in chunks and single steps."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd, simd_memory
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_math import keep_nan, softplus
from nbflow_kernels.cpu.simd_memory import address_of, load_first, read_f32, read_i32, write_f32
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to
from nbflow_kernels.state_format import F32, KINDS, Q8_0
from nbflow_kernels.state_format.cpu import (
    block_offset,
    decode_rows,
    encode_rows,
    load,
    load_block,
    row_bytes,
    store,
    store_blocks,
)
from nbflow_kernels.state_space import cpu_chunks
from nbflow_kernels.state_space.cpu_chunks import (
    AFTER,
    BEFORE,
    CHUNK,
    LANES,
    STATE,
    TRANSPOSED,
    WEIGHT,
)

TOTALS = cpu_chunks.PRODUCT
"""Scratch memory of steps, in that of the intra-chunk product: 16 sums, ..."""
NUMBERS = TOTALS + 1024
"""... 16 rows of 32 numbers ..."""
BLOCKS = NUMBERS + 2048
"""... and 1 KB for `store_blocks`."""
LIKE = np.zeros(1, np.float32)
"""Type of the numbers in register tiles, and the value of what is not given."""


def mamba2_scan(
    x, dt, a, b, c, state, indptr, state_indices, d, dt_bias, dt_softplus, dt_limits, out
):
    """See `nbflow_kernels.mamba2_scan`; `indptr` and the indices are read when the kernels run."""
    T, H, P = x.shape
    G, N = b.shape[1:]
    B = len(indptr) - 1
    scores = np.empty((T, G, CHUNK) if T >= CHUNK else (0, G, CHUNK), np.float32)
    hold(x, dt, a, b, c, state, indptr, state_indices, d, dt_bias, out, scores)
    starts, rows = address_of(indptr), (address_of(b), b.strides[0], address_of(c), c.strides[0])
    if T >= CHUNK:
        parallel_for(
            _chunk_scores, T // CHUNK * G, float(T) * G * N * CHUNK,
            *rows, address_of(scores), starts, B, G, N, LIKE,
        )  # fmt: skip
    parallel_for(
        _scan, B * H, 3.0 * T * H * P * N,
        address_of(x), x.strides[0], address_of(dt), dt.strides[0], address_of(a), *rows,
        address_of(state), KINDS[state.dtype.name], starts, address_of(state_indices),
        *optional(d), *optional(dt_bias),
        bool(dt_softplus), float(dt_limits[0]), float(dt_limits[1]), address_of(scores),
        address_of(out), out.strides[0], B, H, P, G, N, LIKE,
    )  # fmt: skip


def optional(array):
    """Return the address and the stride in bytes of a vector, or of a zero for None."""
    return (address_of(LIKE), 0) if array is None else (address_of(array), 4)


@jit.device_function(inline="llvm")
def time_step(v, bias, use_softplus, low, high):
    """Return the time steps of 16 raw ones: bias, softplus, clamping; NaN stays."""
    v = simd.add(v, bias)
    if use_softplus:
        v = softplus(v)
    return keep_nan(simd.minimum(simd.maximum(v, simd.splat(low)), simd.splat(high)), v)


@jit.device_function
def _time_steps(dt, dt_bytes, n, bias, use_softplus, low, high, to):
    """Write the time steps of `n` tokens (at most a chunk) of a head to `to`, then to 16 lanes."""
    for j in range(n):
        write_f32(to + 4 * j, read_f32(dt + j * dt_bytes))
    for j in range(n, (n + 15) // 16 * 16):
        write_f32(to + 4 * j, np.float32(0.0))
    for at in range(to, to + 4 * n, 64):
        v = time_step(simd.load_f32(at), simd.splat(bias), use_softplus, low, high)
        simd.store_f32(at, v)


@jit.kernel
def _chunk_scores(b, b_bytes, c, c_bytes, scores, indptr, B, G, N, like, start, stop):
    """Write c_i . b_j of chunks [start, stop) of all sequences, those of the groups in turn.

    There are at most as many chunks as the call's rows could hold; rows without one do nothing.
    """
    scratch = simd_memory.allocate(1024 + 4 * CHUNK * N)
    for row in range(start, stop):
        chunk, g = row // G, row % G
        t = -1
        for s in range(B):
            first, end = read_i32(indptr + 4 * s), read_i32(indptr + 4 * s + 4)
            n_chunks = (end - first) // CHUNK
            if t < 0 and chunk < n_chunks:
                t = first + chunk * CHUNK
            chunk -= n_chunks
        if t >= 0:
            at = 4 * g * N
            cpu_chunks.scores(
                like, c + t * c_bytes + at, c_bytes, b + t * b_bytes + at, b_bytes, N, scratch,
                scores + (t * G + g) * 4 * CHUNK, G * 4 * CHUNK,
            )  # fmt: skip
    simd_memory.release(scratch)


@jit.device_function
def _row(row, N, decay, added, b, c):
    """Update a row of a float32 state; return 16 sums of its product with c."""
    whole, rest = N - N % 16, N % 16
    total = simd.splat(0.0)
    for i in range(0, 4 * whole, 64):
        v = simd.fma(decay, simd.load_f32(row + i), simd.mul(added, simd.load_f32(b + i)))
        simd.store_f32(row + i, v)
        total = simd.fma(v, simd.load_f32(c + i), total)
    if rest > 0:
        i = 4 * whole
        v = simd.mul(added, load_first(b + i, rest, 0.0))
        v = simd.fma(decay, load_first(row + i, rest, 0.0), v)
        store_up_to(row + i, rest, v)
        total = simd.fma(v, load_first(c + i, rest, 0.0), total)
    return total


@jit.device_function
def _narrow_rows(rows, kind, n_rows, N, decay, added, b, c, totals, scratch):
    """Update and round up to 16 rows of a state that is not float32, with the operations of `_row`.

    Columns go in blocks of 32, of which q8_0 stores all rows together.
    """
    size, numbers, narrow = row_bytes(kind, N), scratch + NUMBERS, scratch + BLOCKS
    for r in range(n_rows):
        simd.store_f32(totals + 64 * r, simd.splat(0.0))
    for i in range(0, N, 32):
        left = N - i - 16
        b0, b1 = load_up_to(b + 4 * i, N - i), simd.splat(0.0)
        c0, c1 = load_up_to(c + 4 * i, N - i), simd.splat(0.0)
        if left > 0:
            b1, c1 = load_up_to(b + 4 * i + 64, left), load_up_to(c + 4 * i + 64, left)
        if kind == Q8_0 and left >= 16:
            blocks = rows + block_offset(i)
            for r in range(n_rows):
                factor = simd.splat(read_f32(added + 4 * r))
                v, w = load_block(blocks + r * size)
                v = simd.fma(decay, v, simd.mul(factor, b0))
                w = simd.fma(decay, w, simd.mul(factor, b1))
                total = simd.fma(w, c1, simd.fma(v, c0, simd.load_f32(totals + 64 * r)))
                simd.store_f32(totals + 64 * r, total)
                simd.store_f32(numbers + 128 * r, v)
                simd.store_f32(numbers + 128 * r + 64, w)
            store_blocks(blocks, size, n_rows, 32, numbers, narrow)
            continue
        for r in range(n_rows):
            row, factor, w = rows + r * size, simd.splat(read_f32(added + 4 * r)), simd.splat(0.0)
            v = simd.fma(decay, load(row, kind, i, N, narrow), simd.mul(factor, b0))
            total = simd.fma(v, c0, simd.load_f32(totals + 64 * r))
            if left > 0:
                w = simd.fma(decay, load(row, kind, i + 16, N, narrow), simd.mul(factor, b1))
                total = simd.fma(w, c1, total)
            simd.store_f32(totals + 64 * r, total)
            if kind == Q8_0:
                simd.store_f32(numbers + 128 * r, v)
                simd.store_f32(numbers + 128 * r + 64, w)
            else:
                store(row, kind, i, N, v, w, narrow)
        if kind == Q8_0:
            store_blocks(rows + block_offset(i), size, n_rows, N - i, numbers, narrow)


@jit.device_function
def _steps(
    x, x_bytes, weights, n, log_decay, b, b_bytes, c, c_bytes, state, kind, P, N, skip, scratch,
    out, out_bytes
):  # fmt: skip
    """Compute `n` tokens one after the other, 16 rows of the state (P, N) at a time."""
    totals, decays, added = scratch + TOTALS, scratch + BEFORE, scratch + AFTER
    for i in range(0, 4 * n, 64):
        logs = simd.mul(simd.splat(log_decay), simd.load_f32(weights + i))
        simd.store_f32(decays + i, cpu_chunks.decay_factor(logs))
    for p in range(0, P, 16):
        rows, n_rows = state + p * row_bytes(kind, N), min(16, P - p)
        for t in range(n):
            decay = simd.splat(read_f32(decays + 4 * t))
            values = load_up_to(x + t * x_bytes + 4 * p, n_rows)
            simd.store_f32(added, simd.mul(simd.splat(read_f32(weights + 4 * t)), values))
            b_at, c_at = b + t * b_bytes, c + t * c_bytes
            if kind == F32:
                for r in range(n_rows):
                    factor = simd.splat(read_f32(added + 4 * r))
                    total = _row(rows + 4 * r * N, N, decay, factor, b_at, c_at)
                    simd.store_f32(totals + 64 * r, total)
            else:
                _narrow_rows(rows, kind, n_rows, N, decay, added, b_at, c_at, totals, scratch)
            sums = register_tiles.lane_sums(register_tiles.load(1, 16, totals))
            y = simd.fma(simd.splat(skip), values, sums)
            store_up_to(out + t * out_bytes + 4 * p, n_rows, y)


@jit.device_function
def _load_state(like, stored, kind, P, N, scratch, plain):
    """Copy a state to lanes in scratch memory; `plain` has room for it in float32."""
    rows, transposed = stored, scratch + TRANSPOSED
    if kind != F32:
        rows = plain
        decode_rows(stored, kind, P, N, plain, transposed)
    cpu_chunks.rows_to_lanes(like, rows, 4 * N, P, N, LANES, scratch + STATE, transposed)


@jit.device_function
def _store_state(like, stored, kind, P, N, scratch, plain):
    """Round the lanes of a state to its format."""
    rows, transposed = stored if kind == F32 else plain, scratch + TRANSPOSED
    cpu_chunks.lanes_to_rows(like, rows, 4 * N, P, N, LANES, scratch + STATE, transposed)
    if kind != F32:
        encode_rows(plain, kind, P, N, stored, transposed)


@jit.kernel
def _scan(
    x, x_bytes, dt, dt_bytes, a, b, b_bytes, c, c_bytes, state, kind, indptr, indices, d, d_bytes,
    bias, bias_bytes, use_softplus, low, high, scores, out, out_bytes, B, H, P, G, N, like,
    start, stop
):  # fmt: skip
    """Compute heads [start, stop) of sequences, counted head by head.

    A sequence's tokens go in chunks from its first token on, what remains in steps.
    """
    size = cpu_chunks.scratch_bytes(P, N)
    scratch = simd_memory.allocate(size + (0 if kind == F32 else 4 * P * N))
    plain = scratch + size
    for row in range(start, stop):
        h, s = row // B, row % B
        t, end = read_i32(indptr + 4 * s), read_i32(indptr + 4 * s + 4)
        g = h // (H // G)
        state_at = state + (read_i32(indices + 4 * s) * H + h) * P * row_bytes(kind, N)
        log_decay, skip = read_f32(a + 4 * h), read_f32(d + d_bytes * h)
        shift, weights = read_f32(bias + bias_bytes * h), scratch + WEIGHT
        x_at, y_at = x + 4 * h * P, out + 4 * h * P
        b_at, c_at = b + 4 * g * N, c + 4 * g * N
        is_loaded = False
        while end - t >= CHUNK:
            if kind != F32 or not is_loaded:
                _load_state(like, state_at, kind, P, N, scratch, plain)
                is_loaded = True
            _time_steps(
                dt + t * dt_bytes + 4 * h, dt_bytes, CHUNK, shift, use_softplus, low, high, weights
            )
            cpu_chunks.chunk(
                like, x_at + t * x_bytes, x_bytes, b_at + t * b_bytes, b_bytes, c_at + t * c_bytes,
                c_bytes, scores + (t * G + g) * 4 * CHUNK, G * 4 * CHUNK, P, N, log_decay,
                np.float32(1.0), skip, scratch, y_at + t * out_bytes, out_bytes,
            )  # fmt: skip
            t += CHUNK
            if kind != F32 or end - t < CHUNK:
                _store_state(like, state_at, kind, P, N, scratch, plain)
        if t < end:
            _time_steps(
                dt + t * dt_bytes + 4 * h, dt_bytes, end - t, shift, use_softplus, low, high,
                weights,
            )  # fmt: skip
            _steps(
                x_at + t * x_bytes, x_bytes, weights, end - t, log_decay, b_at + t * b_bytes,
                b_bytes, c_at + t * c_bytes, c_bytes, state_at, kind, P, N, skip, scratch,
                y_at + t * out_bytes, out_bytes,
            )  # fmt: skip
    simd_memory.release(scratch)
