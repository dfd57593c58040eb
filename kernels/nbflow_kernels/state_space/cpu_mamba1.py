"""Mamba-1 on the CPU: 16 channels of a sequence in the lanes, step by step.

Every channel and state has a decay for each token, so a prompt cannot be computed by products of a
chunk: a step takes N exponentials per channel.  The state of 16 channels is transposed to scratch
memory (16 N float32: a cache of the first level holds it) and stays there for the whole sequence.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd, simd_memory
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of, read_f32, read_i32
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to
from nbflow_kernels.state_format import F32, KINDS
from nbflow_kernels.state_format.cpu import decode_rows, encode_rows, row_bytes
from nbflow_kernels.state_space.cpu_chunks import lanes_to_rows, rows_to_lanes
from nbflow_kernels.state_space.cpu_mamba2 import LIKE, optional, time_step

_COST = 20.0  # multiply-adds per token and number of the state: most of it the exponential


def mamba1_scan(x, dt, a, b, c, state, indptr, state_indices, d, dt_bias, dt_softplus, out):
    """See `nbflow_kernels.mamba1_scan`; `indptr` and the indices are read when the kernel runs."""
    T, C = x.shape
    N, B = b.shape[1], len(indptr) - 1
    hold(x, dt, a, b, c, state, indptr, state_indices, d, dt_bias, out)
    parallel_for(
        _scan, B * -(-C // 16), _COST * T * C * N,
        address_of(x), x.strides[0], address_of(dt), dt.strides[0], address_of(a),
        address_of(b), b.strides[0], address_of(c), c.strides[0], address_of(state),
        KINDS[state.dtype.name], address_of(indptr), address_of(state_indices),
        *optional(d), *optional(dt_bias), bool(dt_softplus), address_of(out),
        out.strides[0], B, C, N, LIKE,
    )  # fmt: skip


@jit.kernel
def _scan(
    x, x_bytes, dt, dt_bytes, a, b, b_bytes, c, c_bytes, state, kind, indptr, indices, d, d_bytes,
    bias, bias_bytes, use_softplus, out, out_bytes, B, C, N, like, start, stop
):  # fmt: skip
    """Compute blocks of 16 channels of sequences [start, stop), counted block by block."""
    scratch = simd_memory.allocate(2048 + 3 * 64 * N)
    decays, h, plain = scratch + 2048, scratch + 2048 + 64 * N, scratch + 2048 + 128 * N
    packed = -1
    for row in range(start, stop):
        block, s = row // B, row % B
        first, end = read_i32(indptr + 4 * s), read_i32(indptr + 4 * s + 4)
        if first == end:
            continue
        channel, n = 16 * block, min(16, C - 16 * block)
        state_at = state + (read_i32(indices + 4 * s) * C + channel) * row_bytes(kind, N)
        rows = state_at if kind == F32 else plain
        if block != packed:
            rows_to_lanes(like, a + channel * N * 4, 4 * N, n, N, 16, decays, scratch)
            packed = block
        if kind == F32:
            rows_to_lanes(like, rows, 4 * N, n, N, 16, h, scratch)
        shift = load_up_to(bias + channel * 4, n) if bias_bytes > 0 else simd.splat(0.0)
        skip = load_up_to(d + channel * 4, n) if d_bytes > 0 else simd.splat(0.0)
        for t in range(first, end):
            if kind != F32:  # rounded after each token
                decode_rows(state_at, kind, n, N, plain, scratch)
                rows_to_lanes(like, rows, 4 * N, n, N, 16, h, scratch)
            v = load_up_to(dt + t * dt_bytes + channel * 4, n)
            v = time_step(v, shift, use_softplus, -np.inf, np.inf)
            value = load_up_to(x + t * x_bytes + channel * 4, n)
            added, total = simd.mul(v, value), simd.splat(0.0)
            b_at, c_at = b + t * b_bytes, c + t * c_bytes
            for i in range(N):
                decay = simd.exp(simd.mul(v, simd.load_f32(decays + 64 * i)))
                new = simd.mul(added, simd.splat(read_f32(b_at + 4 * i)))
                new = simd.fma(decay, simd.load_f32(h + 64 * i), new)
                simd.store_f32(h + 64 * i, new)
                total = simd.fma(new, simd.splat(read_f32(c_at + 4 * i)), total)
            store_up_to(out + t * out_bytes + channel * 4, n, simd.fma(skip, value, total))
            if kind != F32:
                lanes_to_rows(like, rows, 4 * N, n, N, 16, h, scratch)
                encode_rows(plain, kind, n, N, state_at, scratch)
        if kind == F32:
            lanes_to_rows(like, rows, 4 * N, n, N, 16, h, scratch)
    simd_memory.release(scratch)
