"""4-bit formats: a plane of nibbles.

``q4_b32t1a`` (short name ``q4``) and ``q4_b32t1b``: 32 weights in 20 bytes,
(2 + 2 + 16) * 8 / 32 = 5 bits per weight.  ``q4_b64t1``: 64 weights in 36 bytes,
(2 + 2 + 32) * 8 / 64 = 4.5 bits per weight.

======  ========  ===============================================================================
offset  bytes     field
======  ========  ===============================================================================
0       2         base, float16
2       2         scale, float16
4       16 or 32  codes: weight 2r in the low nibble of byte r, 2r + 1 in the high
======  ========  ===============================================================================

weight = base + scale * code, code 0..15.  Plain: base = min and scale = range / 15 (``a``) or
range / 14 (``b64``); ``b`` cuts the range into 16 equal parts and decodes to their middles: scale =
range / 16, base = min + scale / 2.

``q4_b16``: 16 weights in 10 bytes, (1 + 1 + 8) * 8 / 16 = 5 bits per weight.  For weights between
-1 and 1.5 only, and with steps of 0.001 it is coarse for small ones.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       1      base code u, uint8: base = u / 100 - 1
1       1      scale code u, uint8: scale = u / 1000
2       8      codes: weight 2r in the low nibble of byte r, 2r + 1 in the high
======  =====  ==================================================================================

weight = base + scale * code, code 0..15.  Plain: base = min snapped down, scale =
(max - base) / 15.

Source: Inferflow, quant_types.h (formats Q4_B32T1A, Q4_B32T1B, Q4_B64T1, Q4_B16).
"""

from __future__ import annotations

from typing import Any

from nbflow_kernels._jit import inline, njit
from nbflow_kernels.formats.affine_format import F16_PAIR, MIDRISE, RANGE, U8_PAIR, AffineFormat
from nbflow_kernels.formats.bit_fields import nibble, pack_fields, unpack_fields
from nbflow_kernels.formats.decode import decode_codes
from nbflow_kernels.formats.registry import Bytes


@inline
def code_q4(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`: all formats here but ``q4_b16``."""
    return nibble(row, at + 4, i)


@inline
def code_q4_b16(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`."""
    return nibble(row, at + 2, i)


@njit
def _codes_q4_b32(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q4, 32, 20, data, codes, start, stop)


@njit
def _codes_q4_b64(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q4, 64, 36, data, codes, start, stop)


@njit
def _codes_q4_b16(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q4_b16, 16, 10, data, codes, start, stop)


def _pack(codes: Bytes) -> Bytes:
    return pack_fields(codes, 4)


def _unpack(blocks: Bytes) -> Bytes:
    return unpack_fields(blocks[:, 4:], 4)


def _unpack_b16(blocks: Bytes) -> Bytes:
    return unpack_fields(blocks[:, 2:], 4)


def _q4_b32(name: str, divisor: float, rule: int) -> AffineFormat:
    """Return one of the two formats that differ in the plain encoder only."""
    return AffineFormat(
        name=name,
        block_size=32,
        block_bytes=20,
        n_codes=16,
        divisor=divisor,
        parameters=F16_PAIR,
        base_at=0,
        scale_at=2,
        pack_codes=_pack,
        unpack_codes=_unpack,
        codes_kernel=_codes_q4_b32,
        code=code_q4,
        rule=rule,
    )


Q4_B32T1A = _q4_b32("q4_b32t1a", divisor=15, rule=RANGE)
Q4_B32T1B = _q4_b32("q4_b32t1b", divisor=16, rule=MIDRISE)

Q4_B64T1 = AffineFormat(
    name="q4_b64t1",
    block_size=64,
    block_bytes=36,
    n_codes=16,
    rule=RANGE,
    divisor=14,
    parameters=F16_PAIR,
    base_at=0,
    scale_at=2,
    pack_codes=_pack,
    unpack_codes=_unpack,
    codes_kernel=_codes_q4_b64,
    code=code_q4,
)

Q4_B16 = AffineFormat(
    name="q4_b16",
    block_size=16,
    block_bytes=10,
    n_codes=16,
    rule=RANGE,
    divisor=15,
    parameters=U8_PAIR,
    base_at=0,
    scale_at=1,
    pack_codes=_pack,
    unpack_codes=_unpack_b16,
    codes_kernel=_codes_q4_b16,
    code=code_q4_b16,
    codes_at=2,
)
