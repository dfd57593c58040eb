"""CPU GEMM of block formats (q4_0, q4_k, ...) with int8 activations, codes unpacked once.

The order of additions is that of `cpu_gemv_int8`; as plain loops: `loops.int8`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles_int8, simd, simd_int8
from nbflow_kernels.cpu.simd_memory import prefetch
from nbflow_kernels.formats.decode_cpu import base_of, codes, d_of, m_of, scale_of
from nbflow_kernels.formats.layout_cpu import CpuLayout
from nbflow_kernels.matmul.cpu_packed_tiles import epilogue
from nbflow_kernels.quantized_matmul.cpu_gemv_int8 import LINE, piece_vectors

TOKENS = 4  # of a register tile, with 2 row groups


@functools.cache
def gemm(form: CpuLayout) -> Any:
    """Return the kernel for row groups [start, stop) and many rows of activations.

    The codes of two row groups are unpacked to bytes, then multiplied by `TOKENS` rows at a time,
    while the next two are prefetched.
    """
    vectors, has_base, zero = piece_vectors(form), form.base != "none", -form.zero
    units, pieces = form.block // form.unit, form.unit // 4 // vectors
    block_bytes = form.block_bytes
    per_scale, block = form.sub_block // (4 * vectors), form.block
    halves = 1 if vectors == 4 else 0
    bits = form.operand_bits
    lines = -(-2 * block_bytes // (units * pieces * LINE))  # prefetched per piece

    @jit.kernel
    def kernel(x, n_tokens, scales, sums, packed, n_blocks, bias, accumulate, out, start, stop):
        n_pieces = n_blocks * block // (4 * vectors)
        w_step, s_step = n_pieces * vectors * 64, n_pieces * 64
        code_buffer = np.empty(2 * w_step + 64, np.uint8)
        scale_buffer = np.empty((4, n_pieces, 16), np.float32)
        result = np.empty((2 * TOKENS, 16), np.float32)
        x_step, d_step, n_step = x.strides[0], scales.strides[0], sums.strides[0]
        for first in range(start, stop, 2):
            # taken in the loop: an array lives until its last use by name
            w_base = (simd.address(code_buffer) + 63) // 64 * 64
            s_base = simd.address(scale_buffer)
            b_base = s_base + 2 * n_pieces * 64
            n_groups = min(2, stop - first)
            for g in range(n_groups):
                at = simd.address(packed) + (first + g) * n_blocks * block_bytes
                w_at, s_at, b_at = w_base + g * w_step, s_base + g * s_step, b_base + g * s_step
                for _ in range(n_blocks):
                    for unit in range(units):
                        for p in range(pieces):
                            s = (unit * pieces + p) // per_scale
                            simd.store_f32(s_at, scale_of(form, at, s, d_of(form, at, s)))
                            s_at += 64
                            if has_base:
                                simd.store_f32(b_at, base_of(form, at, s, m_of(form, at, s)))
                                b_at += 64
                            for v in range(vectors):
                                u = codes(form, at, unit, p * vectors + v)
                                simd_int8.store_bytes(w_at, u)
                                w_at += 64
                    at += block_bytes
            if n_groups == 1:
                w_step = s_step = 0
            for token in range(0, n_tokens, TOKENS):
                x_at = simd.address(x) + token * x_step
                d_at = simd.address(scales) + token * d_step
                n_at = simd.address(sums) + token * n_step
                total = register_tiles_int8.zeros(2, TOKENS)
                bases = register_tiles_int8.zeros(2, TOKENS)
                w_at = w_base
                next_at = simd.address(packed) + (first + 2) * n_blocks * block_bytes
                for piece in range(n_pieces):
                    if token == 0:
                        for line in range(lines):
                            prefetch(next_at + LINE * (lines * piece + line))
                    ints = register_tiles_int8.starts(2, TOKENS, n_at + 4 * piece, n_step, zero)
                    for v in range(vectors):
                        ints = register_tiles_int8.dots(
                            ints, w_at + 64 * v, w_step, x_at + 4 * v, x_step, bits
                        )
                    x_scale = d_at + 4 * (piece >> halves)
                    total = register_tiles_int8.scaled(
                        total, ints, s_base + 64 * piece, s_step, x_scale, d_step
                    )
                    if has_base:
                        bases = register_tiles_int8.based(
                            bases, b_base + 64 * piece, s_step, x_scale, d_step,
                            n_at + 4 * piece, n_step,
                        )  # fmt: skip
                    w_at += 64 * vectors
                    x_at += 4 * vectors
                if has_base:
                    total = register_tiles_int8.add(total, bases)
                register_tiles_int8.store(simd.address(result), total)
                for g in range(n_groups):
                    for t in range(min(TOKENS, n_tokens - token)):
                        one = simd.load_f32(simd.address(result) + 64 * (g * TOKENS + t))
                        epilogue(one, bias, accumulate, out, token + t, first + g)

    return kernel
