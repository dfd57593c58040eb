"""5-bit formats: a plane of low nibbles and a plane of the high bit.

``q5_b64t1`` (short name ``q5``): 64 weights in 44 bytes, (2 + 2 + 8 + 32) * 8 / 64 = 5.5 bits per
weight.

weight = base + scale * code, code 0..31.  Reference: base = min, scale = range / 30.

``q5_b32t1``: 32 weights in 24 bytes, (2 + 2 + 4 + 16) * 8 / 32 = 6 bits per weight.  GGML's Q5_1.

weight = base + scale * code, code 0..31.  Reference: base = min, scale = range / 31.

Source: Inferflow, quant_types.h (formats Q5_B64T1 and Q5_B32T1).
"""

from __future__ import annotations

from nbflow_kernels.formats.affine_format import RANGE, AffineFormat
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16

Q5_B64T1 = AffineFormat(
    "q5_b64t1",
    FieldTable(
        64,
        (
            float16("base", 0),
            float16("scale", 2),
            Field("code", 64, (Plane(4, 1, shift=4), Plane(12, 4))),
        ),
    ),
    RANGE,
    divisor=30,
)

Q5_B32T1 = AffineFormat(
    "q5_b32t1",
    FieldTable(
        32,
        (
            float16("scale", 0),
            float16("base", 2),
            Field("code", 32, (Plane(4, 1, shift=4), Plane(8, 4, stride=16))),
        ),
    ),
    RANGE,
    divisor=31,
)
