"""``q3_k``: 256 weights in 110 bytes, (32 + 64 + 12 + 2) * 8 / 256 = 3.4375 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       32     bit 2 of the codes 0..7: weight 32 p + r in bit p of byte r
32      64     bits 0, 1 of the codes: weight 128 h + 32 p + r in bits 2p, 2p + 1 of byte 32 h + r
96      8      low 4 bits of the scales: sub-block j in the low nibble of byte j, 8 + j in the high
104     4      high 2 bits of the scales: sub-block 4 p + r in bits 2p, 2p + 1 of byte r
108     2      d, float16
======  =====  ==================================================================================

weight = d * (scale - 32) * (code - 4), scale 0..63 for each 16 weights.

Source: GGML, ggml-common.h (block_q3_K).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.codec_spec import CodecSpec
from nbflow_kernels.formats.ggml.k_format import (
    KQuantFormat,
    decode_rows,
    no_minimum,
    put_params,
    put_quarters,
    quarter,
    unpack_quarters,
)
from nbflow_kernels.formats.registry import Bytes


@jit.device_function(inline="always")
def code_q3_k(row, at, i):
    """Return code `i` of the block at byte `at`, plus 4."""
    return quarter(row, at + 32, i) | (((row[at + (i & 31)] >> (i >> 5)) & 1) << 2)


@jit.device_function(inline="always")
def scale_q3_k(row, at, j):
    """Return the scale of sub-block `j` of the block at byte `at`, -32 .. 31."""
    low = (row[at + 96 + (j & 7)] >> (j >> 3 << 2)) & 15
    high = (row[at + 104 + (j & 3)] >> (j >> 2 << 1)) & 3
    return np.int16(low | (high << 4)) - 32


@jit.kernel
def _integers(data, codes, scales, mins, start, stop):
    decode_rows(code_q3_k, scale_q3_k, no_minimum, 16, 110, data, codes, scales, mins, start, stop)


@jit.kernel
def _pack(codes, scales, mins, params, data, start, stop):
    for s in range(start, stop):
        block, code = data[s], codes[s]
        for r in range(32):
            high = 0
            for p in range(8):
                high |= (code[32 * p + r] >> 2) << p
            block[r] = high
        put_quarters(code, block, 32, 0)
        for j in range(8):
            block[96 + j] = ((scales[s, j] + 32) & 15) | (((scales[s, j + 8] + 32) & 15) << 4)
        for r in range(4):
            high = 0
            for p in range(4):
                high |= ((scales[s, 4 * p + r] + 32) >> 4) << (2 * p)
            block[104 + r] = high
        put_params(params[s], 1, 108, block)


def _unpack(blocks: Bytes) -> tuple[Bytes, NDArray[np.int16], Bytes]:
    planes = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = ((blocks[:, None, :32] >> planes) & np.uint8(1)).reshape(-1, 256)
    low_scales = np.hstack([blocks[:, 96:104] & np.uint8(15), blocks[:, 96:104] >> np.uint8(4)])
    high_scales = (blocks[:, None, 104:108] >> (2 * planes[:, :4])) & np.uint8(3)
    scales = low_scales | (high_scales.reshape(-1, 16) << np.uint8(4))
    codes = unpack_quarters(blocks[:, 32:96]) | (high << np.uint8(2))
    return codes, scales.astype(np.int16) - np.int16(32), blocks[:, :0]


Q3_K = KQuantFormat(
    name="q3_k",
    block_bytes=110,
    form=CodecSpec(256, 16, 3, zero=4, scales=True),
    scale_top=32,
    d_at=108,
    unpack=_unpack,
    integers_kernel=_integers,
    code=code_q3_k,
    scale=scale_q3_k,
    minimum=no_minimum,
    pack_kernel=_pack,
)
