"""Lightning attention on the CPU: a head of a sequence at a time, in chunks and single steps.

The products of a chunk are those of `nbflow_kernels.state_space.cpu_chunks`, with a weight of 1.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd, simd_memory
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of, read_f32, read_i32
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to
from nbflow_kernels.state_format import F32, KINDS
from nbflow_kernels.state_format.cpu import load, row_bytes, store
from nbflow_kernels.state_space import cpu_chunks
from nbflow_kernels.state_space.cpu_chunks import CHUNK, LANES, STATE, TRANSPOSED, WEIGHT

_LIKE = np.zeros(1, np.float32)


def lightning_attention(q, k, v, slopes, state, indptr, state_indices, scale, out):
    """See `nbflow_kernels.lightning_attention`; `indptr` and the indices are read by the kernel."""
    T, H, D = q.shape
    B = len(indptr) - 1
    hold(q, k, v, slopes, state, indptr, state_indices, out)
    parallel_for(
        _scan, B * H, 3.0 * T * H * D * D,
        address_of(q), q.strides[0], address_of(k), k.strides[0], address_of(v), v.strides[0],
        address_of(slopes), address_of(state), KINDS[state.dtype.name], address_of(indptr),
        address_of(state_indices), scale, address_of(out), out.strides[0], B, H, D, _LIKE,
    )  # fmt: skip


@jit.device_function
def _load_state(state, kind, D, scratch, narrow):
    """Copy a state (D, D) to blocks of `LANES` columns in scratch memory."""
    for block in range(0, D, LANES):
        for row in range(D):
            for i in range(block, block + LANES, 16):
                v = simd.splat(0.0)
                if i < D:
                    v = load(state + row * row_bytes(kind, D), kind, i, D, narrow)
                simd.store_f32(scratch + 4 * (block * D + row * LANES + i - block), v)


@jit.device_function
def _store_state(scratch, state, kind, D, narrow):
    """Round blocks of `LANES` columns to the rows of a state."""
    for row in range(D):
        for i in range(0, D, 32):
            at, w = scratch + 4 * (i * D + row * LANES), simd.splat(0.0)
            if D - i > 16:
                w = simd.load_f32(at + (64 if LANES == 32 else 64 * D))
            store(state + row * row_bytes(kind, D), kind, i, D, simd.load_f32(at), w, narrow)


@jit.device_function
def _add(totals, i, query, key, decay, h, v):
    """Return 16 numbers of a row after a token; add their product with the query to `totals`."""
    h = simd.fma(decay, h, simd.mul(key, v))
    simd.store_f32(totals + 4 * i, simd.fma(query, h, simd.load_f32(totals + 4 * i)))
    return h


@jit.device_function
def _step(q, k, v, state, kind, D, decay, scale, totals, narrow, out):
    """Compute a token, row by row of the state; `totals` has room for D rounded up to 16."""
    for i in range(0, D, 16):
        simd.store_f32(totals + 4 * i, simd.splat(0.0))
    for row in range(D):
        key, query = simd.splat(read_f32(k + 4 * row)), simd.splat(read_f32(q + 4 * row))
        at = state + row * row_bytes(kind, D)
        for i in range(0, D, 32):
            h = load(at, kind, i, D, narrow)
            h = _add(totals, i, query, key, decay, h, load_up_to(v + 4 * i, D - i))
            second = simd.splat(0.0)
            if D - i > 16:
                values = load_up_to(v + 4 * i + 64, D - i - 16)
                second = load(at, kind, i + 16, D, narrow)
                second = _add(totals, i + 16, query, key, decay, second, values)
            store(at, kind, i, D, h, second, narrow)
    for i in range(0, D, 16):
        store_up_to(out + 4 * i, D - i, simd.mul(simd.load_f32(totals + 4 * i), simd.splat(scale)))


@jit.kernel
def _scan(
    q, q_bytes, k, k_bytes, v, v_bytes, slopes, state, kind, indptr, indices, scale, out, out_bytes,
    B, H, D, like, start, stop
):  # fmt: skip
    """Compute heads [start, stop) of sequences, counted head by head."""
    size = cpu_chunks.scratch_bytes(D, D)
    scratch = simd_memory.allocate(size + 1024 + 4 * CHUNK * (D + CHUNK + 16))
    scores = scratch + size
    temporary = scores + 4 * CHUNK * CHUNK
    factor = np.float32(scale)
    for row in range(start, stop):
        h, s = row // B, row % B
        t, end = read_i32(indptr + 4 * s), read_i32(indptr + 4 * s + 4)
        at, narrow = 4 * h * D, scratch + TRANSPOSED
        state_at = state + (read_i32(indices + 4 * s) * H + h) * D * row_bytes(kind, D)
        log_decay = -read_f32(slopes + 4 * h)
        is_loaded = False
        while end - t >= CHUNK:
            if kind != F32 or not is_loaded:
                _load_state(state_at, kind, D, scratch + STATE, narrow)
                for j in range(0, CHUNK, 16):
                    simd.store_f32(scratch + WEIGHT + 4 * j, simd.splat(1.0))
                is_loaded = True
            q_at, k_at, v_at = q + t * q_bytes + at, k + t * k_bytes + at, v + t * v_bytes + at
            cpu_chunks.scores(like, q_at, q_bytes, k_at, k_bytes, D, temporary, scores, 4 * CHUNK)
            cpu_chunks.chunk(
                like, v_at, v_bytes, k_at, k_bytes, q_at, q_bytes, scores, 4 * CHUNK, D, D,
                log_decay, factor, np.float32(0.0), scratch, out + t * out_bytes + at, out_bytes,
            )  # fmt: skip
            t += CHUNK
            if kind != F32 or end - t < CHUNK:
                _store_state(scratch + STATE, state_at, kind, D, narrow)
        decay = cpu_chunks.decay_factor(simd.splat(log_decay))
        while t < end:
            _step(
                q + t * q_bytes + at, k + t * k_bytes + at, v + t * v_bytes + at, state_at, kind,
                D, decay, factor, temporary, narrow, out + t * out_bytes + at,
            )  # fmt: skip
            t += 1
    simd_memory.release(scratch)
