"""3.5-bit format: 11 levels, two weights in 7 bits.

``q3h_b64t1`` (short name ``q3h``): 64 weights in 32 bytes, (2 + 2 + 4 + 8 + 16) * 8 / 64 = 4 bits
per weight; the 32 pair codes alone are 3.5.

The codes x (even index) and y (odd index) of two weights, each 0..10, make c = x + 11 * y, 0..120.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      base, float16
2       2      scale, float16
4       4      bit 6 of the pair codes: pair 8r + j in bit j of byte r
8       8      bits 5, 4 of the pair codes: pair 4r + j in bits 2j, 2j + 1 of byte r
16      16     low 4 bits of the pair codes: pair 2r in the low nibble of byte r, 2r + 1 in the high
======  =====  ==================================================================================

weight = base + scale * code, code 0..10.  Plain: base = min, scale = range / 10.

Source: Inferflow, quant_types.h (format Q3H_B64T1).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._jit import inline, njit
from nbflow_kernels.formats.affine_format import F16_PAIR, RANGE, AffineFormat
from nbflow_kernels.formats.bit_fields import bit, crumb, nibble, pack_fields, unpack_fields
from nbflow_kernels.formats.decode import decode_codes
from nbflow_kernels.formats.registry import Bytes


@inline
def second_of_pair(c: Any) -> Any:
    """Return y = c // 11 without a division, exact for c in 0..120: 373 / 4096 = 1 / 10.981."""
    return (c * 373) >> 12


@inline
def code_q3h_b64t1(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`."""
    pair = i >> 1
    low, middle = nibble(row, at + 16, pair), crumb(row, at + 8, pair)
    c = low | (middle << 4) | (bit(row, at + 4, pair) << 6)
    y = second_of_pair(c)
    return y if i & 1 else c - 11 * y


@njit
def _codes_q3h_b64t1(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q3h_b64t1, 64, 32, data, codes, start, stop)


def _pack(codes: Bytes) -> Bytes:
    c = codes[:, 0::2] + np.uint8(11) * codes[:, 1::2]
    planes = [pack_fields(c >> 6, 1), pack_fields((c >> 4) & 3, 2), pack_fields(c & 15, 4)]
    return np.hstack(planes)


def _unpack(blocks: Bytes) -> Bytes:
    low, middle = unpack_fields(blocks[:, 16:], 4), unpack_fields(blocks[:, 8:16], 2)
    c = low | (middle << 4) | (unpack_fields(blocks[:, 4:8], 1) << 6)
    return np.stack([c % 11, c // 11], axis=2).reshape(len(blocks), 64)


Q3H_B64T1 = AffineFormat(
    name="q3h_b64t1",
    block_size=64,
    block_bytes=32,
    n_codes=11,
    rule=RANGE,
    divisor=10,
    parameters=F16_PAIR,
    base_at=0,
    scale_at=2,
    pack_codes=_pack,
    unpack_codes=_unpack,
    codes_kernel=_codes_q3h_b64t1,
    code=code_q3h_b64t1,
)
