"""Quantized matrix products as plain loops, with the kernels' order of additions.

`int8` and, for sub-blocks of 16 columns, `int8_sub_blocks_of_16` are the loops of `cpu_gemv_int8`
and `cpu_gemm_int8`, `quantize_row` that of `int8_activations`.  With float32 activations
(`cpu_gemv_f32`, `cpu_gemm_f32_bf16`) weights are
dequantized in registers, rounded once each, and added as in
`nbflow_kernels.matmul.loops.interleaved`.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.scalar_math import fma


@jit.kernel(strict=True)
def read_code(unit, fields, row, column):
    """Return a code from the packed bytes of a unit (columns) of 16 rows.

    Byte ``4 * row + column % 4`` of a word vector holds bits of the code.  `fields` is the table
    `formats.layout_cpu.FIELDS` of the format's bits: code vector, first bit, bits, word, place.
    """
    code = 0
    for i in range(len(fields)):
        vector, bit, bits, word, place = fields[i]
        if vector == column // 4:
            byte = np.int64(unit[64 * word + 4 * row + column % 4])
            code |= (byte >> place & (1 << bits) - 1) << bit
    return code


@jit.kernel(strict=True)
def quantize_row(x, codes, scales):
    """Quantize a row of ordinary numbers to int8; 32 columns share a scale."""
    for b in range(len(scales)):
        largest = np.float32(0.0)
        for k in range(32 * b, 32 * b + 32):
            largest = max(largest, abs(x[k]))
        scales[b] = largest / np.float32(127.0)
        for k in range(32 * b, 32 * b + 32):
            codes[k] = np.int8(np.rint(x[k] * (np.float32(127.0) / largest)))


@jit.kernel(strict=True)
def int8(values, scales, bases, codes, x_scales, out):
    """Multiply int8 activations (T, K) by weights scale * value + base; `values` is (N, K).

    `scales` and `bases` are (N, K / 32): sub-blocks have 32 columns, or a multiple.
    """
    for t in range(codes.shape[0]):
        for n in range(values.shape[0]):
            total = base_total = np.float32(0.0)
            for piece in range(scales.shape[1]):
                products, count = add_products(values[n], codes[t], 32 * piece, 32)
                x = x_scales[t, piece]
                total = fma(np.float32(products), scales[n, piece] * x, total)
                base_total = fma(bases[n, piece], x * np.float32(count), base_total)
            out[t, n] = total + base_total


@jit.kernel(strict=True)
def int8_sub_blocks_of_16(values, scales, d, bases, codes, x_scales, out):
    """Multiply int8 activations by weights d * scale * value + base.

    `scales` and `bases` are (N, K / 16), `d` (N, blocks).  Scales are integers, or d is 1 and the
    row one block.
    """
    for t in range(codes.shape[0]):
        for n in range(values.shape[0]):
            total = base_total = np.float32(0.0)
            for block in range(d.shape[1]):
                inner = np.float32(0.0)
                pieces = x_scales.shape[1] // d.shape[1]
                for piece in range(block * pieces, (block + 1) * pieces):
                    x, part = x_scales[t, piece], np.float32(0.0)
                    for s in (2 * piece, 2 * piece + 1):
                        products, count = add_products(values[n], codes[t], 16 * s, 16)
                        part = fma(np.float32(products), scales[n, s], part)
                        base_total = fma(bases[n, s], x * np.float32(count), base_total)
                    inner = fma(part, x, inner)
                total = fma(inner, d[n, block], total)
            out[t, n] = total + base_total


@jit.device_function
def add_products(values, codes, first, count):
    """Return the sum of products, and that of codes, of some columns."""
    products, sum_of_codes = 0, 0
    for k in range(first, first + count):
        products += np.int64(values[k]) * codes[k]
        sum_of_codes += codes[k]
    return products, sum_of_codes
