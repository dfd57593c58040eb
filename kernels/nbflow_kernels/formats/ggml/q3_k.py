"""``q3_k``: 256 weights in 110 bytes, (32 + 64 + 12 + 2) * 8 / 256 = 3.4375 bits per weight.

weight = d * (scale - 32) * (code - 4), scale 0..63 for each 16 weights.

Source: GGML, ggml-common.h (block_q3_K).
"""

from __future__ import annotations

from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16
from nbflow_kernels.formats.ggml.k_format import KQuantFormat

Q3_K = KQuantFormat(
    "q3_k",
    FieldTable(
        256,
        (
            Field("code", 256, (Plane(0, 1, shift=2, stride=32), Plane(32, 2, stride=32))),
            Field("scale", 16, (Plane(96, 4, stride=8), Plane(104, 2, 4, stride=4)), offset=-32),
            float16("d", 108),
        ),
    ),
)
