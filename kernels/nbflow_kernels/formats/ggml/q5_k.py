"""``q5_k``: 256 weights in 176 bytes, (2 + 2 + 12 + 32 + 128) * 8 / 256 = 5.5 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       2      dmin, float16
4       12     scales and minima, as in ``q4_k``
16      32     bit 4 of the codes 0..31: weight 32 p + r in bit p of byte r
48      128    low 4 bits of the codes: weight 64 p + r in the low nibble of byte 32 p + r,
               64 p + 32 + r in the high
======  =====  ==================================================================================

weight = d * scale * code - dmin * minimum, scale and minimum 0..63 for each 32 weights.

Source: GGML, ggml-common.h (block_q5_K).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.codec_spec import CodecSpec
from nbflow_kernels.formats.ggml.k_format import KQuantFormat, decode_rows, put_params
from nbflow_kernels.formats.ggml.q4_k import (
    min_q4_k,
    put_nibbles,
    put_sixes,
    scale_q4_k,
    unpack_nibbles,
    unpack_sixes,
)
from nbflow_kernels.formats.registry import Bytes


@jit.device_function(inline="always")
def code_q5_k(row, at, i):
    """Return code `i` of the block at byte `at`."""
    low = (row[at + 48 + (i >> 6 << 5) + (i & 31)] >> (i >> 3 & 4)) & 15
    return low | (((row[at + 16 + (i & 31)] >> (i >> 5)) & 1) << 4)


@jit.kernel
def _integers(data, codes, scales, mins, start, stop):
    decode_rows(code_q5_k, scale_q4_k, min_q4_k, 32, 176, data, codes, scales, mins, start, stop)


@jit.kernel
def _pack(codes, scales, mins, params, data, start, stop):
    for s in range(start, stop):
        block, code = data[s], codes[s]
        put_params(params[s], 2, 0, block)
        put_sixes(scales[s], mins[s], block)
        for r in range(32):
            high = 0
            for p in range(8):
                high |= (code[32 * p + r] >> 4) << p
            block[16 + r] = high
        put_nibbles(code, block, 48)


def _unpack(blocks: Bytes) -> tuple[Bytes, NDArray[np.int16], Bytes]:
    planes = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = ((blocks[:, None, 16:48] >> planes) & np.uint8(1)).reshape(-1, 256)
    codes = unpack_nibbles(blocks[:, 48:]) | (high << np.uint8(4))
    return codes, *unpack_sixes(blocks[:, 4:16])


Q5_K = KQuantFormat(
    name="q5_k",
    block_bytes=176,
    form=CodecSpec(256, 32, 5, scales=True, base="min"),
    scale_top=63,
    d_at=0,
    unpack=_unpack,
    integers_kernel=_integers,
    code=code_q5_k,
    scale=scale_q4_k,
    minimum=min_q4_k,
    pack_kernel=_pack,
)
