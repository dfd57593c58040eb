"""GGML's 3-bit formats on grids, byte for byte: 4 magnitudes are one point of a grid.

Which four may stand together is in `grids`.  256 weights share d, 32 a scale; a quad is 4 weights.

``iq3_xxs``: 256 weights in 98 bytes, (2 + 64 + 32) * 8 / 256 = 3.0625 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       64     points, a byte for each quad
66      32     a 32-bit integer for each 32 weights: signs of weights 8l .. 8l + 6 of these in bits
               7l .. 7l + 6, scale in bits 28..31
======  =====  ==================================================================================

Only 7 signs of 8 are stored: the eighth makes the number of negative ones even.  The magnitude is
one of 4 12 20 28 36 44 52 62.

weight = d * (2 * scale + 1) / 4 * (+-magnitude), scale 0..15.

``iq3_s``: 256 weights in 110 bytes, (2 + 64 + 8 + 32 + 4) * 8 / 256 = 3.4375 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       64     low 8 bits of the points, a byte for each quad
66      8      bit 8 of the points: quad 8r + j in bit j of byte r
74      32     signs: weight 8r + j in bit j of byte r
106     4      scales: weights 64r .. 64r + 31 in the low nibble of byte r, the next 32 in the high
======  =====  ==================================================================================

weight = d * (2 * scale + 1) * (+-magnitude), magnitude 1 3 5 7 9 11 13 15, scale 0..15.

Source: GGML, ggml-common.h (block_iq3_xxs, block_iq3_s) and ggml-quants.c (dequantize_row_iq3_xxs,
dequantize_row_iq3_s).
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.bit_fields import bit, nibble, pack_fields, unpack_fields
from nbflow_kernels.formats.block_format import BlockFormat, Scales, decode_rows, half_steps
from nbflow_kernels.formats.codec_spec import CodecSpec
from nbflow_kernels.formats.ggml.iq_grids import (
    GRID_IQ3_S,
    GRID_IQ3_XXS,
    OnGrid,
    coordinates,
    grid_fields,
    sign_bits,
    sign_of_seven,
    signs_of_seven,
    word,
)
from nbflow_kernels.formats.registry import Bytes

# code = magnitude | sign << 3
VALUES_XXS = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
VALUES_S = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
MAGNITUDES_XXS = tuple(v / 4 for v in VALUES_XXS[:8])
MAGNITUDES_S = tuple(float(v) for v in VALUES_S[:8])


@jit.device_function(inline="always")
def code_iq3_xxs(row, at, i, grid):
    """Return code `i` of the block at byte `at`."""
    signs = (word(row, at + 66 + 4 * (i >> 5)) >> (7 * ((i >> 3) & 3))) & 127
    magnitude = (grid[row[at + 2 + (i >> 2)]] >> (3 * (i & 3))) & 7
    return magnitude | (sign_of_seven(signs, i & 7) << 3)


@jit.device_function(inline="always")
def scale_iq3_xxs(row, at, s):
    """Return the scale of sub-block `s` of the block at byte `at`."""
    return 2 * (row[at + 69 + 4 * s] >> 4) + 1


@jit.device_function(inline="always")
def code_iq3_s(row, at, i, grid):
    """Return code `i` of the block at byte `at`."""
    quad = i >> 2
    point = np.int64(row[at + 2 + quad]) | (np.int64(bit(row, at + 66, quad)) << 8)
    return ((grid[point] >> (3 * (i & 3))) & 7) | (bit(row, at + 74, i) << 3)


@jit.device_function(inline="always")
def scale_iq3_s(row, at, s):
    """Return the scale of sub-block `s` of the block at byte `at`."""
    return 2 * nibble(row, at + 106, s) + 1


@jit.kernel
def _iq3_xxs(data, grid, codes, scales, start, stop):
    decode_rows(code_iq3_xxs, scale_iq3_xxs, 256, 8, 98, data, grid, codes, scales, start, stop)


@jit.kernel
def _iq3_s(data, grid, codes, scales, start, stop):
    decode_rows(code_iq3_s, scale_iq3_s, 256, 8, 110, data, grid, codes, scales, start, stop)


def _unpack_iq3_xxs(blocks: Bytes) -> tuple[Bytes, Scales]:
    words = np.ascontiguousarray(blocks[:, 66:]).view("<u4")  # (n, 8)
    shifts = np.arange(0, 28, 7, dtype=np.uint32)
    signs = (words[:, :, None] >> shifts).reshape(-1, 32) & np.uint32(127)
    codes = coordinates(GRID_IQ3_XXS, blocks[:, 2:66], 4) | (signs_of_seven(signs) << 3)
    return codes, 2 * (words >> 28).astype(np.int16) + 1


def _unpack_iq3_s(blocks: Bytes) -> tuple[Bytes, Scales]:
    points = blocks[:, 2:66] | (unpack_fields(blocks[:, 66:74], 1).astype(np.uint16) << 8)
    codes = coordinates(GRID_IQ3_S, points, 4) | (sign_bits(blocks[:, 74:106]) << 3)
    return codes, 2 * unpack_fields(blocks[:, 106:], 4).astype(np.int16) + 1


def blocks_iq3_xxs(rows: OnGrid) -> Bytes:
    """Return rows of bytes of `iq3_xxs`."""
    words = rows.scales.reshape(-1, 8).astype(np.uint32) << 28
    signs = rows.signs.reshape(-1, 8, 4).astype(np.uint32) & 127
    for i in range(4):
        words |= signs[:, :, i] << (7 * i)
    points = rows.points.reshape(-1, 64).astype(np.uint8)
    parts = [rows.d.reshape(-1, 1).view(np.uint8), points, words.view(np.uint8)]
    return np.hstack(parts).reshape(len(rows.d), -1)


def blocks_iq3_s(rows: OnGrid) -> Bytes:
    """Return rows of bytes of `iq3_s`."""
    points = rows.points.reshape(-1, 64)
    low, high = points.astype(np.uint8), pack_fields((points >> 8).astype(np.uint8), 1)
    scales = pack_fields(rows.scales.reshape(-1, 8), 4)
    d = rows.d.reshape(-1, 1).view(np.uint8)
    return np.hstack([d, low, high, rows.signs.reshape(-1, 32), scales]).reshape(len(rows.d), -1)


IQ3_XXS = BlockFormat(
    name="iq3_xxs",
    block_size=256,
    block_bytes=98,
    form=CodecSpec(
        block=256, sub_block=32, code_bits=4, values=VALUES_XXS, factor=0.25, scales=True
    ),
    unpack=_unpack_iq3_xxs,
    steps=half_steps(0),
    kernel=_iq3_xxs,
    code=code_iq3_xxs,
    scale=scale_iq3_xxs,
    table=GRID_IQ3_XXS,
    fields=grid_fields(64, 8, 8, blocks_iq3_xxs),
)

IQ3_S = BlockFormat(
    name="iq3_s",
    block_size=256,
    block_bytes=110,
    form=CodecSpec(block=256, sub_block=32, code_bits=4, values=VALUES_S, scales=True),
    unpack=_unpack_iq3_s,
    steps=half_steps(0),
    kernel=_iq3_s,
    code=code_iq3_s,
    scale=scale_iq3_s,
    table=GRID_IQ3_S,
    fields=grid_fields(64, 9, 8, blocks_iq3_s),
)
