"""5-bit formats: a plane of nibbles and a plane of single bits.

``q5_b64t1`` (short name ``q5``): 64 weights in 44 bytes, (2 + 2 + 8 + 32) * 8 / 64 = 5.5 bits per
weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      base, float16
2       2      scale, float16
4       8      bit 4 of the codes: weight 8r + j in bit j of byte r
12      32     low 4 bits of the codes: weight 2r in the low nibble of byte r, 2r + 1 in the high
======  =====  ==================================================================================

weight = base + scale * code, code 0..31.  Plain: base = min, scale = range / 30.

``q5_b32t1``: 32 weights in 24 bytes, (2 + 2 + 4 + 16) * 8 / 32 = 6 bits per weight.  GGML's Q5_1.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      scale, float16
2       2      base, float16
4       4      bit 4 of the codes: weight 8r + j in bit j of byte r
8       16     low 4 bits of the codes: weight r in the low nibble of byte r, r + 16 in the high
======  =====  ==================================================================================

weight = base + scale * code, code 0..31.  Plain: base = min, scale = range / 31.

Source: Inferflow, quant_types.h (formats Q5_B64T1 and Q5_B32T1).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._jit import inline, njit
from nbflow_kernels.formats.affine_format import F16_PAIR, RANGE, AffineFormat
from nbflow_kernels.formats.bit_fields import bit, nibble, pack_fields, unpack_fields
from nbflow_kernels.formats.decode import decode_codes
from nbflow_kernels.formats.registry import Bytes


@inline
def code_q5_b64t1(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`."""
    return nibble(row, at + 12, i) | (bit(row, at + 4, i) << 4)


@inline
def code_q5_b32t1(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`."""
    return ((row[at + 8 + (i & 15)] >> (i >> 4 << 2)) & 15) | (bit(row, at + 4, i) << 4)


@njit
def _codes_q5_b64t1(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q5_b64t1, 64, 44, data, codes, start, stop)


@njit
def _codes_q5_b32t1(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q5_b32t1, 32, 24, data, codes, start, stop)


def _pack_b64(codes: Bytes) -> Bytes:
    return np.hstack([pack_fields(codes >> 4, 1), pack_fields(codes & 15, 4)])


def _unpack_b64(blocks: Bytes) -> Bytes:
    codes: Bytes = unpack_fields(blocks[:, 12:], 4) | (unpack_fields(blocks[:, 4:12], 1) << 4)
    return codes


def _pack_b32(codes: Bytes) -> Bytes:
    low = codes & 15
    return np.hstack([pack_fields(codes >> 4, 1), low[:, :16] | (low[:, 16:] << 4)])


def _unpack_b32(blocks: Bytes) -> Bytes:
    low = np.hstack([blocks[:, 8:] & 15, blocks[:, 8:] >> 4])
    codes: Bytes = low | (unpack_fields(blocks[:, 4:8], 1) << 4)
    return codes


Q5_B64T1 = AffineFormat(
    name="q5_b64t1",
    block_size=64,
    block_bytes=44,
    n_codes=32,
    rule=RANGE,
    divisor=30,
    parameters=F16_PAIR,
    base_at=0,
    scale_at=2,
    pack_codes=_pack_b64,
    unpack_codes=_unpack_b64,
    codes_kernel=_codes_q5_b64t1,
    code=code_q5_b64t1,
)

Q5_B32T1 = AffineFormat(
    name="q5_b32t1",
    block_size=32,
    block_bytes=24,
    n_codes=32,
    rule=RANGE,
    divisor=31,
    parameters=F16_PAIR,
    base_at=2,
    scale_at=0,
    pack_codes=_pack_b32,
    unpack_codes=_unpack_b32,
    codes_kernel=_codes_q5_b32t1,
    code=code_q5_b32t1,
)
