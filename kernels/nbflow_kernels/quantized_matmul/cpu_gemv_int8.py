"""Products of packed weights and int8 activations.

A *piece* is what has one weight scale and one activation scale: 32 columns, or 16 where sub-blocks
have no more.  Its products are added as integers, exactly; then, in float32 and in this order,

    total = fma(integer sum of (code - zero) * q, scale * d, total)      for piece after piece
    bases = fma(base, d * sum of q, bases)                                the same, with a base

and the result is total + bases, plus the bias, plus the old output.  One row or many, any number of
threads and any processor: the same numbers in the same order.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles_int8, simd, simd_int8
from nbflow_kernels.cpu.simd_memory import prefetch
from nbflow_kernels.formats.decode_cpu import (
    base_of,
    codes,
    d_of,
    m_of,
    scale_of,
    unit_of,
)
from nbflow_kernels.formats.layout_cpu import CpuLayout
from nbflow_kernels.matmul.cpu_packed_outputs import epilogue

TOKENS = 4  # of a register tile of `gemm`, with 2 row groups
FEW = {4: 32, 8: 64}  # most tokens for `gemv`, by bits; 8 where codes take more to unpack
AHEAD_BYTES = 8192  # that `gemv` asks for before it comes to them
LINE = 64  # bytes of a cache line


def piece_vectors(form: CpuLayout) -> int:
    """Return how many code vectors (of 4 columns) make a piece."""
    return min(form.sub_block, 32) // 4


def kernel_for(form: CpuLayout, n_tokens: int) -> Any:
    """Return the kernel for a number of rows of activations."""
    if n_tokens > (8 if form.values is not None else FEW.get(form.bits, 8)):
        return gemm(form)
    if n_tokens == 1:
        return gemv(form, 1)
    return gemv(form, 4 if n_tokens <= 4 or 8 < n_tokens <= 12 else 8)


@functools.cache
def gemv(form: CpuLayout, tokens: int) -> Any:
    """Return the kernel that takes `tokens` rows at a time, of row groups [start, stop).

    Codes are taken from memory to registers and multiplied by these rows; further rows find the
    group in the cache.  There is one stream through the weights.  One row leaves the processor
    enough room to read ahead by itself.  With several, the products of a few pieces fill its
    window, and it would compute and wait in turn: memory is asked for `AHEAD_BYTES` before.
    """
    vectors, has_base, zero = piece_vectors(form), form.base != "none", np.int32(-form.zero)
    units, pieces, block_bytes = (
        form.block // form.unit,
        form.unit // 4 // vectors,
        form.block_bytes,
    )
    per_scale, several_d = form.sub_block // (4 * vectors), form.block != form.d_block
    halves, bits = 1 if vectors == 4 else 0, 8 if form.values is not None else form.bits
    lines = -(-block_bytes // (units * LINE)) if tokens > 1 else 0  # to ask for with each unit

    @jit.kernel
    def kernel(x, n_tokens, scales, sums, packed, n_blocks, bias, accumulate, out, start, stop):
        n_pieces = n_blocks * units * pieces
        room = (n_tokens + tokens - 1) // tokens * tokens
        starts = np.empty((room, n_pieces), np.int32)
        weighted = np.empty((room, n_pieces), np.float32)
        for t in range(room):
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
                total, bases = (
                    register_tiles_int8.zeros(1, tokens),
                    register_tiles_int8.zeros(1, tokens),
                )
                piece = 0
                for _ in range(n_blocks):
                    d, m = d_of(form, at, 0), m_of(form, at, 0)
                    for unit in range(units):
                        if first == 0:
                            for line in range(lines):
                                prefetch(at + AHEAD_BYTES + LINE * (lines * unit + line))
                        unit_at = unit_of(form, at, unit)
                        for p in range(pieces):
                            s = (unit * pieces + p) // per_scale
                            if several_d:
                                d, m = d_of(form, at, s), m_of(form, at, s)
                            ints = register_tiles_int8.starts(
                                1, tokens, starts_at + 4 * piece, n_step, 1
                            )
                            for v in range(vectors):
                                u = codes(form, unit_at, p * vectors + v)
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


@functools.cache
def gemm(form: CpuLayout) -> Any:
    """Return the kernel for many rows of activations and row groups [start, stop).

    The codes of two row groups are unpacked to bytes, then multiplied by `TOKENS` rows at a time.
    Meanwhile the next two are asked for: unpacking alone would wait for the memory.
    """
    vectors, has_base, zero = piece_vectors(form), form.base != "none", -form.zero
    units, pieces = form.block // form.unit, form.unit // 4 // vectors
    block_bytes = form.block_bytes
    per_scale, block = form.sub_block // (4 * vectors), form.block
    halves = 1 if vectors == 4 else 0
    bits = 8 if form.values is not None else form.bits
    lines = -(-2 * block_bytes // (units * pieces * LINE))  # of two row groups, with each piece

    @jit.kernel
    def kernel(x, n_tokens, scales, sums, packed, n_blocks, bias, accumulate, out, start, stop):
        n_pieces = n_blocks * block // (4 * vectors)
        w_step, s_step = n_pieces * vectors * 64, n_pieces * 64
        room = np.empty(2 * w_step + 64, np.uint8)
        scale_room = np.empty((4, n_pieces, 16), np.float32)
        result = np.empty((2 * TOKENS, 16), np.float32)
        x_step, d_step, n_step = x.strides[0], scales.strides[0], sums.strides[0]
        for first in range(start, stop, 2):
            # addresses are taken in the loop: an array lives until its last use by name
            w_room = (simd.address(room) + 63) // 64 * 64
            s_room = simd.address(scale_room)
            b_room = s_room + 2 * n_pieces * 64
            n_groups = min(2, stop - first)
            for g in range(n_groups):
                at = simd.address(packed) + (first + g) * n_blocks * block_bytes
                w_at, s_at, b_at = w_room + g * w_step, s_room + g * s_step, b_room + g * s_step
                for _ in range(n_blocks):
                    for unit in range(units):
                        unit_at = unit_of(form, at, unit)
                        for p in range(pieces):
                            s = (unit * pieces + p) // per_scale
                            simd.store_f32(s_at, scale_of(form, at, s, d_of(form, at, s)))
                            s_at += 64
                            if has_base:
                                simd.store_f32(b_at, base_of(form, at, s, m_of(form, at, s)))
                                b_at += 64
                            for v in range(vectors):
                                u = codes(form, unit_at, p * vectors + v)
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
                w_at = w_room
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
                        total, ints, s_room + 64 * piece, s_step, x_scale, d_step
                    )
                    if has_base:
                        bases = register_tiles_int8.based(
                            bases, b_room + 64 * piece, s_step, x_scale, d_step,
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
