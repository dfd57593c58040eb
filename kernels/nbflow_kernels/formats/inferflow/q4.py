"""4-bit formats: one plane of nibbles.

``q4_b32t1a`` (short name ``q4``) and ``q4_b32t1b``: 32 weights in 20 bytes,
(2 + 2 + 16) * 8 / 32 = 5 bits per weight.  ``q4_b64t1``: 64 weights in 36 bytes,
(2 + 2 + 32) * 8 / 64 = 4.5 bits per weight.

weight = base + scale * code, code 0..15.  Reference: base = min and scale = range / 15 (``a``) or
range / 14 (``b64``); ``b`` cuts the range into 16 equal parts and decodes to their middles: scale =
range / 16, base = min + scale / 2.

``q4_b16``: 16 weights in 10 bytes, (1 + 1 + 8) * 8 / 16 = 5 bits per weight.  Restricted to weights
between -1 and 1.5; scale steps of 0.001 are coarse for small weights.

weight = base + scale * code, code 0..15, with base = u / 100 - 1 and scale = v / 1000 for the bytes
u and v of a block.  Reference: base = min snapped down, scale =
(max - base) / 15.

Source: Inferflow, quant_types.h (formats Q4_B32T1A, Q4_B32T1B, Q4_B64T1, Q4_B16).
"""

from __future__ import annotations

from nbflow_kernels.formats.affine_format import MIDRISE, RANGE, AffineFormat
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16


def _fields(block_size: int) -> FieldTable:
    code = Field("code", block_size, (Plane(4, 4),))
    return FieldTable(block_size, (float16("base", 0), float16("scale", 2), code))


Q4_B32T1A = AffineFormat("q4_b32t1a", _fields(32), RANGE, divisor=15)
Q4_B32T1B = AffineFormat("q4_b32t1b", _fields(32), MIDRISE, divisor=16)
Q4_B64T1 = AffineFormat("q4_b64t1", _fields(64), RANGE, divisor=14)

Q4_B16 = AffineFormat(
    "q4_b16",
    FieldTable(
        16,
        (
            Field("base", 1, (Plane(0, 8),)),
            Field("scale", 1, (Plane(1, 8),)),
            Field("code", 16, (Plane(2, 4),)),
        ),
    ),
    RANGE,
    divisor=15,
)
