"""GGML's formats below two bits, byte for byte: 8 weights -1, 0, 1 are one point of a grid.

All weights of a group of 8 are shifted by 1/8 or -1/8, so that none is 0: in eighths a weight is
one of -7 1 9 or of -9 -1 7.  Which eight may stand together is in `grids`.

``iq1_s``: 256 weights in 50 bytes, (2 + 32 + 16) * 8 / 256 = 1.5625 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       32     low 8 bits of the points, a byte for each group
34      16     a 16-bit integer for each 32 weights: bits 8..10 of the point of group l in bits
               3l .. 3l + 2, scale in bits 12..14, shift in bit 15 (1: -1/8)
======  =====  ==================================================================================

``iq1_m``: 256 weights in 56 bytes, (32 + 16 + 8) * 8 / 256 = 1.75 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       32     low 8 bits of the points, a byte for each group
32      16     a nibble for each group, the low ones first: bits 8..10 of the point in bits 0..2,
               shift in bit 3 (1: -1/8)
48      8      4 16-bit integers: the scales of weights 64r + 16j .. 64r + 16j + 15 in bits
               3j .. 3j + 2 of integer r; bits 4r .. 4r + 3 of d (float16) in its bits 12..15
======  =====  ==================================================================================

weight = d * (2 * scale + 1) / 8 * eighths, scale 0..7.

Source: GGML, ggml-common.h (block_iq1_s, block_iq1_m) and ggml-quants.c (dequantize_row_iq1_s,
dequantize_row_iq1_m).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.bit_fields import nibble, pack_fields, unpack_fields
from nbflow_kernels.formats.block_format import BlockFormat, Scales, decode_rows, half_steps
from nbflow_kernels.formats.codec_spec import CodecSpec
from nbflow_kernels.formats.ggml.iq_grids import GRID_IQ1, OnGrid, coordinates, grid_fields
from nbflow_kernels.formats.registry import Bytes, Floats

# code = coordinate | shift << 2, in eighths; coordinate 3 does not occur
VALUES = (-7, 1, 9, 0, -9, -1, 7, 0)


@jit.device_function(inline="always")
def _high(row, at, s):
    """Return the 16-bit little-endian integer `s` from byte `at` on."""
    return np.int64(row[at + 2 * s]) | (np.int64(row[at + 2 * s + 1]) << 8)


@jit.device_function(inline="always")
def code_iq1_s(row, at, i, grid):
    """Return code `i` of the block at byte `at`."""
    high = _high(row, at + 34, i >> 5)
    point = np.int64(row[at + 2 + (i >> 3)]) | (((high >> (3 * ((i >> 3) & 3))) & 7) << 8)
    return ((grid[point] >> (2 * (i & 7))) & 3) | (high >> 15 << 2)


@jit.device_function(inline="always")
def scale_iq1_s(row, at, s):
    """Return the scale of sub-block `s` of the block at byte `at`."""
    return 2 * ((_high(row, at + 34, s) >> 12) & 7) + 1


@jit.device_function(inline="always")
def code_iq1_m(row, at, i, grid):
    """Return code `i` of the block at byte `at`."""
    high = np.int64(nibble(row, at + 32, i >> 3))
    point = np.int64(row[at + (i >> 3)]) | ((high & 7) << 8)
    return ((grid[point] >> (2 * (i & 7))) & 3) | (high >> 3 << 2)


@jit.device_function(inline="always")
def scale_iq1_m(row, at, s):
    """Return the scale of sub-block `s` of the block at byte `at`."""
    return 2 * ((_high(row, at + 48, s >> 2) >> (3 * (s & 3))) & 7) + 1


@jit.device_function(inline="always")
def d_bits_iq1_m(row, at):
    """Return the bits of the float16 `d` of the block at byte `at`: the top of its four words."""
    bits = np.int64(0)
    for s in range(4):
        bits |= _high(row, at + 48, s) >> 12 << (4 * s)
    return bits


@jit.kernel
def _iq1_s(data, grid, codes, scales, start, stop):
    decode_rows(code_iq1_s, scale_iq1_s, 256, 8, 50, data, grid, codes, scales, start, stop)


@jit.kernel
def _iq1_m(data, grid, codes, scales, start, stop):
    decode_rows(code_iq1_m, scale_iq1_m, 256, 16, 56, data, grid, codes, scales, start, stop)


def _unpack_iq1_s(blocks: Bytes) -> tuple[Bytes, Scales]:
    high = np.ascontiguousarray(blocks[:, 34:]).view("<u2")  # (n, 8)
    threes = (high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)).reshape(-1, 32)
    points = blocks[:, 2:34] | ((threes & np.uint16(7)) << 8)
    shifts = np.repeat((high >> 15).astype(np.uint8), 32, axis=1)
    scales = 2 * ((high >> 12) & np.uint16(7)).astype(np.int16) + 1
    return coordinates(GRID_IQ1, points, 8) | (shifts << 2), scales


def _unpack_iq1_m(blocks: Bytes) -> tuple[Bytes, Scales]:
    high = unpack_fields(blocks[:, 32:48], 4)
    points = blocks[:, :32] | ((high & 7).astype(np.uint16) << 8)
    words = np.ascontiguousarray(blocks[:, 48:]).view("<u2")  # (n, 4)
    scales = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)).reshape(-1, 16) & 7
    shifts = np.repeat(high >> 3, 8, axis=1)
    return coordinates(GRID_IQ1, points, 8) | (shifts << 2), 2 * scales.astype(np.int16) + 1


def _steps_iq1_m(blocks: Bytes) -> Floats:
    words = np.ascontiguousarray(blocks[:, 48:]).view("<u2") >> 12
    bits = np.bitwise_or.reduce(words << np.arange(0, 16, 4, dtype=np.uint16), axis=1)
    d: Floats = bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return d


def blocks_iq1_s(rows: OnGrid) -> Bytes:
    """Return rows of bytes of `iq1_s`."""
    points = rows.points.reshape(-1, 8, 4)
    words = rows.scales.reshape(-1, 8).astype(np.uint16) << 12
    words |= rows.signs.reshape(-1, 8, 4)[:, :, 0].astype(np.uint16) << 15
    for i in range(4):
        words |= points[:, :, i] >> 8 << 3 * i
    low = points.reshape(-1, 32).astype(np.uint8)
    parts = [rows.d.reshape(-1, 1).view(np.uint8), low, words.view(np.uint8)]
    return np.hstack(parts).reshape(len(rows.d), -1)


def blocks_iq1_m(rows: OnGrid) -> Bytes:
    """Return rows of bytes of `iq1_m`."""
    points, scales = rows.points.reshape(-1, 32), rows.scales.reshape(-1, 4, 4).astype(np.uint16)
    high = (points >> 8).astype(np.uint8) | (rows.signs.reshape(-1, 32) << 3)
    words = (rows.d.reshape(-1, 1) >> np.arange(0, 16, 4, dtype=np.uint16)) << 12
    for i in range(4):
        words |= scales[:, :, i] << 3 * i
    parts = [points.astype(np.uint8), pack_fields(high, 4), words.astype(np.uint16).view(np.uint8)]
    return np.hstack(parts).reshape(len(rows.d), -1)


IQ1_S = BlockFormat(
    name="iq1_s",
    block_size=256,
    block_bytes=50,
    form=CodecSpec(block=256, sub_block=32, code_bits=3, values=VALUES, factor=0.125, scales=True),
    unpack=_unpack_iq1_s,
    steps=half_steps(0),
    kernel=_iq1_s,
    code=code_iq1_s,
    scale=scale_iq1_s,
    table=GRID_IQ1,
    fields=grid_fields(32, 11, 8, blocks_iq1_s, scale_bits=3, sign_bits=1),
)

IQ1_M = BlockFormat(
    name="iq1_m",
    block_size=256,
    block_bytes=56,
    form=replace(IQ1_S.form, sub_block=16),
    unpack=_unpack_iq1_m,
    steps=_steps_iq1_m,
    kernel=_iq1_m,
    code=code_iq1_m,
    scale=scale_iq1_m,
    d_bits=d_bits_iq1_m,
    table=GRID_IQ1,
    fields=grid_fields(32, 11, 16, blocks_iq1_m, scale_bits=3, sign_bits=1),
)
