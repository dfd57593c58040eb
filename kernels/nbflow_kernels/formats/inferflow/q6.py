"""6-bit format: a plane of low nibbles and a plane of the high 2 bits.

``q6_b64t1`` (short name ``q6``): 64 weights in 52 bytes, (2 + 2 + 16 + 32) * 8 / 64 = 6.5 bits per
weight.

weight = base + scale * code, code 0..63.  Reference: base = min, scale = range / 62.

Source: Inferflow, quant_types.h (format Q6_B64T1).
"""

from __future__ import annotations

from nbflow_kernels.formats.affine_format import RANGE, AffineFormat
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16

Q6_B64T1 = AffineFormat(
    "q6_b64t1",
    FieldTable(
        64,
        (
            float16("base", 0),
            float16("scale", 2),
            Field("code", 64, (Plane(4, 2, shift=4), Plane(20, 4))),
        ),
    ),
    RANGE,
    divisor=62,
)
