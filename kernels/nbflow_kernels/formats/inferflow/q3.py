"""3-bit formats: a plane of 2-bit fields and a plane of single bits.

``q3_b32t1a`` and ``q3_b32t1b`` (short name ``q3``): 32 weights in 16 bytes,
(2 + 2 + 4 + 8) * 8 / 32 = 4 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      base, float16
2       2      scale, float16
4       4      bit 2 of the codes: weight 8r + j in bit j of byte r
8       8      low 2 bits of the codes: weight 4r + j in bits 2j, 2j + 1 of byte r
======  =====  ==================================================================================

weight = base + scale * code, code 0..7.  Plain ``a``: base = min, scale = range / 7; ``b``: scale =
range / 8, base = min + scale / 2 (the middles of 8 equal parts).

Source: Inferflow, quant_types.h (formats Q3_B32T1A and Q3_B32T1B).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._jit import inline, njit
from nbflow_kernels.formats.affine_format import F16_PAIR, MIDRISE, RANGE, AffineFormat
from nbflow_kernels.formats.bit_fields import bit, crumb, pack_fields, unpack_fields
from nbflow_kernels.formats.decode import decode_codes
from nbflow_kernels.formats.registry import Bytes


@inline
def code_q3(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`."""
    return crumb(row, at + 8, i) | (bit(row, at + 4, i) << 2)


@njit
def _codes_q3(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q3, 32, 16, data, codes, start, stop)


def _pack(codes: Bytes) -> Bytes:
    return np.hstack([pack_fields(codes >> 2, 1), pack_fields(codes & 3, 2)])


def _unpack(blocks: Bytes) -> Bytes:
    codes: Bytes = unpack_fields(blocks[:, 8:], 2) | (unpack_fields(blocks[:, 4:8], 1) << 2)
    return codes


def _q3(name: str, divisor: float, rule: int) -> AffineFormat:
    """Return one of the two formats that differ in the plain encoder only."""
    return AffineFormat(
        name=name,
        block_size=32,
        block_bytes=16,
        n_codes=8,
        divisor=divisor,
        parameters=F16_PAIR,
        base_at=0,
        scale_at=2,
        pack_codes=_pack,
        unpack_codes=_unpack,
        codes_kernel=_codes_q3,
        code=code_q3,
        rule=rule,
    )


Q3_B32T1A = _q3("q3_b32t1a", divisor=7, rule=RANGE)
Q3_B32T1B = _q3("q3_b32t1b", divisor=8, rule=MIDRISE)
