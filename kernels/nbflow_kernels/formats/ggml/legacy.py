"""GGML's legacy formats: blocks of 32 weights with one scale, with or without a base.

``q4_0``: 32 weights in 18 bytes, (2 + 16) * 8 / 32 = 4.5 bits per weight.

weight = scale * (code - 8), code 0..15.  Reference: the weight of largest magnitude gets code 0, so
scale = -weight / 8.

``q4_1``: 32 weights in 20 bytes, (2 + 2 + 16) * 8 / 32 = 5 bits per weight.

weight = base + scale * code, code 0..15.  Reference: base = min, scale = range / 15.

``q5_0``: 32 weights in 22 bytes, (2 + 4 + 16) * 8 / 32 = 5.5 bits per weight.

weight = scale * (code - 16), code 0..31.  Reference: the weight of largest magnitude gets code 0,
so scale = -weight / 16.

``q5_1``: 32 weights in 24 bytes, (2 + 2 + 4 + 16) * 8 / 32 = 6 bits per weight.  The bytes of
``q5_b32t1``.

weight = base + scale * code, code 0..31.  Reference: base = min, scale = range / 31.

``q8_0``: 32 weights in 34 bytes, (2 + 32) * 8 / 32 = 8.5 bits per weight.  The bytes of
``q8_b32t2``.

weight = scale * code.  Reference: scale = max|x| / 127, halves rounded away from zero.

Source: GGML, ggml-common.h (block_q4_0 to block_q8_0).
"""

from __future__ import annotations

from dataclasses import replace

from nbflow_kernels.formats.affine_format import (
    GGML_ABSMAX,
    GGML_EXTREME,
    GGML_RANGE,
    AffineFormat,
)
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16
from nbflow_kernels.formats.inferflow.q5 import Q5_B32T1
from nbflow_kernels.formats.inferflow.q8 import Q8_B32T2

Q4_0 = AffineFormat(
    "q4_0",
    FieldTable(32, (float16("scale", 0), Field("code", 32, (Plane(2, 4, stride=16),)))),
    GGML_EXTREME,
    divisor=8,
    zero=8,
)

Q4_1 = AffineFormat(
    "q4_1",
    FieldTable(
        32,
        (float16("scale", 0), float16("base", 2), Field("code", 32, (Plane(4, 4, stride=16),))),
    ),
    GGML_RANGE,
    divisor=15,
)

Q5_0 = AffineFormat(
    "q5_0",
    FieldTable(
        32,
        (
            float16("scale", 0),
            Field("code", 32, (Plane(2, 1, shift=4), Plane(6, 4, stride=16))),
        ),
    ),
    GGML_EXTREME,
    divisor=16,
    zero=16,
)

Q5_1 = replace(Q5_B32T1, name="q5_1", rule=GGML_RANGE)
Q8_0 = replace(Q8_B32T2, name="q8_0", rule=GGML_ABSMAX)
