"""Lightning attention on the CPU: a head of a sequence at a time, in chunks and single steps.

The products of a chunk are those of `nbflow_kernels.state_space.cpu_chunks`, with a weight of 1.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd, simd_memory
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of, read_f32, read_i32
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to
from nbflow_kernels.state_space import cpu_chunks
from nbflow_kernels.state_space.cpu_chunks import CHUNK, LANES, STATE, WEIGHT

_LIKE = np.zeros(1, np.float32)


def lightning_attention(q, k, v, slopes, state, indptr, state_indices, scale, out):
    """See `nbflow_kernels.lightning_attention`; `indptr` and the indices are read by the kernel."""
    T, H, D = q.shape
    B = len(indptr) - 1
    hold(q, k, v, slopes, state, indptr, state_indices, out)
    parallel_for(
        _scan, B * H, 3.0 * T * H * D * D,
        address_of(q), q.strides[0], address_of(k), k.strides[0], address_of(v), v.strides[0],
        address_of(slopes), address_of(state), address_of(indptr), address_of(state_indices),
        scale, address_of(out), out.strides[0], B, H, D, _LIKE,
    )  # fmt: skip


@jit.device_function
def _copy_state(state, D, scratch, to_scratch):
    """Copy a state (D, D) to blocks of `LANES` columns in scratch memory, or back."""
    for block in range(0, D, LANES):
        for row in range(D):
            for i in range(block, block + LANES, 16):
                n = D - i
                at, place = state + 4 * (row * D + i), scratch + 4 * (block * D + row * LANES)
                place += 4 * (i - block)
                if to_scratch:
                    simd.store_f32(place, load_up_to(at, n) if n > 0 else simd.splat(0.0))
                elif n > 0:
                    store_up_to(at, n, simd.load_f32(place))


@jit.device_function
def _step(q, k, v, state, D, decay, scale, totals, out):
    """Compute a token, row by row of the state; `totals` has room for D rounded up to 16."""
    for i in range(0, D, 16):
        simd.store_f32(totals + 4 * i, simd.splat(0.0))
    for row in range(D):
        key, query = simd.splat(read_f32(k + 4 * row)), simd.splat(read_f32(q + 4 * row))
        for i in range(0, D, 16):
            at, n = state + 4 * (row * D + i), D - i
            h = simd.fma(decay, load_up_to(at, n), simd.mul(key, load_up_to(v + 4 * i, n)))
            store_up_to(at, n, h)
            simd.store_f32(totals + 4 * i, simd.fma(query, h, simd.load_f32(totals + 4 * i)))
    for i in range(0, D, 16):
        store_up_to(out + 4 * i, D - i, simd.mul(simd.load_f32(totals + 4 * i), simd.splat(scale)))


@jit.kernel
def _scan(
    q, q_bytes, k, k_bytes, v, v_bytes, slopes, state, indptr, indices, scale, out, out_bytes,
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
        at, state_at = 4 * h * D, state + (read_i32(indices + 4 * s) * H + h) * D * D * 4
        log_decay = -read_f32(slopes + 4 * h)
        has_chunks = end - t >= CHUNK
        if has_chunks:
            _copy_state(state_at, D, scratch + STATE, True)
            for j in range(0, CHUNK, 16):
                simd.store_f32(scratch + WEIGHT + 4 * j, simd.splat(1.0))
        while end - t >= CHUNK:
            q_at, k_at, v_at = q + t * q_bytes + at, k + t * k_bytes + at, v + t * v_bytes + at
            cpu_chunks.scores(like, q_at, q_bytes, k_at, k_bytes, D, temporary, scores, 4 * CHUNK)
            cpu_chunks.chunk(
                like, v_at, v_bytes, k_at, k_bytes, q_at, q_bytes, scores, 4 * CHUNK, D, D,
                log_decay, factor, np.float32(0.0), scratch, out + t * out_bytes + at, out_bytes,
            )  # fmt: skip
            t += CHUNK
        if has_chunks:
            _copy_state(state_at, D, scratch + STATE, False)
        decay = cpu_chunks.decay_factor(simd.splat(log_decay))
        while t < end:
            _step(
                q + t * q_bytes + at, k + t * k_bytes + at, v + t * v_bytes + at, state_at, D,
                decay, factor, temporary, out + t * out_bytes + at,
            )  # fmt: skip
            t += 1
    simd_memory.release(scratch)
