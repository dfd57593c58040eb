"""CPU GEMV of block formats (q4_0, q4_k, ...) with int8 activations, 1 to 4 or 8 rows at a time.

A *piece* is 32 columns, which share one activation scale x.  Products of codes of one sub-block are
added as integers, exactly; then, in float32,

    total = fma(integer sum of (code - zero) * q, scale * x, total)      piece after piece
    bases = fma(base, x * sum of q, bases)                               the same, with a base

Sub-blocks of 16 columns (q2_k, q3_k, q6_k) halve the pieces.  With i0 and i1 the integer sums, s0
and s1 the scales of the halves,

    inner = fma(fma(i1, s1, i0 * s0), x, inner)                          piece after piece
    total = fma(inner, d, total)                                         block after block

where integer scales share a `d`: then s0 and s1 are integers and the sum in the middle is exact
(below 2 ** 24) however it is computed.  Without, s0 and s1 include d, and total is inner.

The result is total + bases, plus the bias, plus the old output.  The order is the same for one row
or many, for any number of threads and on any processor.  As plain loops: `loops.int8`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles_int8, simd
from nbflow_kernels.cpu.simd_memory import prefetch_lines
from nbflow_kernels.formats.decode_cpu import base_of, codes, d_of, dots_of_unit, m_of, scale_of
from nbflow_kernels.formats.layout_cpu import CpuLayout
from nbflow_kernels.matmul.cpu_packed_tiles import epilogue

# Distance ahead on a Zen 4.  One row: from about 2.5 KB on, a core reads 21 GB/s instead of 30, as
# the processor's own prefetches come later than these, of which a core has some 24 in flight.
# Several rows: the product takes longer than the memory, and within 2 KB the two do not overlap
# (q6_k, 4 rows: 72 ps a weight, where 29 come from the caches); from 8 KB on they do.  Two or three
# rows of 8 bits still wait for the memory: q8_0 takes 35 ps with 1 KB and 48 with 8.
PREFETCH_BYTES, PREFETCH_BYTES_OF_ROWS = 1024, 8192
LINE = 64  # bytes of a cache line


def piece_vectors(form: CpuLayout) -> int:
    """Return the code vectors (of 4 columns) that a dot product of the GEMV adds."""
    return min(form.sub_block, 32) // 4


@functools.cache
def gemv(form: CpuLayout, tokens: int) -> Any:
    """Return the kernel for row groups [start, stop), which multiplies `tokens` rows at a time.

    Codes go from memory to registers; further rows of activations find the group in the cache, and
    each pass over them prefetches another part of the next group's blocks.
    Weights are read as one stream, prefetched some kilobytes ahead: the instructions of two to
    four pieces fill the processor's reorder window, so that its own loads are seldom early enough.
    """
    waits = tokens < (4 if form.bits == 8 else 2)  # for the memory
    distance = PREFETCH_BYTES if waits else PREFETCH_BYTES_OF_ROWS
    halves, one_d, has_base = form.sub_block == 16, form.one_d, form.base != "none"
    shift, negative_zero = 1 if halves else 0, np.int32(-form.zero)
    units, pieces, block_bytes = form.block // form.unit, form.unit // 32, form.block_bytes
    runs = 2 if halves else 1  # sub-blocks of a piece
    vectors, per_scale = 8 // runs, form.sub_block // 4
    several_d = form.block != form.d_block
    bits, trellis = form.operand_bits, form.trellis
    share = block_bytes // (units * pieces)  # bytes prefetched with each piece
    lines = -(-share // LINE)

    @jit.kernel
    def kernel(x, n_tokens, scales, sums, packed, n_blocks, bias, accumulate, out, start, stop):
        n_pieces = n_blocks * units * pieces
        n_padded = (n_tokens + tokens - 1) // tokens * tokens
        starts = np.empty((n_padded, n_pieces * runs), np.int32)
        weighted = np.empty((n_padded, n_pieces * runs), np.float32)
        for t in range(n_padded):
            for i in range(n_pieces * runs):
                starts[t, i] = negative_zero * sums[t, i]
                weighted[t, i] = scales[t, i >> shift] * np.float32(sums[t, i])
        result = np.empty((tokens, 16), np.float32)
        x_step, xs_step = x.strides[0], scales.strides[0]
        n_step, y_step = starts.strides[0], weighted.strides[0]
        one = simd.splat(1.0)
        passes = n_padded // tokens
        for group in range(start, stop):
            for first in range(0, n_tokens, tokens):
                at = simd.address(packed) + group * n_blocks * block_bytes
                x_at = simd.address(x) + first * x_step
                xs_at = simd.address(scales) + first * xs_step
                n_at = simd.address(starts) + first * n_step
                y_at = simd.address(weighted) + first * y_step
                total = bases = register_tiles_int8.zeros(1, tokens)
                ahead, turn = at + distance, first // tokens
                for _ in range(n_blocks):
                    if tokens > 1 and passes > 1:
                        ahead = at + n_blocks * block_bytes if turn == 0 else at
                        turn = passes - 1 if turn == 0 else turn - 1
                    inner = register_tiles_int8.zeros(1, tokens) if one_d and halves else total
                    d, m = d_of(form, at, 0), m_of(form, at, 0)
                    for unit in range(units):
                        for p in range(pieces):
                            prefetch_lines(ahead, lines)
                            ahead += share
                            part = register_tiles_int8.zeros(1, tokens)
                            for run in range(runs):
                                s = (8 * (unit * pieces + p) + run * vectors) // per_scale
                                if several_d:
                                    d, m = d_of(form, at, s), m_of(form, at, s)
                                ints = register_tiles_int8.starts(1, tokens, n_at, n_step, 1)
                                if trellis:
                                    ints = dots_of_unit(form, ints, at, unit, x_at, x_step)
                                for v in range(0 if trellis else vectors):
                                    u = codes(form, at, unit, 8 * p + run * vectors + v)
                                    ints = register_tiles_int8.dots(
                                        ints, u, 0, x_at + 4 * v, x_step, bits
                                    )
                                if halves:
                                    scale = scale_of(form, at, s, one if one_d else d)
                                    part = register_tiles_int8.add_by_row(
                                        part, register_tiles_int8.floats(ints), scale, 0
                                    )
                                else:
                                    inner = register_tiles_int8.scaled(
                                        inner, ints, scale_of(form, at, s, d), 0, xs_at, xs_step
                                    )
                                if has_base:
                                    base = base_of(form, at, s, m)
                                    bases = register_tiles_int8.outer(bases, base, 0, y_at, y_step)
                                x_at += 4 * vectors
                                n_at += 4
                                y_at += 4
                            if halves:
                                inner = register_tiles_int8.add_by_token(
                                    inner, part, xs_at, xs_step
                                )
                            xs_at += 4
                    if one_d and halves:
                        total = register_tiles_int8.add_by_row(total, inner, d, 0)
                    else:
                        total = inner
                    at += block_bytes
                if has_base:
                    total = register_tiles_int8.add(total, bases)
                register_tiles_int8.store(simd.address(result), total)
                for t in range(min(tokens, n_tokens - first)):
                    sums_of = simd.load_f32(simd.address(result) + 64 * t)
                    epilogue(sums_of, bias, accumulate, out, first + t, group)

    return kernel
