"""3-bit formats: a plane of the low 2 bits and a plane of the high bit.

``q3_b32t1a`` and ``q3_b32t1b`` (short name ``q3``): 32 weights in 16 bytes,
(2 + 2 + 4 + 8) * 8 / 32 = 4 bits per weight.

weight = base + scale * code, code 0..7.  Reference ``a``: base = min, scale = range / 7; ``b``:
scale = range / 8, base = min + scale / 2 (the middles of 8 equal parts).

Source: Inferflow, quant_types.h (formats Q3_B32T1A and Q3_B32T1B).
"""

from __future__ import annotations

from nbflow_kernels.formats.affine_format import MIDRISE, RANGE, AffineFormat
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16

FIELDS = FieldTable(
    32,
    (
        float16("base", 0),
        float16("scale", 2),
        Field("code", 32, (Plane(4, 1, shift=2), Plane(8, 2))),
    ),
)

Q3_B32T1A = AffineFormat("q3_b32t1a", FIELDS, RANGE, divisor=7)
Q3_B32T1B = AffineFormat("q3_b32t1b", FIELDS, MIDRISE, divisor=8)
