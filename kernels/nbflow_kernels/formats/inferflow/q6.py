"""6-bit format: a plane of nibbles and a plane of 2-bit fields.

``q6_b64t1`` (short name ``q6``): 64 weights in 52 bytes, (2 + 2 + 16 + 32) * 8 / 64 = 6.5 bits per
weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      base, float16
2       2      scale, float16
4       16     high 2 bits of the codes: weight 4r + j in bits 2j, 2j + 1 of byte r
20      32     low 4 bits of the codes: weight 2r in the low nibble of byte r, 2r + 1 in the high
======  =====  ==================================================================================

weight = base + scale * code, code 0..63.  Plain: base = min, scale = range / 62.

Source: Inferflow, quant_types.h (format Q6_B64T1).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._jit import inline, njit
from nbflow_kernels.formats.affine_format import F16_PAIR, RANGE, AffineFormat
from nbflow_kernels.formats.bit_fields import crumb, nibble, pack_fields, unpack_fields
from nbflow_kernels.formats.decode import decode_codes
from nbflow_kernels.formats.registry import Bytes


@inline
def code_q6_b64t1(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`."""
    return nibble(row, at + 20, i) | (crumb(row, at + 4, i) << 4)


@njit
def _codes_q6_b64t1(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q6_b64t1, 64, 52, data, codes, start, stop)


def _pack(codes: Bytes) -> Bytes:
    return np.hstack([pack_fields(codes >> 4, 2), pack_fields(codes & 15, 4)])


def _unpack(blocks: Bytes) -> Bytes:
    codes: Bytes = unpack_fields(blocks[:, 20:], 4) | (unpack_fields(blocks[:, 4:20], 2) << 4)
    return codes


Q6_B64T1 = AffineFormat(
    name="q6_b64t1",
    block_size=64,
    block_bytes=52,
    n_codes=64,
    rule=RANGE,
    divisor=62,
    parameters=F16_PAIR,
    base_at=0,
    scale_at=2,
    pack_codes=_pack,
    unpack_codes=_unpack,
    codes_kernel=_codes_q6_b64t1,
    code=code_q6_b64t1,
)
