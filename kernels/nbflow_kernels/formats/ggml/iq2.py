"""GGML's 2-bit formats on grids, byte for byte: 8 magnitudes are one point of a grid.

A magnitude is 8, 25 or 43; which eight may stand together is in `grids`.  256 weights share d; a
group is 8 weights.

``iq2_xxs``: 256 weights in 66 bytes, (2 + 64) * 8 / 256 = 2.0625 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       64     8 bytes for each 32 weights: 4 bytes with the points of the 4 groups, and a 32-bit
               integer: signs of group l in bits 7l .. 7l + 6, scale in bits 28..31
======  =====  ==================================================================================

Only 7 signs are stored: the eighth makes the number of negative ones even.

``iq2_xs``: 256 weights in 74 bytes, (2 + 64 + 8) * 8 / 256 = 2.3125 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       64     a 16-bit integer for each group: point in bits 0..8, 7 signs in bits 9..15
66      8      scales: weights 32r .. 32r + 15 in the low nibble of byte r, the next 16 in the high
======  =====  ==================================================================================

``iq2_s``: 256 weights in 82 bytes, (2 + 32 + 32 + 8 + 8) * 8 / 256 = 2.5625 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       32     low 8 bits of the points, a byte for each group
34      32     signs, a byte for each group: weight j in bit j
66      8      bits 8, 9 of the points: group 4r + j in bits 2j, 2j + 1 of byte r
74      8      scales: weights 32r .. 32r + 15 in the low nibble of byte r, the next 16 in the high
======  =====  ==================================================================================

weight = d * (2 * scale + 1) / 8 * (+-magnitude), scale 0..15.

Source: GGML, ggml-common.h (block_iq2_xxs to block_iq2_s, ksigns_iq2xs) and ggml-quants.c
(dequantize_row_iq2_xxs to dequantize_row_iq2_s).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.bit_fields import bit, nibble, pack_fields, unpack_fields
from nbflow_kernels.formats.block_format import BlockFormat, Scales, decode_rows, half_steps
from nbflow_kernels.formats.codec_spec import CodecSpec
from nbflow_kernels.formats.ggml.iq_grids import (
    GRID_IQ2_S,
    GRID_IQ2_XS,
    GRID_IQ2_XXS,
    Grid,
    OnGrid,
    coordinates,
    grid_fields,
    sign_bits,
    sign_of_seven,
    signs_of_seven,
    word,
)
from nbflow_kernels.formats.registry import Bytes

# code = magnitude | sign << 2; magnitude code 3 does not occur
VALUES = (8, 25, 43, 0, -8, -25, -43, 0)
MAGNITUDES = (8 / 8, 25 / 8, 43 / 8)


@jit.device_function(inline="always")
def code_iq2_xxs(row, at, i, grid):
    """Return code `i` of the block at byte `at`."""
    base, group, j = at + 2 + 8 * (i >> 5), (i >> 3) & 3, i & 7
    sign = sign_of_seven((word(row, base + 4) >> (7 * group)) & 127, j)
    return ((grid[row[base + group]] >> (2 * j)) & 3) | (sign << 2)


@jit.device_function(inline="always")
def scale_iq2_xxs(row, at, s):
    """Return the scale of sub-block `s` of the block at byte `at`."""
    return 2 * (row[at + 9 + 8 * s] >> 4) + 1


@jit.device_function(inline="always")
def code_iq2_xs(row, at, i, grid):
    """Return code `i` of the block at byte `at`."""
    base, j = at + 2 + 2 * (i >> 3), i & 7
    high = np.int64(row[base + 1])
    point = np.int64(row[base]) | ((high & 1) << 8)
    return ((grid[point] >> (2 * j)) & 3) | (sign_of_seven(high >> 1, j) << 2)


@jit.device_function(inline="always")
def scale_iq2_xs(row, at, s):
    """Return the scale of sub-block `s` of the block at byte `at`."""
    return 2 * nibble(row, at + 66, s) + 1


@jit.device_function(inline="always")
def code_iq2_s(row, at, i, grid):
    """Return code `i` of the block at byte `at`."""
    group, j = i >> 3, i & 7
    high = (np.int64(row[at + 66 + (group >> 2)]) >> (2 * (group & 3))) & 3
    point = np.int64(row[at + 2 + group]) | (high << 8)
    return ((grid[point] >> (2 * j)) & 3) | (bit(row, at + 34, i) << 2)


@jit.device_function(inline="always")
def scale_iq2_s(row, at, s):
    """Return the scale of sub-block `s` of the block at byte `at`."""
    return 2 * nibble(row, at + 74, s) + 1


@jit.kernel
def _iq2_xxs(data, grid, codes, scales, start, stop):
    decode_rows(code_iq2_xxs, scale_iq2_xxs, 256, 8, 66, data, grid, codes, scales, start, stop)


@jit.kernel
def _iq2_xs(data, grid, codes, scales, start, stop):
    decode_rows(code_iq2_xs, scale_iq2_xs, 256, 16, 74, data, grid, codes, scales, start, stop)


@jit.kernel
def _iq2_s(data, grid, codes, scales, start, stop):
    decode_rows(code_iq2_s, scale_iq2_s, 256, 16, 82, data, grid, codes, scales, start, stop)


def _codes(grid: Grid, points: Any, signs: Bytes) -> Bytes:
    """Return codes of points (n, groups) and sign bits (n, weights)."""
    codes: Bytes = coordinates(grid, points, 8) | (signs << np.uint8(2))
    return codes


def _odd(scales: Bytes) -> Scales:
    """Return 2 * scale + 1."""
    return 2 * scales.astype(np.int16) + 1


def _unpack_iq2_xxs(blocks: Bytes) -> tuple[Bytes, Scales]:
    parts = np.ascontiguousarray(blocks[:, 2:]).reshape(-1, 8, 8)
    words = np.ascontiguousarray(parts[:, :, 4:]).view("<u4")  # (n, 8, 1)
    signs = (words >> np.arange(0, 28, 7, dtype=np.uint32)).reshape(-1, 32) & np.uint32(127)
    points = parts[:, :, :4].reshape(-1, 32)
    scales = _odd((words[:, :, 0] >> 28).astype(np.uint8))
    return _codes(GRID_IQ2_XXS, points, signs_of_seven(signs)), scales


def _unpack_iq2_xs(blocks: Bytes) -> tuple[Bytes, Scales]:
    groups = np.ascontiguousarray(blocks[:, 2:66]).view("<u2")
    codes = _codes(GRID_IQ2_XS, groups & np.uint16(511), signs_of_seven(groups >> 9))
    return codes, _odd(unpack_fields(blocks[:, 66:], 4))


def _unpack_iq2_s(blocks: Bytes) -> tuple[Bytes, Scales]:
    high = unpack_fields(blocks[:, 66:74], 2).astype(np.uint16)
    points = blocks[:, 2:34] | (high << 8)
    codes = _codes(GRID_IQ2_S, points, sign_bits(blocks[:, 34:66]))
    return codes, _odd(unpack_fields(blocks[:, 74:], 4))


def _d(rows: OnGrid) -> Bytes:
    return rows.d.reshape(-1, 1).view(np.uint8)


def blocks_iq2_xxs(rows: OnGrid) -> Bytes:
    """Return rows of bytes of `iq2_xxs`."""
    words = rows.scales.reshape(-1, 8).astype(np.uint32) << 28
    signs = rows.signs.reshape(-1, 8, 4).astype(np.uint32) & 127
    for i in range(4):
        words |= signs[:, :, i] << (7 * i)
    points = rows.points.reshape(-1, 8, 4).astype(np.uint8)
    parts = np.concatenate([points, words.reshape(-1, 8, 1).view(np.uint8)], axis=2)
    return np.hstack([_d(rows), parts.reshape(-1, 64)]).reshape(len(rows.d), -1)


def blocks_iq2_xs(rows: OnGrid) -> Bytes:
    """Return rows of bytes of `iq2_xs`."""
    groups = rows.points | (rows.signs.astype(np.uint16) << 9)
    parts = [_d(rows), groups.reshape(-1, 32).view(np.uint8)]
    return np.hstack([*parts, pack_fields(rows.scales.reshape(-1, 16), 4)]).reshape(len(groups), -1)


def blocks_iq2_s(rows: OnGrid) -> Bytes:
    """Return rows of bytes of `iq2_s`."""
    points = rows.points.reshape(-1, 32)
    low, high = points.astype(np.uint8), pack_fields((points >> 8).astype(np.uint8), 2)
    scales = pack_fields(rows.scales.reshape(-1, 16), 4)
    parts = [_d(rows), low, rows.signs.reshape(-1, 32), high, scales]
    return np.hstack(parts).reshape(len(rows.d), -1)


IQ2_XXS = BlockFormat(
    name="iq2_xxs",
    block_size=256,
    block_bytes=66,
    form=CodecSpec(block=256, sub_block=32, code_bits=3, values=VALUES, factor=0.125, scales=True),
    unpack=_unpack_iq2_xxs,
    steps=half_steps(0),
    kernel=_iq2_xxs,
    code=code_iq2_xxs,
    scale=scale_iq2_xxs,
    table=GRID_IQ2_XXS,
    fields=grid_fields(32, 8, 8, blocks_iq2_xxs),
)

IQ2_XS = BlockFormat(
    name="iq2_xs",
    block_size=256,
    block_bytes=74,
    form=replace(IQ2_XXS.form, sub_block=16),
    unpack=_unpack_iq2_xs,
    steps=half_steps(0),
    kernel=_iq2_xs,
    code=code_iq2_xs,
    scale=scale_iq2_xs,
    table=GRID_IQ2_XS,
    fields=grid_fields(32, 9, 16, blocks_iq2_xs),
)

IQ2_S = BlockFormat(
    name="iq2_s",
    block_size=256,
    block_bytes=82,
    form=replace(IQ2_XXS.form, sub_block=16),
    unpack=_unpack_iq2_s,
    steps=half_steps(0),
    kernel=_iq2_s,
    code=code_iq2_s,
    scale=scale_iq2_s,
    table=GRID_IQ2_S,
    fields=grid_fields(32, 10, 16, blocks_iq2_s),
)
