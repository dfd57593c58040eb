"""GGML's 4-bit formats with uneven levels, byte for byte: levels lie closer where weights do.

Both decode a code 0..15 to one of `LEVELS`: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89
113.

``iq4_nl``: 32 weights in 18 bytes, (2 + 16) * 8 / 32 = 4.5 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      scale, float16; may be negative
2       16     codes: weight r in the low nibble of byte r, r + 16 in the high
======  =====  ==================================================================================

weight = scale * value(code).

``iq4_xs``: 256 weights in 136 bytes, (2 + 2 + 4 + 128) * 8 / 256 = 4.25 bits per weight.  A
sub-block s is 32 weights.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16; may be negative
2       2      bits 4, 5 of the scales: sub-block s in bits 2s, 2s + 1
4       4      low 4 bits of the scales: sub-block 2r in the low nibble of byte r, 2r + 1 in the
               high
8       128    codes, 16 bytes for each sub-block: weight r of it in the low nibble of byte r,
               r + 16 in the high
======  =====  ==================================================================================

weight = d * (scale - 32) * value(code), scale 0..63.

Source: GGML, ggml-common.h (block_iq4_nl, block_iq4_xs, kvalues_iq4nl) and ggml-quants.c
(dequantize_row_iq4_nl, quantize_row_iq4_nl_impl).
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.bit_fields import (
    BlockFields,
    Part,
    half_nibble,
    nibble,
    pack_fields,
    pack_halves,
    unpack_fields,
    unpack_halves,
)
from nbflow_kernels.formats.block_format import (
    BlockFormat,
    Scales,
    decode_rows,
    half_steps,
    no_scale,
)
from nbflow_kernels.formats.codec_spec import CodecSpec
from nbflow_kernels.formats.registry import Bytes, Halves

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
NO_TABLE = np.zeros(0, np.uint8)


@jit.device_function(inline="always")
def code_iq4_nl(row, at, i, table):
    """Return code `i` of the block at byte `at`."""
    return half_nibble(row, at + 2, i)


@jit.device_function(inline="always")
def code_iq4_xs(row, at, i, table):
    """Return code `i` of the block at byte `at`."""
    return half_nibble(row, at + 8 + 16 * (i >> 5), i & 31)


@jit.device_function(inline="always")
def scale_iq4_xs(row, at, s):
    """Return the signed scale of sub-block `s` of the block at byte `at`."""
    high = (row[at + 2 + (s >> 2)] >> (2 * (s & 3))) & 3
    return (nibble(row, at + 4, s) | (high << 4)) - 32


@jit.kernel
def _iq4_nl(data, table, codes, scales, start, stop):
    decode_rows(code_iq4_nl, no_scale, 32, 0, 18, data, table, codes, scales, start, stop)


@jit.kernel
def _iq4_xs(data, table, codes, scales, start, stop):
    decode_rows(code_iq4_xs, scale_iq4_xs, 256, 8, 136, data, table, codes, scales, start, stop)


def _unpack_iq4_nl(blocks: Bytes) -> tuple[Bytes, None]:
    return unpack_halves(blocks[:, 2:]), None


def _unpack_iq4_xs(blocks: Bytes) -> tuple[Bytes, Scales]:
    low, high = unpack_fields(blocks[:, 4:8], 4), unpack_fields(blocks[:, 2:4], 2)
    scales = (low | (high << 4)).astype(np.int16) - np.int16(32)
    codes = unpack_halves(blocks[:, 8:].reshape(-1, 16)).reshape(len(blocks), 256)
    return codes, scales


def blocks_iq4_nl(codes: Bytes, d: Halves) -> Bytes:
    """Return rows of bytes of codes (rows, K) and d (rows, K / 32)."""
    blocks = np.empty((d.size, 18), np.uint8)
    blocks[:, :2] = d.reshape(-1, 1).view(np.uint8)
    blocks[:, 2:] = pack_halves(codes.reshape(-1, 32))
    return blocks.reshape(len(codes), -1)


def blocks_iq4_xs(codes: Bytes, scales: Scales, d: Halves) -> Bytes:
    """Return rows of bytes of codes (rows, K), scales (rows, K / 32) and d (rows, K / 256)."""
    blocks = np.empty((d.size, 136), np.uint8)
    stored = (scales.reshape(-1, 8) + 32).astype(np.uint8)
    blocks[:, :2] = d.reshape(-1, 1).view(np.uint8)
    blocks[:, 2:4], blocks[:, 4:8] = pack_fields(stored >> 4, 2), pack_fields(stored & 15, 4)
    blocks[:, 8:] = pack_halves(codes.reshape(-1, 32)).reshape(-1, 128)
    return blocks.reshape(len(codes), -1)


def _stored_iq4_xs(codes: Bytes, stored: Scales, d: Halves) -> Bytes:
    """Do as `blocks_iq4_xs` with scales 0..63."""
    return blocks_iq4_xs(codes, stored - np.int16(32), d)


IQ4_NL = BlockFormat(
    name="iq4_nl",
    block_size=32,
    block_bytes=18,
    form=CodecSpec(block=32, sub_block=32, code_bits=4, values=LEVELS),
    unpack=_unpack_iq4_nl,
    steps=half_steps(0),
    kernel=_iq4_nl,
    code=code_iq4_nl,
    scale=no_scale,
    table=NO_TABLE,
    fields=BlockFields((Part(32, 4), Part(1, 16, np.uint16)), blocks_iq4_nl),
)

IQ4_XS = BlockFormat(
    name="iq4_xs",
    block_size=256,
    block_bytes=136,
    form=CodecSpec(block=256, sub_block=32, code_bits=4, values=LEVELS, scales=True),
    unpack=_unpack_iq4_xs,
    steps=half_steps(0),
    kernel=_iq4_xs,
    code=code_iq4_xs,
    scale=scale_iq4_xs,
    table=NO_TABLE,
    fields=BlockFields(
        (Part(256, 4), Part(8, 6, np.int16), Part(1, 16, np.uint16)), _stored_iq4_xs
    ),
)
