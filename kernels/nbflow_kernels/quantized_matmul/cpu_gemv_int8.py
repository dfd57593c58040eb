"""CPU GEMV of block formats (q4_0, q4_k, ...) with int8 activations, 1, 4 or 8 rows at a time.

A *piece* is the columns that share one weight scale and one activation scale: 32, or 16 where
sub-blocks have no more.  Its products are added as integers, exactly; then, in float32,

    total = fma(integer sum of (code - zero) * q, scale * d, total)      piece after piece
    bases = fma(base, d * sum of q, bases)                               the same, with a base

and the result is total + bases, plus the bias, plus the old output.  The order is the same for one
row or many, for any number of threads and on any processor.  As plain loops: `loops.int8`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles_int8, simd
from nbflow_kernels.cpu.simd_memory import prefetch_lines
from nbflow_kernels.formats.decode_cpu import base_of, codes, d_of, m_of, scale_of
from nbflow_kernels.formats.layout_cpu import CpuLayout
from nbflow_kernels.matmul.cpu_packed_tiles import epilogue

PREFETCH_BYTES = 4096  # distance ahead
LINE = 64  # bytes of a cache line


def piece_vectors(form: CpuLayout) -> int:
    """Return the code vectors (of 4 columns) in a piece."""
    return min(form.sub_block, 32) // 4


@functools.cache
def gemv(form: CpuLayout, tokens: int) -> Any:
    """Return the kernel for row groups [start, stop), which multiplies `tokens` rows at a time.

    Codes go from memory to registers; further rows of activations find the group in the cache.
    Weights are read as one stream, prefetched `PREFETCH_BYTES` ahead: the instructions of two to
    four pieces fill the processor's reorder window, so that its own loads are seldom early enough.
    """
    vectors, has_base, zero = piece_vectors(form), form.base != "none", np.int32(-form.zero)
    units, pieces = form.block // form.unit, form.unit // 4 // vectors
    block_bytes = form.block_bytes
    per_scale, several_d = form.sub_block // (4 * vectors), form.block != form.d_block
    halves, bits = 1 if vectors == 4 else 0, form.operand_bits
    share = block_bytes // (units * pieces)  # bytes prefetched with each piece
    lines = -(-share // LINE)

    @jit.kernel
    def kernel(x, n_tokens, scales, sums, packed, n_blocks, bias, accumulate, out, start, stop):
        n_pieces = n_blocks * units * pieces
        n_padded = (n_tokens + tokens - 1) // tokens * tokens
        starts = np.empty((n_padded, n_pieces), np.int32)
        weighted = np.empty((n_padded, n_pieces), np.float32)
        for t in range(n_padded):
            for i in range(n_pieces):
                starts[t, i] = zero * sums[t, i]
                weighted[t, i] = scales[t, i >> halves] * np.float32(sums[t, i])
        result = np.empty((tokens, 16), np.float32)
        x_step, d_step, n_step = x.strides[0], scales.strides[0], 4 * n_pieces
        for group in range(start, stop):
            for first in range(0, n_tokens, tokens):
                at = simd.address(packed) + group * n_blocks * block_bytes
                x_at, d_at = simd.address(x) + first * x_step, simd.address(scales) + first * d_step
                starts_at = simd.address(starts) + first * n_step
                weighted_at = simd.address(weighted) + first * n_step
                total = bases = register_tiles_int8.zeros(1, tokens)
                piece = 0
                ahead = at + PREFETCH_BYTES if first == 0 else at
                for _ in range(n_blocks):
                    d, m = d_of(form, at, 0), m_of(form, at, 0)
                    for unit in range(units):
                        for p in range(pieces):
                            prefetch_lines(ahead, lines)
                            ahead += share
                            s = (unit * pieces + p) // per_scale
                            if several_d:
                                d, m = d_of(form, at, s), m_of(form, at, s)
                            ints = register_tiles_int8.starts(
                                1, tokens, starts_at + 4 * piece, n_step, 1
                            )
                            for v in range(vectors):
                                u = codes(form, at, unit, p * vectors + v)
                                ints = register_tiles_int8.dots(
                                    ints, u, 0, x_at + 4 * v, x_step, bits
                                )
                            scale, x_scale = scale_of(form, at, s, d), d_at + 4 * (piece >> halves)
                            total = register_tiles_int8.scaled(
                                total, ints, scale, 0, x_scale, d_step
                            )
                            if has_base:
                                base = base_of(form, at, s, m)
                                bases = register_tiles_int8.outer(
                                    bases, base, 0, weighted_at + 4 * piece, n_step
                                )
                            x_at += 4 * vectors
                            piece += 1
                    at += block_bytes
                if has_base:
                    total = register_tiles_int8.add(total, bases)
                register_tiles_int8.store(simd.address(result), total)
                for t in range(min(tokens, n_tokens - first)):
                    one = simd.load_f32(simd.address(result) + 64 * t)
                    epilogue(one, bias, accumulate, out, first + t, group)

    return kernel
