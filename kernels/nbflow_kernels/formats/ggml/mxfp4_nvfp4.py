"""Formats of 4-bit floats (E2M1), byte for byte: OCP's MXFP4 and NVIDIA's NVFP4 as GGML has them.

Both decode a code 0..15 to twice an E2M1 number, `LEVELS`: 0 1 2 3 4 6 8 12 for codes 0..7 and the
negative ones for codes 8..15; -0 counts as 0.

``mxfp4``: 32 weights in 17 bytes, (1 + 16) * 8 / 32 = 4.25 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       1      e: the scale is 2**(e - 127) (E8M0)
1       16     codes: weight r in the low nibble of byte r, r + 16 in the high
======  =====  ==================================================================================

weight = 2**(e - 128) * value(code).  Unlike in the OCP format e = 255 is no NaN but a scale.

``nvfp4``: 64 weights in 36 bytes, (4 + 32) * 8 / 64 = 4.5 bits per weight; the scale of the whole
tensor, where there is one, is another tensor of the file.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       4      scales of 16 weights each: unsigned E4M3 (bias 7; 127 is 0, bit 7 does not count)
4       32     codes, 8 bytes for each scale: weight r of 16 in the low nibble of byte r, r + 8 in
               the high
======  =====  ==================================================================================

weight = scale / 2 * value(code).

Source: OCP Microscaling Formats specification 1.0; GGML, ggml-common.h (block_mxfp4, block_nvfp4),
ggml-impl.h (ggml_e8m0_to_fp32_half, ggml_ue4m3_to_fp32) and ggml-quants.c.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.bit_fields import (
    BlockFields,
    Part,
    half_nibble,
    pack_halves,
    unpack_halves,
)
from nbflow_kernels.formats.block_format import BlockFormat, decode_rows, no_scale
from nbflow_kernels.formats.codec_spec import CodecSpec
from nbflow_kernels.formats.registry import Bytes, Floats

LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
NO_TABLE = np.zeros(0, np.uint8)


def e8m0_halves() -> Floats:
    """Return 2**(e - 128) for e = 0..255; the first two are subnormal."""
    return np.ldexp(np.ones(256, np.float32), np.arange(256) - 128).astype(np.float32)


def e4m3_halves() -> Floats:
    """Return half of the unsigned E4M3 number of each byte."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, (byte & 7) / 8
    normal = np.ldexp(1 + mantissa, exponent - 7)
    number = np.where(exponent == 0, np.ldexp(mantissa, -6), normal)
    number[127] = 0
    return (number / 2).astype(np.float32)


E8M0, E4M3 = e8m0_halves(), e4m3_halves()


@jit.device_function(inline="always")
def code_mxfp4(row, at, i, table):
    """Return code `i` of the block at byte `at`."""
    return half_nibble(row, at + 1, i)


@jit.device_function(inline="always")
def code_nvfp4(row, at, i, table):
    """Return code `i` of the block at byte `at`."""
    return (row[at + 4 + 8 * (i >> 4) + (i & 7)] >> ((i & 8) >> 1)) & 15


@jit.kernel
def _mxfp4(data, table, codes, scales, start, stop):
    decode_rows(code_mxfp4, no_scale, 32, 0, 17, data, table, codes, scales, start, stop)


@jit.kernel
def _nvfp4(data, table, codes, scales, start, stop):
    decode_rows(code_nvfp4, no_scale, 64, 0, 36, data, table, codes, scales, start, stop)


def _unpack_mxfp4(blocks: Bytes) -> tuple[Bytes, None]:
    return unpack_halves(blocks[:, 1:]), None


def _unpack_nvfp4(blocks: Bytes) -> tuple[Bytes, None]:
    return unpack_halves(blocks[:, 4:].reshape(-1, 8)).reshape(len(blocks), 64), None


def blocks_fp4(codes: Bytes, scales: Bytes, block: int, half: int) -> Bytes:
    """Return rows of bytes of codes (rows, K) and scale bytes (rows, K / ...)."""
    stored = scales.reshape(codes.size // block, -1)
    packed = pack_halves(codes.reshape(-1, 2 * half)).reshape(len(stored), -1)
    return np.hstack([stored, packed]).reshape(len(codes), -1)


MXFP4 = BlockFormat(
    name="mxfp4",
    block_size=32,
    block_bytes=17,
    form=CodecSpec(block=32, sub_block=32, code_bits=4, values=LEVELS, d_type="e8m0"),
    unpack=_unpack_mxfp4,
    steps=lambda blocks: E8M0[blocks[:, 0]],
    kernel=_mxfp4,
    code=code_mxfp4,
    scale=no_scale,
    table=NO_TABLE,
    fields=BlockFields((Part(32, 4), Part(1, 8)), lambda c, s: blocks_fp4(c, s, 32, 16)),
)

NVFP4 = BlockFormat(
    name="nvfp4",
    block_size=64,
    block_bytes=36,
    form=CodecSpec(block=16, sub_block=16, code_bits=4, values=LEVELS, d_type="e4m3"),
    unpack=_unpack_nvfp4,
    steps=lambda blocks: E4M3[blocks[:, :4]],
    kernel=_nvfp4,
    code=code_nvfp4,
    scale=no_scale,
    table=NO_TABLE,
    fields=BlockFields((Part(64, 4), Part(4, 8)), lambda c, s: blocks_fp4(c, s, 64, 8)),
)
