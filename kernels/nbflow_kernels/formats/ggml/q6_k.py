"""``q6_k``: 256 weights in 210 bytes, (128 + 64 + 16 + 2) * 8 / 256 = 6.5625 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       128    low 4 bits of the codes 0..63: weight 128 h + r in the low nibble of byte 64 h + r
               (r < 64), 128 h + 64 + r in the high
128     64     bits 4, 5 of the codes: weight 128 h + 32 p + r in bits 2p, 2p + 1 of byte 32 h + r
192     16     scale of each 16 weights, int8
208     2      d, float16
======  =====  ==================================================================================

weight = d * scale * (code - 32).

Source: GGML, ggml-common.h (block_q6_K).
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
def code_q6_k(row, at, i):
    """Return code `i` of the block at byte `at`, plus 32."""
    low = (row[at + (i >> 7 << 6) + (i & 63)] >> (i >> 4 & 4)) & 15
    return low | (quarter(row, at + 128, i) << 4)


@jit.device_function(inline="always")
def scale_q6_k(row, at, j):
    """Return the scale of sub-block `j` of the block at byte `at`, -128 .. 127."""
    return np.int16(row[at + 192 + j] ^ 128) - 128


@jit.kernel
def _integers(data, codes, scales, mins, start, stop):
    decode_rows(code_q6_k, scale_q6_k, no_minimum, 16, 210, data, codes, scales, mins, start, stop)


@jit.kernel
def _pack(codes, scales, mins, params, data, start, stop):
    for s in range(start, stop):
        block, code = data[s], codes[s]
        for h in range(2):
            for r in range(64):
                low, high = code[128 * h + r] & 15, code[128 * h + 64 + r] & 15
                block[64 * h + r] = low | (high << 4)
        put_quarters(code, block, 128, 4)
        for j in range(16):
            block[192 + j] = scales[s, j] & 255
        put_params(params[s], 1, 208, block)


def _unpack(blocks: Bytes) -> tuple[Bytes, NDArray[np.int16], Bytes]:
    shifts = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    low = ((blocks[:, :128].reshape(-1, 2, 1, 64) >> shifts) & np.uint8(15)).reshape(-1, 256)
    codes = low | (unpack_quarters(blocks[:, 128:192]) << np.uint8(4))
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.int16)
    return codes, scales, blocks[:, :0]


Q6_K = KQuantFormat(
    name="q6_k",
    block_bytes=210,
    form=CodecSpec(256, 16, 6, zero=32, scales=True),
    scale_top=128,
    d_at=208,
    unpack=_unpack,
    integers_kernel=_integers,
    code=code_q6_k,
    scale=scale_q6_k,
    minimum=no_minimum,
    pack_kernel=_pack,
)
