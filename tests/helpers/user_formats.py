"""Formats as users write them, for the tests."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.formats.block_bytes import get_f16, put_f16
from nbflow_kernels.formats.codec_spec import CodecSpec


class Base3:
    """-1, 0 or 1 times a scale; five weights in a byte.  The block fits no vector."""

    name = "base3_b20"
    block_size = 20
    block_bytes = 6

    @staticmethod
    def quantize_block(x, out):
        put_f16(out, 0, 1.53 * np.abs(x).mean())  # the best step for a Gaussian: 1.22 sigma
        half = get_f16(out, 0) / 2
        for j in range(4):
            code = 0
            for i in range(5 * j, 5 * j + 5):
                code = 3 * code + 1 + int(x[i] > half) - int(x[i] < -half)
            out[2 + j] = code

    @staticmethod
    def dequantize_block(block, out):
        scale = get_f16(block, 0)
        for j in range(4):
            code = int(block[2 + j])
            for i in range(5 * j + 4, 5 * j - 1, -1):
                out[i] = scale * (code % 3 - 1)
                code //= 3


def _quantize(x, out):
    low, high = x.min(), x.max()
    put_f16(out, 0, (low if -low > high else high) / -8)
    scale = get_f16(out, 0)
    inverse = 0.0 if scale == 0 else 1 / scale
    for i in range(16):
        a = min(max(int(np.floor(x[i] * inverse + 8.5)), 0), 15)
        b = min(max(int(np.floor(x[16 + i] * inverse + 8.5)), 0), 15)
        out[2 + i] = a | b << 4


class _Q4:
    """The bytes of GGML's q4_0."""

    block_size = 32
    block_bytes = 18
    quantize_block = staticmethod(_quantize)

    @staticmethod
    def dequantize_block(block, out):
        scale = get_f16(block, 0)
        for i in range(32):
            out[i] = scale * (((block[2 + i % 16] >> (i // 16 * 4)) & 15) - 8)


class NoForm(_Q4):
    """GGML's q4_0 without saying that it has integers; its quantizer knows importance."""

    name = "noform_b32"

    @staticmethod
    def quantize_block_weighted(x, weight, out):
        best = np.inf
        block = np.zeros(18, np.uint8)
        for step in range(-8, 9):
            top = np.abs(x).max()
            put_f16(block, 0, top / (8 + 0.5 * step))
            scale = get_f16(block, 0)
            error = 0.0
            for i in range(32):
                code = 8 if scale == 0 else min(max(int(np.floor(x[i] / scale + 8.5)), 0), 15)
                shift = i // 16 * 4
                keep = block[2 + i % 16] & (240 >> shift)
                block[2 + i % 16] = keep | code << shift
                error += weight[i] * (scale * (code - 8) - x[i]) ** 2
            if error < best:
                best = error
                out[:] = block


class Nibbles(_Q4):
    """The same bytes, with their integer form."""

    name = "nibbles_b32"
    integer_form = CodecSpec(block=32, sub_block=32, code_bits=4, zero=8)

    @staticmethod
    def code(block, i):
        return (block[2 + i % 16] >> (i // 16 * 4)) & 15

    @staticmethod
    def d(block, j):
        return get_f16(block, 0)
