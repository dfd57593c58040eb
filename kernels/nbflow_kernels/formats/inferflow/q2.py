"""2-bit formats: a plane of 2-bit fields.

``q2_b32t1a`` and ``q2_b32t1b`` (short name ``q2``): 32 weights in 12 bytes,
(2 + 2 + 8) * 8 / 32 = 3 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      base, float16
2       2      scale, float16
4       8      codes: weight 4r + j in bits 2j, 2j + 1 of byte r
======  =====  ==================================================================================

weight = base + scale * code, code 0..3.  Plain ``a``: base = min, scale = range / 3; ``b``: scale =
range / 4, base = min + scale / 2 (the middles of 4 equal parts).

Source: Inferflow, quant_types.h (formats Q2_B32T1A and Q2_B32T1B).
"""

from __future__ import annotations

from typing import Any

from nbflow_kernels._jit import inline, njit
from nbflow_kernels.formats.affine_format import F16_PAIR, MIDRISE, RANGE, AffineFormat
from nbflow_kernels.formats.bit_fields import crumb, pack_fields, unpack_fields
from nbflow_kernels.formats.decode import decode_codes
from nbflow_kernels.formats.registry import Bytes


@inline
def code_q2(row: Any, at: Any, i: Any) -> Any:
    """Return code `i` of the block at byte `at`."""
    return crumb(row, at + 4, i)


@njit
def _codes_q2(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(code_q2, 32, 12, data, codes, start, stop)


def _pack(codes: Bytes) -> Bytes:
    return pack_fields(codes, 2)


def _unpack(blocks: Bytes) -> Bytes:
    return unpack_fields(blocks[:, 4:], 2)


def _q2(name: str, divisor: float, rule: int) -> AffineFormat:
    """Return one of the two formats that differ in the plain encoder only."""
    return AffineFormat(
        name=name,
        block_size=32,
        block_bytes=12,
        n_codes=4,
        divisor=divisor,
        parameters=F16_PAIR,
        base_at=0,
        scale_at=2,
        pack_codes=_pack,
        unpack_codes=_unpack,
        codes_kernel=_codes_q2,
        code=code_q2,
        rule=rule,
    )


Q2_B32T1A = _q2("q2_b32t1a", divisor=3, rule=RANGE)
Q2_B32T1B = _q2("q2_b32t1b", divisor=4, rule=MIDRISE)
