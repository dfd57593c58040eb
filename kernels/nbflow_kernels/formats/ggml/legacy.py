"""GGML's legacy block formats, byte for byte: 32 weights, one scale, with or without a base.

``q4_0``: 32 weights in 18 bytes, (2 + 16) * 8 / 32 = 4.5 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      scale, float16; may be negative
2       16     codes: weight r in the low nibble of byte r, r + 16 in the high
======  =====  ==================================================================================

weight = scale * (code - 8), code 0..15.  Plain: the weight of largest magnitude gets code 0, so
scale = -weight / 8.

``q4_1``: 32 weights in 20 bytes, (2 + 2 + 16) * 8 / 32 = 5 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      scale, float16
2       2      base, float16
4       16     codes: weight r in the low nibble of byte r, r + 16 in the high
======  =====  ==================================================================================

weight = base + scale * code, code 0..15.  Plain: base = min, scale = range / 15.

``q5_0``: 32 weights in 22 bytes, (2 + 4 + 16) * 8 / 32 = 5.5 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      scale, float16; may be negative
2       4      bit 4 of the codes: weight 8r + j in bit j of byte r
6       16     low 4 bits of the codes: weight r in the low nibble of byte r, r + 16 in the high
======  =====  ==================================================================================

weight = scale * (code - 16), code 0..31.  Plain: the weight of largest magnitude gets code 0, so
scale = -weight / 16.

``q5_1``: 32 weights in 24 bytes, (2 + 2 + 4 + 16) * 8 / 32 = 6 bits per weight.  The bytes of
``q5_b32t1``.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      scale, float16
2       2      base, float16
4       4      bit 4 of the codes: weight 8r + j in bit j of byte r
8       16     low 4 bits of the codes: weight r in the low nibble of byte r, r + 16 in the high
======  =====  ==================================================================================

weight = base + scale * code, code 0..31.  Plain: base = min, scale = range / 31.

``q8_0``: 32 weights in 34 bytes, (2 + 32) * 8 / 32 = 8.5 bits per weight.  The bytes of
``q8_b32t2``.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      scale, float16
2       32     codes, int8
======  =====  ==================================================================================

weight = scale * code.  Plain: scale = max|x| / 127, halves rounded away from zero.

Unlike the other formats' encoders, plain has no cutoff: only a scale of exactly 0 gives codes 0.
Where the float32 quotient of 1 and the scale overflows (scale below 3e-39) GGML's codes depend on
the processor; here they are cut off at the smallest and largest code, and 0 / 0 gives code 0.

With importance weights, plain is GGML's encoder for them (`ggml_weighted`).  That of Q8_0 is
published too: it is the one without, whatever the weights are.

Source: GGML, ggml-common.h (block_q4_0 to block_q8_0) and ggml-quants.c (quantize_row_*_ref,
quantize_row_*_impl).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nbflow_kernels._jit import inline, njit
from nbflow_kernels.formats.affine_format import (
    F16_PAIR,
    F16_SCALE,
    GGML_ABSMAX,
    GGML_EXTREME,
    GGML_RANGE,
    AffineFormat,
)
from nbflow_kernels.formats.bit_fields import bit, half_nibble, pack_fields, unpack_fields
from nbflow_kernels.formats.decode import decode_codes
from nbflow_kernels.formats.inferflow.q5 import Q5_B32T1
from nbflow_kernels.formats.inferflow.q8 import Q8_B32T2
from nbflow_kernels.formats.registry import Bytes

# ---- decode -------------------------------------------------------------------------------------


@inline
def code_q4_0(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`."""
    return half_nibble(row, at + 2, i)


@inline
def code_q4_1(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`."""
    return half_nibble(row, at + 4, i)


@inline
def code_q5_0(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`."""
    return half_nibble(row, at + 6, i) | (bit(row, at + 2, i) << 4)


@njit
def _codes_q4_0(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q4_0, 32, 18, data, codes, start, stop)


@njit
def _codes_q4_1(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q4_1, 32, 20, data, codes, start, stop)


@njit
def _codes_q5_0(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q5_0, 32, 22, data, codes, start, stop)


def _pack_halves(codes: Bytes) -> Bytes:
    data: Bytes = codes[:, :16] | (codes[:, 16:] << np.uint8(4))
    return data


def _unpack_halves(data: Bytes) -> Bytes:
    return np.hstack([data & np.uint8(15), data >> np.uint8(4)])


def _pack_q5(codes: Bytes) -> Bytes:
    return np.hstack([pack_fields(codes >> 4, 1), _pack_halves(codes & np.uint8(15))])


def _unpack_q5_0(blocks: Bytes) -> Bytes:
    codes: Bytes = _unpack_halves(blocks[:, 6:]) | (unpack_fields(blocks[:, 2:6], 1) << 4)
    return codes


# ---- formats ------------------------------------------------------------------------------------

Q4_0 = AffineFormat(
    name="q4_0",
    block_size=32,
    block_bytes=18,
    n_codes=16,
    rule=GGML_EXTREME,
    divisor=8,
    parameters=F16_SCALE,
    base_at=0,
    scale_at=0,
    pack_codes=_pack_halves,
    unpack_codes=lambda blocks: _unpack_halves(blocks[:, 2:]),
    codes_kernel=_codes_q4_0,
    code=code_q4_0,
    codes_at=2,
    zero=8,
)

Q4_1 = AffineFormat(
    name="q4_1",
    block_size=32,
    block_bytes=20,
    n_codes=16,
    rule=GGML_RANGE,
    divisor=15,
    parameters=F16_PAIR,
    base_at=2,
    scale_at=0,
    pack_codes=_pack_halves,
    unpack_codes=lambda blocks: _unpack_halves(blocks[:, 4:]),
    codes_kernel=_codes_q4_1,
    code=code_q4_1,
)

Q5_0 = AffineFormat(
    name="q5_0",
    block_size=32,
    block_bytes=22,
    n_codes=32,
    rule=GGML_EXTREME,
    divisor=16,
    parameters=F16_SCALE,
    base_at=0,
    scale_at=0,
    pack_codes=_pack_q5,
    unpack_codes=_unpack_q5_0,
    codes_kernel=_codes_q5_0,
    code=code_q5_0,
    codes_at=2,
    zero=16,
)

Q5_1 = replace(Q5_B32T1, name="q5_1", rule=GGML_RANGE)
Q8_0 = replace(Q8_B32T2, name="q8_0", rule=GGML_ABSMAX)
