"""``q2_k``: 256 weights in 84 bytes, (16 + 64 + 2 + 2) * 8 / 256 = 2.625 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       16     sub-block j of 16 weights: scale in the low nibble of byte j, minimum in the high
16      64     codes 0..3: weight 128 h + 32 p + r in bits 2p, 2p + 1 of byte 32 h + r
80      2      d, float16
82      2      dmin, float16
======  =====  ==================================================================================

weight = d * scale * code - dmin * minimum.

Source: GGML, ggml-common.h (block_q2_K).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.codec_spec import CodecSpec
from nbflow_kernels.formats.ggml.k_format import (
    KQuantFormat,
    decode_rows,
    put_params,
    put_quarters,
    quarter,
    unpack_quarters,
)
from nbflow_kernels.formats.registry import Bytes


@jit.device_function(inline="always")
def code_q2_k(row, at, i):
    """Return code `i` of the block at byte `at`."""
    return quarter(row, at + 16, i)


@jit.device_function(inline="always")
def scale_q2_k(row, at, j):
    """Return the scale of sub-block `j` of the block at byte `at`."""
    return row[at + j] & 15


@jit.device_function(inline="always")
def min_q2_k(row, at, j):
    """Return the minimum of sub-block `j` of the block at byte `at`."""
    return row[at + j] >> 4


@jit.kernel
def _integers(data, codes, scales, mins, start, stop):
    decode_rows(code_q2_k, scale_q2_k, min_q2_k, 16, 84, data, codes, scales, mins, start, stop)


@jit.kernel
def _pack(codes, scales, mins, params, data, start, stop):
    for s in range(start, stop):
        block = data[s]
        for j in range(16):
            block[j] = scales[s, j] | (mins[s, j] << 4)
        put_quarters(codes[s], block, 16, 0)
        put_params(params[s], 2, 80, block)


def _unpack(blocks: Bytes) -> tuple[Bytes, NDArray[np.int16], Bytes]:
    scales = (blocks[:, :16] & np.uint8(15)).astype(np.int16)
    return unpack_quarters(blocks[:, 16:80]), scales, blocks[:, :16] >> np.uint8(4)


Q2_K = KQuantFormat(
    name="q2_k",
    block_bytes=84,
    form=CodecSpec(256, 16, 2, scales=True, base="min", scale_bits=4),
    scale_top=15,
    d_at=80,
    unpack=_unpack,
    integers_kernel=_integers,
    code=code_q2_k,
    scale=scale_q2_k,
    minimum=min_q2_k,
    pack_kernel=_pack,
)
