"""8-bit formats: one byte per weight.

``q8_b32t1``: 32 weights in 36 bytes, (2 + 2 + 32) * 8 / 32 = 9 bits per weight.

weight = base + scale * code.  Reference: base = min, scale = range / 255.

``q8_b32t2`` (short name ``q8``): 32 weights in 34 bytes, (2 + 32) * 8 / 32 = 8.5 bits per weight.
The same bytes as GGML's Q8_0.

weight = scale * code.  Reference: scale = max|x| / 127, halves rounded away from zero.

Source: Inferflow, quant_types.h (formats Q8_B32T1 and Q8_B32T2).
"""

from __future__ import annotations

from nbflow_kernels.formats.affine_format import ABSMAX, RANGE, AffineFormat
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16

Q8_B32T1 = AffineFormat(
    "q8_b32t1",
    FieldTable(32, (float16("base", 0), float16("scale", 2), Field("code", 32, (Plane(4, 8),)))),
    RANGE,
    divisor=255,
)

Q8_B32T2 = AffineFormat(
    "q8_b32t2",
    FieldTable(32, (float16("scale", 0), Field("code", 32, (Plane(2, 8),), signed=True))),
    ABSMAX,
    divisor=127,
    zero=128,
)
