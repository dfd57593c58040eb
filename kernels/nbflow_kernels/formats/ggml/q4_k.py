"""``q4_k``: 256 weights in 144 bytes, (2 + 2 + 12 + 128) * 8 / 256 = 4.5 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       2      dmin, float16
4       4      byte j: scale of sub-block j < 4 in bits 0-5, bits 4, 5 of scale j + 4 in bits 6, 7
8       4      the same of the minima
12      4      byte j: bits 0-3 of scale j + 4 in the low nibble, of minimum j + 4 in the high
16      128    codes 0..15: weight 64 p + r in the low nibble of byte 32 p + r, 64 p + 32 + r in
               the high
======  =====  ==================================================================================

weight = d * scale * code - dmin * minimum, scale and minimum 0..63 for each 32 weights.

Source: GGML, ggml-common.h (block_q4_K).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.codec_spec import CodecSpec
from nbflow_kernels.formats.ggml.k_format import KQuantFormat, decode_rows, put_params
from nbflow_kernels.formats.registry import Bytes


@jit.device_function(inline="always")
def sixes(row, at, other, nibble, j):
    """Return 6-bit value `j` of 8 of the 12 bytes of scales and minima.

    Those below 4 and the high bits are at byte `at`; the low bits of the others are in the nibbles
    of the bytes `other`, from bit `nibble` on.
    """
    if j < 4:
        return row[at + j] & 63
    return ((row[other + j - 4] >> nibble) & 15) | ((row[at + j - 4] >> 6) << 4)


@jit.device_function(inline="always")
def scale_q4_k(row, at, j):
    """Return the scale of sub-block `j` of the block at byte `at`."""
    return sixes(row, at + 4, at + 12, 0, j)


@jit.device_function(inline="always")
def min_q4_k(row, at, j):
    """Return the minimum of sub-block `j` of the block at byte `at`."""
    return sixes(row, at + 8, at + 12, 4, j)


@jit.device_function(inline="always")
def code_q4_k(row, at, i):
    """Return code `i` of the block at byte `at`."""
    return (row[at + 16 + (i >> 6 << 5) + (i & 31)] >> (i >> 3 & 4)) & 15


@jit.device_function(inline="always")
def put_sixes(scales, mins, block):
    """Write the 12 bytes of 8 scales and 8 minima from byte 4 on."""
    for j in range(4):
        block[4 + j] = scales[j] | ((scales[j + 4] >> 4) << 6)
        block[8 + j] = mins[j] | ((mins[j + 4] >> 4) << 6)
        block[12 + j] = (scales[j + 4] & 15) | ((mins[j + 4] & 15) << 4)


@jit.device_function(inline="always")
def put_nibbles(codes, block, at):
    """Write the low 4 bits of 256 codes to 128 bytes from byte `at` on."""
    for p in range(4):
        for r in range(32):
            low, high = codes[64 * p + r] & 15, codes[64 * p + 32 + r] & 15
            block[at + 32 * p + r] = low | (high << 4)


def unpack_sixes(data: Bytes) -> tuple[NDArray[np.int16], Bytes]:
    """Return the scales and minima (n, 8) of bytes (n, 12)."""
    low = data[:, 8:]
    parts = []
    for at, nibbles in ((0, low & np.uint8(15)), (4, low >> np.uint8(4))):
        first = data[:, at : at + 4]
        upper = (first >> np.uint8(6)) << np.uint8(4)
        parts.append(np.hstack([first & np.uint8(63), nibbles | upper]))
    return parts[0].astype(np.int16), parts[1]


def unpack_nibbles(data: Bytes) -> Bytes:
    """Return the 4-bit values (n, 256) of bytes (n, 128)."""
    shifts = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return ((data.reshape(-1, 4, 1, 32) >> shifts) & np.uint8(15)).reshape(-1, 256)


@jit.kernel
def _integers(data, codes, scales, mins, start, stop):
    decode_rows(code_q4_k, scale_q4_k, min_q4_k, 32, 144, data, codes, scales, mins, start, stop)


@jit.kernel
def _pack(codes, scales, mins, params, data, start, stop):
    for s in range(start, stop):
        put_params(params[s], 2, 0, data[s])
        put_sixes(scales[s], mins[s], data[s])
        put_nibbles(codes[s], data[s], 16)


def _unpack(blocks: Bytes) -> tuple[Bytes, NDArray[np.int16], Bytes]:
    return unpack_nibbles(blocks[:, 16:]), *unpack_sixes(blocks[:, 4:16])


Q4_K = KQuantFormat(
    name="q4_k",
    block_bytes=144,
    form=CodecSpec(256, 32, 4, scales=True, base="min"),
    scale_top=63,
    d_at=0,
    unpack=_unpack,
    integers_kernel=_integers,
    code=code_q4_k,
    scale=scale_q4_k,
    minimum=min_q4_k,
    pack_kernel=_pack,
)
