"""``q2_k``: 256 weights in 84 bytes, (16 + 64 + 2 + 2) * 8 / 256 = 2.625 bits per weight.

weight = d * scale * code - dmin * minimum.

Source: GGML, ggml-common.h (block_q2_K).
"""

from __future__ import annotations

from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16
from nbflow_kernels.formats.ggml.k_format import KQuantFormat

Q2_K = KQuantFormat(
    "q2_k",
    FieldTable(
        256,
        (
            Field("code", 256, (Plane(16, 2, stride=32),)),
            Field("scale", 16, (Plane(0, 4, per_group=1),)),
            Field("min", 16, (Plane(0, 4, bit=4),)),
            float16("d", 80),
            float16("dmin", 82),
        ),
    ),
)
