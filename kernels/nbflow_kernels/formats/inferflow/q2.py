"""2-bit formats: one bit plane of 2-bit codes.

``q2_b32t1a`` and ``q2_b32t1b`` (short name ``q2``): 32 weights in 12 bytes,
(2 + 2 + 8) * 8 / 32 = 3 bits per weight.

weight = base + scale * code, code 0..3.  Reference ``a``: base = min, scale = range / 3; ``b``:
scale = range / 4, base = min + scale / 2 (the middles of 4 equal parts).

Source: Inferflow, quant_types.h (formats Q2_B32T1A and Q2_B32T1B).
"""

from __future__ import annotations

from nbflow_kernels.formats.affine_format import MIDRISE, RANGE, AffineFormat
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16

FIELDS = FieldTable(
    32,
    (float16("base", 0), float16("scale", 2), Field("code", 32, (Plane(4, 2),))),
)

Q2_B32T1A = AffineFormat("q2_b32t1a", FIELDS, RANGE, divisor=3)
Q2_B32T1B = AffineFormat("q2_b32t1b", FIELDS, MIDRISE, divisor=4)
