"""CPU GEMM of block formats (q4_0, q4_k, ...) with int8 activations, codes unpacked once.

The order of additions is that of `cpu_gemv_int8`; as plain loops: `loops.int8`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles_int8, simd, simd_int8, simd_shuffle
from nbflow_kernels.cpu.simd_memory import (
    allocate,
    load_first,
    prefetch,
    prefetch_write,
    release,
)
from nbflow_kernels.formats.decode_cpu import base_of, codes, d_of, folded, m_of, scale_of
from nbflow_kernels.formats.layout_cpu import CpuLayout
from nbflow_kernels.matmul.cpu_packed_tiles import epilogue
from nbflow_kernels.quantized_matmul.cpu_gemv_int8 import LINE

TOKENS = 4


@jit.device_function
def prefetch_tile(out, token, group):
    """Prefetch the outputs of a tile: without, its writes wait for their cache lines."""
    at = simd.address(out) + token * out.strides[0] + 64 * group
    for _ in range(TOKENS):
        prefetch_write(at)
        prefetch_write(at + 64)
        at += out.strides[0]


@jit.device_function
def write_tile(sums, bias, accumulate, out, token, n_tokens, group, n_groups):
    """Write the outputs of a tile: sums, at an address, plus the bias, plus the old output."""
    at = simd.address(out) + token * out.strides[0] + 64 * group
    if n_groups == 2 and token + TOKENS <= n_tokens and 16 * (group + 2) <= out.shape[1]:
        total = register_tiles_int8.load_strided(2, TOKENS, sums, 64 * TOKENS, 64)
        if len(bias):
            bias_at = simd.address(bias) + 64 * group
            added = register_tiles_int8.load_strided(2, TOKENS, bias_at, 64, 0)
            total = register_tiles_int8.add(total, added)
        if accumulate:
            added = register_tiles_int8.load_strided(2, TOKENS, at, 64, out.strides[0])
            total = register_tiles_int8.add(total, added)
        register_tiles_int8.store_strided(at, 64, out.strides[0], total)
        return
    for g in range(n_groups):
        for t in range(min(TOKENS, n_tokens - token)):
            total_at = sums + 64 * (g * TOKENS + t)
            epilogue(simd.load_f32(total_at), bias, accumulate, out, token + t, group + g)


@jit.device_function
def write_starts(sums, n_rows, n, per_start, factor, to):
    """Write n int32 of each row: `factor` times the sum of `per_start` (1 or 2) of its sums.

    The last vector may go beyond the `n` numbers, by up to 60 bytes behind the last row.
    """
    for t in range(n_rows):
        at = simd.address(sums) + t * sums.strides[0]
        for i in range(0, n, 16):
            first = load_first(at + 4 * per_start * i, per_start * (n - i), 0.0)
            if per_start == 2:
                second = load_first(at + 8 * i + 64, 2 * (n - i) - 16, 0.0)
                even, odd = simd_shuffle.evens(first, second), simd_shuffle.odds(first, second)
                total = simd.add(simd.as_i32(even), simd.as_i32(odd))
            else:
                total = simd.as_i32(first)
            simd.store_i32(to + 4 * i, simd.mul(total, simd.splat_i32(factor)))
        to += 4 * n


@jit.device_function
def write_weighted(sums, scales, n_rows, n, per_scale, to):
    """Write scale * sum for n sums of each row; 1 or 2 share a scale.  As `write_starts`."""
    for t in range(n_rows):
        at = simd.address(sums) + t * sums.strides[0]
        scales_at = simd.address(scales) + t * scales.strides[0]
        for i in range(0, n, 16):
            total = simd.to_f32(simd.as_i32(load_first(at + 4 * i, n - i, 0.0)))
            scale = load_first(scales_at + 4 * (i // per_scale), (n - i) // per_scale, 0.0)
            if per_scale == 2:
                scale = simd_shuffle.twice_low(scale)
            simd.store_f32(to + 4 * i, simd.mul(scale, total))
        to += 4 * n


@functools.cache
def gemm(form: CpuLayout) -> Any:
    """Return the kernel for row groups [start, stop) and many rows of activations.

    The codes of two row groups are unpacked to bytes, then multiplied by `TOKENS` rows at a time,
    while the next two groups, a part with each tile, and the outputs are prefetched.

    Where a sub-block's integer scale times its codes fits in bytes (q2_k, q3_k), the codes are
    unpacked as these products: the dot product is then the sum over all 32 columns of a piece.
    """
    halves, one_d, has_base = form.sub_block == 16, form.one_d, form.base != "none"
    folded_zero = form.folded_zero
    folds = folded_zero is not None
    units, pieces, block_bytes = form.block // form.unit, form.block // 32, form.block_bytes
    runs = 2 if halves and not folds else 1  # of columns of a piece that one dot product adds
    vectors, sums_per_piece = 8 // runs, 2 if halves else 1
    unit_vectors, per_scale = form.unit // 4, form.sub_block // 4
    zero = form.zero if folded_zero is None else folded_zero
    per_start, negative_zero = sums_per_piece // runs, np.int32(-zero)
    bits = 8 if folds else form.operand_bits
    lines = -(-2 * block_bytes // (pieces * LINE))  # prefetched per piece

    @jit.kernel
    def kernel(x, n_tokens, scales, sums, packed, n_blocks, bias, accumulate, out, start, stop):
        n_pieces = n_blocks * pieces
        n_padded = (n_tokens + TOKENS - 1) // TOKENS * TOKENS
        w_step, s_step, d_step = n_pieces * 512, n_pieces * runs * 64, n_blocks * 64
        b_step = n_pieces * sums_per_piece * 64
        n_step = n_pieces * runs * 4 if zero else 0
        y_step = n_pieces * sums_per_piece * 4 if has_base else 0
        n_bytes = 2 * (w_step + s_step + d_step + b_step) + 128 * TOKENS
        memory = allocate(n_bytes + n_padded * (n_step + y_step) + 192)
        w_base = (memory + 63) // 64 * 64
        s_base = w_base + 2 * w_step
        d_base = s_base + 2 * s_step
        b_base = d_base + 2 * d_step
        result = b_base + 2 * b_step
        starts = result + 128 * TOKENS
        weighted = starts + n_padded * n_step + 64
        if zero:
            write_starts(sums, n_padded, n_pieces * runs, per_start, negative_zero, starts)
        if has_base:
            n_bases = n_pieces * sums_per_piece
            write_weighted(sums, scales, n_padded, n_bases, sums_per_piece, weighted)
        x_step, xs_step = x.strides[0], scales.strides[0]
        one = simd.splat(1.0)
        passes = n_padded // TOKENS
        for first in range(start, stop, 2):
            n_groups = min(2, stop - first)
            for g in range(n_groups):
                at = simd.address(packed) + (first + g) * n_blocks * block_bytes
                w_at, s_at, b_at = w_base + g * w_step, s_base + g * s_step, b_base + g * b_step
                d_at = d_base + g * d_step
                for _ in range(n_blocks):
                    if one_d:
                        simd.store_f32(d_at, d_of(form, at, 0))
                        d_at += 64
                    v = 0
                    for unit in range(units):
                        for i in range(unit_vectors):
                            s = v // per_scale
                            u = codes(form, at, unit, i)
                            if folds:
                                u = folded(form, at, s, u)
                            simd_int8.store_bytes(w_at, u)
                            w_at += 64
                            v += 1
                    for s in range(pieces * sums_per_piece):
                        sub = s if halves else 8 * s // per_scale
                        if not folds:
                            d = one if halves and one_d else d_of(form, at, sub)
                            simd.store_f32(s_at, scale_of(form, at, sub, d))
                            s_at += 64
                        if has_base:
                            simd.store_f32(b_at, base_of(form, at, sub, m_of(form, at, sub)))
                            b_at += 64
                    at += block_bytes
            if n_groups == 1:
                w_step = s_step = d_step = b_step = 0
            for token in range(0, n_tokens, TOKENS):
                x_at = simd.address(x) + token * x_step
                xs_at = simd.address(scales) + token * xs_step
                n_at = starts + token * n_step
                y_at = weighted + token * y_step
                total = register_tiles_int8.zeros(2, TOKENS)
                bases = register_tiles_int8.zeros(2, TOKENS)
                w_at, s_at, d_at, b_at = w_base, s_base, d_base, b_base
                prefetch_tile(out, token, first)
                next_at = simd.address(packed) + (first + 2) * n_blocks * block_bytes
                turn = token // TOKENS
                for _ in range(n_blocks):
                    inner = register_tiles_int8.zeros(2, TOKENS) if one_d and halves else total
                    for _ in range(pieces):
                        if turn == 0:
                            for line in range(lines):
                                prefetch(next_at + LINE * line)
                        next_at += LINE * lines
                        for t in range(TOKENS):
                            prefetch(x_at + (TOKENS + t) * x_step)
                        part = register_tiles_int8.zeros(2, TOKENS)
                        for run in range(runs):
                            ints = register_tiles_int8.starts(
                                2, TOKENS, n_at + 4 * run, n_step, zero != 0
                            )
                            for _ in range(vectors):
                                ints = register_tiles_int8.dots(
                                    ints, w_at, w_step, x_at, x_step, bits
                                )
                                w_at += 64
                                x_at += 4
                            if folds:
                                part = register_tiles_int8.floats(ints)
                            elif halves:
                                part = register_tiles_int8.add_by_row(
                                    part, register_tiles_int8.floats(ints), s_at, s_step
                                )
                            else:
                                inner = register_tiles_int8.scaled(
                                    inner, ints, s_at, s_step, xs_at, xs_step
                                )
                            s_at += 64
                        if halves:
                            inner = register_tiles_int8.add_by_token(inner, part, xs_at, xs_step)
                        if has_base:
                            for _ in range(sums_per_piece):
                                bases = register_tiles_int8.outer(bases, b_at, b_step, y_at, y_step)
                                b_at += 64
                                y_at += 4
                        xs_at += 4
                        n_at += 4 * runs
                    if one_d and halves:
                        total = register_tiles_int8.add_by_row(total, inner, d_at, d_step)
                        d_at += 64
                    else:
                        total = inner
                    turn = passes - 1 if turn == 0 else turn - 1
                if has_base:
                    total = register_tiles_int8.add(total, bases)
                register_tiles_int8.store(result, total)
                write_tile(result, bias, accumulate, out, token, n_tokens, first, n_groups)
        release(memory)

    return kernel
