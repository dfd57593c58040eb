"""5.5-bit format: 45 levels, two weights in 11 bits.

``q5h_b64t1`` (short name ``q5h``): 64 weights in 48 bytes, (2 + 2 + 4 + 8 + 16 + 16) * 8 / 64 = 6
bits per weight; the 32 pair codes alone are 5.5.

The codes x (even index) and y (odd index) of two weights, each 0..44, make c = x + 45 * y, 0..2024.
46 levels would need 2116 pair codes, more than the 2048 of 11 bits.

weight = base + scale * code, code 0..44.  Reference: base = min, scale = range / 44.

Packed layouts store each code in 6 bits.

Source: this project; the packing is that of Inferflow's Q3H_B64T1 with more levels.
"""

from __future__ import annotations

from nbflow_kernels.formats.affine_format import RANGE, AffineFormat
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16

PLANES = (Plane(4, 1, shift=10), Plane(8, 2, shift=8), Plane(16, 4, shift=4), Plane(32, 4))

Q5H_B64T1 = AffineFormat(
    "q5h_b64t1",
    FieldTable(64, (float16("base", 0), float16("scale", 2), Field("code", 64, PLANES, radix=45))),
    RANGE,
    divisor=44,
)
