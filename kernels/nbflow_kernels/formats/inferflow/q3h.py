"""3.5-bit format: 11 levels, two weights in 7 bits.

``q3h_b64t1`` (short name ``q3h``): 64 weights in 32 bytes, (2 + 2 + 4 + 8 + 16) * 8 / 64 = 4 bits
per weight; the 32 pair codes alone are 3.5.

The codes x (even index) and y (odd index) of two weights, each 0..10, make c = x + 11 * y, 0..120.

weight = base + scale * code, code 0..10.  Reference: base = min, scale = range / 10.

Source: Inferflow, quant_types.h (format Q3H_B64T1).
"""

from __future__ import annotations

from nbflow_kernels.formats.affine_format import RANGE, AffineFormat
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16

FIELDS = FieldTable(
    64,
    (
        float16("base", 0),
        float16("scale", 2),
        Field("code", 64, (Plane(4, 1, shift=6), Plane(8, 2, shift=4), Plane(16, 4)), radix=11),
    ),
)

Q3H_B64T1 = AffineFormat("q3h_b64t1", FIELDS, RANGE, divisor=10)
